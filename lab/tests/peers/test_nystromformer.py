"""Nyströmformer against its formula, dense and in float64."""

import pytest
import torch
from torch.nn import functional as F

from lln import reference
from lln.errors import InvalidInputError
from lln_lab import peers
from lln_lab.peers.nystromformer import (
    Nystromformer,
    nystrom_attention,
    pseudo_inverse,
    segment_means,
)


def dense(query, key, value, landmarks, inverse):
    """softmax(QK̃ᵀ/√d) Z softmax(Q̃Kᵀ/√d) V of one head, with loops for the means."""
    tokens, width = query.shape
    length = -(-tokens // landmarks)
    starts = range(0, tokens, length)
    few_q = torch.stack([query[i : i + length].mean(0) for i in starts])
    few_k = torch.stack([key[i : i + length].mean(0) for i in starts])
    scale = width**-0.5
    first = torch.softmax(scale * query @ few_k.T, -1)
    middle = torch.softmax(scale * few_q @ few_k.T, -1)
    last = torch.softmax(scale * few_q @ key.T, -1)
    return first @ inverse(middle) @ last @ value


def six_steps(matrix):
    """The iteration as printed in the paper, multiplied out without nesting."""
    eye = torch.eye(len(matrix), dtype=matrix.dtype)
    z = matrix.T / (matrix.abs().sum(0).max() * matrix.abs().sum(1).max())
    for _ in range(6):
        az = matrix @ z
        z = z @ (13 * eye - 15 * az + 7 * az @ az - az @ az @ az) / 4
    return z


@pytest.mark.parametrize("tokens", [1, 5, 8, 24, 30])
def test_agrees_with_the_dense_formula(tokens):
    query, key = torch.randn(2, 2, 3, tokens, 8, dtype=torch.float64)
    value = torch.randn(2, 3, tokens, 5, dtype=torch.float64)
    found = nystrom_attention(query, key, value, landmarks=8)
    for sample in range(2):
        for head in range(3):
            one = (side[sample, head] for side in (query, key, value))
            torch.testing.assert_close(found[sample, head], dense(*one, 8, six_steps))


def test_the_iteration_finds_the_pseudo_inverse():
    matrix = torch.randn(4, 12, 12, dtype=torch.float64).softmax(-1)
    found = pseudo_inverse(matrix, iterations=40)
    torch.testing.assert_close(found, torch.linalg.pinv(matrix), rtol=1e-6, atol=1e-6)


def test_as_many_landmarks_as_tokens_give_softmax_attention():
    query, key, value = torch.randn(3, 1, 2, 10, 16, dtype=torch.float64)
    found = nystrom_attention(query, key, value, landmarks=10, iterations=60)
    torch.testing.assert_close(
        found, reference.softmax_attention(query, key, value), rtol=1e-6, atol=1e-6
    )


def test_the_last_segment_may_be_short():
    tokens = torch.arange(10.0).reshape(1, 1, 10, 1)
    assert segment_means(tokens, 4).flatten().tolist() == [1.0, 4.0, 7.0, 9.0]
    assert segment_means(tokens, 64).flatten().tolist() == list(range(10))


def test_a_sample_does_not_depend_on_its_batch_mates():
    query, key, value = torch.randn(3, 4, 2, 32, 8)
    whole = nystrom_attention(query, key, value, landmarks=8)
    alone = nystrom_attention(query[2:3], key[2:3], value[2:3], landmarks=8)
    torch.testing.assert_close(whole[2:3], alone)


def core(heads=2, width=8, **options):
    host = peers.Host(embed_dim=heads * width, num_heads=heads, max_len=64)
    return Nystromformer(host, **options)


def test_a_convolution_of_every_head_over_the_tokens_is_added():
    module = core(landmarks=4, kernel=3).double()
    query, key, value = torch.randn(3, 1, 2, 16, 8, dtype=torch.float64)
    weight = module.convolution.filter.weight.detach().reshape(2, 3)
    padded = F.pad(value, (0, 0, 1, 1))
    added = sum(weight[:, i].view(1, 2, 1, 1) * padded[:, :, i : i + 16] for i in range(3))
    plain = nystrom_attention(query, key, value, landmarks=4)
    torch.testing.assert_close(module(query, key, value).detach(), plain + added)
    assert peers.parameter_count(core(heads=12)) == 12 * 33
    assert peers.parameter_count(core(kernel=0)) == 0


def test_masked_samples_equal_their_real_tokens_alone():
    # 17 and 3 real tokens leave segments empty; the holes are anywhere.
    query, key, value = torch.randn(3, 3, 2, 24, 8, dtype=torch.float64)
    mask = torch.rand(3, 24, generator=torch.Generator().manual_seed(1)).argsort(-1)
    mask = mask < torch.tensor([[17], [24], [3]])
    module = core(landmarks=8, kernel=0)
    found = module(query, key, value, mask)
    for sample in range(3):
        real = mask[sample]
        for head in range(2):
            one = (side[sample, head, real] for side in (query, key, value))
            expected = dense(*one, 8, six_steps)
            torch.testing.assert_close(found[sample, head, real], expected)


def test_original_start_couples_the_batch():
    query, key, value = torch.randn(3, 3, 2, 32, 8, dtype=torch.float64)
    module = core(landmarks=8, kernel=0, compat="original")
    whole = module(query, key, value)
    alone = module(query[:1], key[:1], value[:1])
    assert (whole[:1] - alone).abs().max() > 1e-6
    exact = core(landmarks=8, kernel=0)
    assert (exact(query, key, value) - whole).abs().max() > 1e-6


def test_released_landmarks_average_the_padding_in():
    query, key, value = torch.randn(3, 2, 2, 24, 8, dtype=torch.float64)
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[:, 17:] = False
    module = core(landmarks=8, kernel=0, compat="released")
    found = module(query, key, value, mask)
    kept = mask[:, None, :, None]
    zeroed = [torch.where(kept, side, 0.0) for side in (query, key)]
    few_q, few_k = (side.unflatten(2, (8, 3)).mean(3) for side in zeroed)
    scale = 8**-0.5
    first = torch.softmax(scale * zeroed[0] @ few_k.mT, -1)
    middle = torch.softmax(scale * few_q @ few_k.mT, -1)
    last = (scale * few_q @ zeroed[1].mT).masked_fill(~mask[:, None, None], float("-inf"))
    start = middle.mT / middle.sum(-2).max()
    inverse = start
    unit = torch.eye(8, dtype=torch.float64)
    for _ in range(6):
        az = middle @ inverse
        inverse = inverse @ (13 * unit - 15 * az + 7 * az @ az - az @ az @ az) / 4
    expected = first @ inverse @ last.softmax(-1) @ value
    torch.testing.assert_close(found[:, :, :17], expected[:, :, :17])
    dense_form = module.matrix(query, key, mask) @ value
    torch.testing.assert_close(found[:, :, :17], dense_form[:, :, :17])
    original = core(landmarks=8, kernel=0, compat="original")
    assert (original(query, key, value, mask) - found)[:, :, :17].abs().max() > 1e-3


def test_released_with_as_many_landmarks_as_tokens_is_softmax():
    query, key, value = torch.randn(3, 2, 2, 24, 8, dtype=torch.float64)
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[:, 17:] = False
    module = core(landmarks=24, kernel=0, compat="released")
    expected = reference.softmax_attention(query, key[:, :, :17], value[:, :, :17])
    torch.testing.assert_close(module(query, key, value, mask)[:, :, :17], expected[:, :, :17])
    found = module.matrix(query, key, mask)[:, :, :17, :17] @ value[:, :, :17]
    torch.testing.assert_close(found, expected[:, :, :17])


def copy_projections(layer, query, key, value, out, convolution):
    """Weights of an oracle into ours, biases zeroed where the oracle has none."""
    with torch.no_grad():
        for ours, theirs in zip(
            (layer.query, layer.key, layer.value, layer.out), (query, key, value, out), strict=True
        ):
            ours.weight.copy_(theirs[0])
            ours.bias.copy_(theirs[1])
        layer.core.convolution.filter.weight.copy_(convolution)


@pytest.mark.parametrize(("start", "compat"), [("original", "original"), ("exact", None)])
def test_agrees_with_transformers(start, compat):
    pytest.importorskip("transformers")
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    config = NystromformerConfig(
        hidden_size=32,
        num_attention_heads=2,
        num_landmarks=8,
        segment_means_seq_len=48,
        conv_kernel_size=5,
        attention_probs_dropout_prob=0.0,
    )
    oracle = NystromformerSelfAttention(config).eval()
    oracle.init_option = start
    layer = peers.build(
        "nystromformer",
        embed_dim=32,
        num_heads=2,
        max_len=48,
        landmarks=8,
        kernel=5,
        compat=compat,
    )
    projections = [(part.weight, part.bias) for part in (oracle.query, oracle.key, oracle.value)]
    unit = (torch.eye(32), torch.zeros(32))
    copy_projections(layer, *projections, unit, oracle.conv.weight)
    x = torch.randn(3, 48, 32)
    torch.testing.assert_close(layer(x), oracle(x)[0], rtol=1e-5, atol=1e-5)


def test_agrees_with_nystrom_attention():
    package = pytest.importorskip("nystrom_attention")
    oracle = package.NystromAttention(
        dim=32, dim_head=16, heads=2, num_landmarks=8, residual_conv_kernel=33
    ).eval()
    layer = peers.build(
        "nystromformer", embed_dim=32, num_heads=2, max_len=32, landmarks=8, compat="original"
    )
    none = torch.zeros(32)
    projections = [(weight, none) for weight in oracle.to_qkv.weight.chunk(3)]
    out = (oracle.to_out[0].weight, oracle.to_out[0].bias)
    copy_projections(layer, *projections, out, oracle.res_conv.weight)
    x = torch.randn(2, 32, 32)
    torch.testing.assert_close(layer(x), oracle(x), rtol=1e-5, atol=1e-5)
    # 30 real tokens fill the same eight segments as 32 with the last two masked.
    mask = torch.ones(2, 32, dtype=torch.bool)
    mask[:, 30:] = False
    torch.testing.assert_close(layer(x, mask)[mask], oracle(x, mask)[mask], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"landmarks": 0}, "landmarks"),
        ({"iterations": 0}, "iterations"),
        ({"kernel": 4}, "odd"),
        ({"compat": "other"}, "'original'"),
    ],
)
def test_bad_options_get_a_sentence(options, said):
    with pytest.raises(InvalidInputError, match=said):
        core(**options)


def test_gradients():
    inputs = [side.requires_grad_() for side in torch.randn(3, 1, 1, 7, 3, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda *qkv: nystrom_attention(*qkv, landmarks=3), inputs)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_finite_and_near(dtype):
    query, key, value = torch.randn(3, 1, 2, 64, 16, dtype=torch.float64)
    found = nystrom_attention(*(side.to(dtype) for side in (query, key, value)), landmarks=8)
    expected = nystrom_attention(query, key, value, landmarks=8)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0.1, atol=0.1)
