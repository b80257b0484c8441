"""FLASH against its formula, the gated attention unit and FLASH-pytorch."""

import pytest
import torch
from torch.nn import functional as F

from lln.errors import InvalidInputError
from lln_lab import peers
from lln_lab.peers import flash


def build(**options):
    """A layer whose queries and keys are large enough to matter."""
    sizes = {"embed_dim": 6, "num_heads": 2, "max_len": 32, "chunk": 8, "key_width": 4}
    layer = peers.build("flash", **{**sizes, **options}).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (layer.gains, layer.shifts, layer.bias.weight):
            parameter += torch.randn(parameter.shape, generator=generator)
    return layer


def turned(row, place):
    """Rotary position of one vector by complex numbers."""
    angles = 10000.0 ** (-torch.arange(0, len(row), 2, dtype=torch.float64) / len(row))
    pairs = torch.view_as_complex(row.reshape(-1, 2).contiguous())
    turns = torch.polar(torch.ones_like(angles), place * angles)
    return torch.view_as_real(pairs * turns).flatten()


def dense(layer, x, real, *, chunk=8, scale=1 / 8, causal=False, rope=True):
    """One sample, pair of tokens after pair of tokens."""
    normed = F.layer_norm(x, (6,), layer.norm.weight, layer.norm.bias)
    gate, value, shared = (F.silu(part(normed)) for part in (layer.gate, layer.value, layer.shared))
    sides = [gain * shared + shift for gain, shift in zip(layer.gains, layer.shifts, strict=True)]
    if rope:
        sides = [torch.stack([turned(row, i) for i, row in enumerate(side)]) for side in sides]
    mixed = torch.zeros_like(value)
    for i in range(len(x)):
        for j in range(len(x)):
            own = i // chunk == j // chunk
            if not real[j] or (causal and j > i):
                continue
            if own:
                bias = layer.bias.weight[layer.chunk - 1 + j - i]
                score = sides[0][i] @ sides[1][j] / chunk + bias
                mixed[i] += score.clamp_min(0) ** 2 * value[j]
            if len(sides) == 4 and not (causal and own):
                mixed[i] += scale * (sides[2][i] @ sides[3][j]) * value[j]
    return x + layer.out(gate * mixed)


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({}, {}),
        ({"is_causal": True}, {"causal": True}),
        ({"rope": False}, {"rope": False}),
        ({"linear": False}, {}),
        ({"linear": False, "is_causal": True}, {"causal": True}),
        ({"scale": "tokens"}, {"scale": None}),
    ],
)
@pytest.mark.parametrize("tokens", [5, 21])
def test_agrees_with_the_dense_formula(tokens, options, form):
    layer = build(**options)
    x = torch.randn(2, tokens, 6, dtype=torch.float64)
    mask = torch.ones(2, tokens, dtype=torch.bool)
    mask[1, 1::3] = False
    for given in (None, mask):
        found = layer(x, given)
        for sample in range(2):
            real = mask[sample] if given is not None else torch.ones_like(mask[0])
            how = {**form, "scale": 1 / int(real.sum())} if "scale" in form else form
            expected = dense(layer, x[sample] * real[:, None], real, **how)
            torch.testing.assert_close(found[sample][real], expected[real])


def test_one_chunk_without_the_linear_branch_is_the_gated_attention_unit():
    layer = build(chunk=12, linear=False, rope=False)
    x = torch.randn(2, 12, 6, dtype=torch.float64)
    normed = layer.norm(x)
    shared = F.silu(layer.shared(normed))
    query, key = (layer.gains[i] * shared + layer.shifts[i] for i in range(2))
    places = torch.arange(12)
    bias = layer.bias.weight[11 + places - places[:, None]]
    weights = F.relu(query @ key.mT / 12 + bias).square()
    unit = F.silu(layer.gate(normed)) * (weights @ F.silu(layer.value(normed)))
    torch.testing.assert_close(layer(x), x + layer.out(unit))
    assert layer.gains.shape[0] == 2


def test_long_chunks_have_a_bias_of_two_turned_vectors(monkeypatch):
    monkeypatch.setattr(flash, "LONGEST_TABLE", 4)
    bias = build(chunk=8).bias
    assert bias.weight.shape == (2, 4)
    rows, columns = (
        torch.stack([turned(bias.weight[side], i) for i in range(5)]) for side in range(2)
    )
    torch.testing.assert_close(bias(5), rows @ columns.T)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [32, 21])
def test_agrees_with_flash_pytorch(causal, tokens):
    package = pytest.importorskip("flash_pytorch")
    oracle = package.FLASH(dim=6, group_size=8, query_key_dim=4, causal=causal)
    scale = "chunk" if causal else "tokens"
    layer = build(is_causal=causal, scale=scale, rope=False).float()
    with torch.no_grad():
        oracle.qk_offset_scale.gamma.add_(torch.randn(4, 4))
        # Theirs: chunk query, linear query, chunk key, linear key; value before gate.
        layer.gains.copy_(oracle.qk_offset_scale.gamma[[0, 2, 1, 3]])
        layer.shifts.copy_(oracle.qk_offset_scale.beta[[0, 2, 1, 3]])
        bias = oracle.rel_pos_bias(torch.zeros(8, 8))
        layer.bias.weight.copy_(torch.cat((bias[:, 0].flip(0), bias[0, 1:])))
        torch.testing.assert_close(layer.bias(8), bias)
        for ours, weight, shift in (
            (layer.value, oracle.to_hidden[0].weight[:12], oracle.to_hidden[0].bias[:12]),
            (layer.gate, oracle.to_hidden[0].weight[12:], oracle.to_hidden[0].bias[12:]),
            (layer.shared, oracle.to_qk[0].weight, oracle.to_qk[0].bias),
            (layer.out, oracle.to_out.weight, oracle.to_out.bias),
        ):
            ours.weight.copy_(weight)
            ours.bias.copy_(shift)
    x = torch.randn(3, tokens, 6)
    torch.testing.assert_close(layer(x), oracle(x), rtol=1e-5, atol=1e-5)
    if causal:
        # Theirs divides by the padded length elsewhere.
        mask = torch.ones(3, tokens, dtype=torch.bool)
        mask[1, 13:] = False
        x = torch.where(mask.unsqueeze(-1), x, 0.0)
        expected = oracle(x, mask=mask)
        torch.testing.assert_close(layer(x, mask)[mask], expected[mask], rtol=1e-5, atol=1e-5)


def test_bfloat16_follows_float32_without_the_residual():
    rounded = build().bfloat16()
    x = torch.randn(2, 30, 6).bfloat16()
    branch = (rounded(x) - x).float()
    exact = rounded.float()(x.float()) - x.float()
    assert (branch - exact).norm() / exact.norm() < 0.03


def test_bad_options_get_a_sentence():
    for options, said in (
        ({"chunk": 0}, "chunk"),
        ({"key_width": 5}, "even"),
        ({"expansion": 0}, "expansion"),
        ({"scale": "heads"}, "'tokens'"),
        ({"scale": "tokens", "is_causal": True}, "later tokens"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            build(**options)
