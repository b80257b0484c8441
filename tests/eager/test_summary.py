"""KeySummary: of, merge, append, read, empty."""

import pytest
import torch

from lln import InvalidInputError, KeySummary, decode_step, lln_attention, reference
from lln.eager.summary import LOG_ZERO
from lln.testing import assert_close, make_qkv

BETA = 1.7


def halves(key, value, at):
    return (
        KeySummary.of(key[:, :, :at], value[:, :, :at], BETA),
        KeySummary.of(key[:, :, at:], value[:, :, at:], BETA),
    )


def assert_same(found, wanted, tolerance=1e-13):
    torch.testing.assert_close(found.log_mass, wanted.log_mass, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.centroid, wanted.centroid, rtol=tolerance, atol=tolerance)
    assert found.beta is wanted.beta


@pytest.fixture
def keys_and_values():
    return make_qkv(2, 3, 12, 4, value_width=5, dtype=torch.float64)[1:]


def test_of_is_logsumexp_and_centroid(keys_and_values):
    key, value = keys_and_values
    summary = KeySummary.of(key, value, BETA)
    weights = (BETA * key).exp()
    torch.testing.assert_close(summary.log_mass, weights.sum(2).log())
    centroid = torch.einsum("bhsd,bhse->bhde", weights, value) / weights.sum(2).unsqueeze(-1)
    torch.testing.assert_close(summary.centroid, centroid)


@pytest.mark.parametrize("at", range(13))
def test_merge_of_two_parts_is_the_whole(keys_and_values, at):
    first, second = halves(*keys_and_values, at)
    whole = KeySummary.of(*keys_and_values, BETA)
    assert_same(first.merge(second), whole)
    assert_same(second.merge(first), whole)


def test_merge_is_associative(keys_and_values):
    key, value = keys_and_values
    parts = [
        KeySummary.of(key[:, :, a:b], value[:, :, a:b], BETA) for a, b in ((0, 3), (3, 4), (4, 12))
    ]
    left = parts[0].merge(parts[1]).merge(parts[2])
    assert_same(left, parts[0].merge(parts[1].merge(parts[2])))


def test_merge_of_far_apart_masses():
    key, value = make_qkv(1, 1, 6, 2, dtype=torch.float64)[1:]
    key[:, :, 3:, 0] += 1e4
    key[:, :, :3, 1] += 1e4
    first, second = halves(key, value, 3)
    assert_same(first.merge(second), KeySummary.of(key, value, BETA))


def test_merge_leaves_its_operands_alone(keys_and_values):
    first, second = halves(*keys_and_values, 5)
    before = [side.clone() for side in (first.log_mass, first.centroid, second.centroid)]
    first.merge(second)
    after = (first.log_mass, first.centroid, second.centroid)
    assert all(map(torch.equal, after, before))


def test_empty_is_neutral(keys_and_values):
    whole = KeySummary.of(*keys_and_values, BETA)
    empty = KeySummary.empty(2, 3, 4, 5, BETA, dtype=torch.float64)
    assert_same(whole.merge(empty), whole, 0)
    assert_same(empty.merge(whole), whole, 0)
    assert (empty.merge(empty).log_mass <= LOG_ZERO / 2).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeySummary.empty(2, 3, 4, 5, BETA),
        lambda: KeySummary.of(torch.randn(2, 3, 0, 4), torch.randn(2, 3, 0, 5), BETA),
        lambda: KeySummary.of(
            torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 5), BETA, torch.zeros(2, 7).bool()
        ),
    ],
    ids=["empty", "no_keys", "all_masked"],
)
def test_summary_of_nothing_reads_zeros(make):
    query = (100 * torch.randn(2, 3, 6, 4)).requires_grad_()
    out = make().read(query, 2.0)
    assert out.shape == (2, 3, 6, 5)
    assert not out.any()
    out.sum().backward()
    assert not query.grad.any()


@pytest.mark.parametrize("at", range(13))
def test_split_and_resume(at):
    query, key, value = make_qkv(2, 3, 12, 4, dtype=torch.float64)
    summary = KeySummary.of(key[:, :, :at], value[:, :, :at], BETA)
    log_mass = summary.log_mass
    earlier = log_mass.clone()
    resumed = summary.append(key[:, :, at:], value[:, :, at:])
    assert resumed is summary
    assert torch.equal(log_mass, earlier)
    wanted = KeySummary.of(key, value, BETA).read(query, 2.0)
    torch.testing.assert_close(summary.read(query, 2.0), wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_read_is_cross_attention(tokens):
    query, key, value = make_qkv(2, 3, tokens, 8, keys=30, value_width=5)
    found = KeySummary.of(key, value, BETA).read(query, 2.2)
    doubles = (tensor.double() for tensor in (query, key, value))
    assert_close(found, reference.lln_attention(*doubles, 2.2, BETA))


@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize("beta_heads", [1, "key", "query"])
def test_grouped_reads(key_heads, beta_heads):
    query, key, value = make_qkv(2, 6, 9, 4, keys=15, key_heads=key_heads)
    heads = {"key": key_heads, "query": 6}.get(beta_heads, 1)
    alpha, beta = 1 + torch.rand(2, 6, 1, 1), 1 + torch.rand(1, heads, 1, 1)
    summary = KeySummary.of(key[:, :, :4], value[:, :, :4], beta)
    found = summary.append(key[:, :, 4:], value[:, :, 4:]).read(query, alpha)
    for head in range(6):
        group = [head * key_heads // 6]
        own_scales = alpha[:, [head]].double(), beta[:, [head * heads // 6]].double()
        doubles = (tensor.double() for tensor in (query[:, [head]], key[:, group], value[:, group]))
        assert_close(found[:, [head]], reference.lln_attention(*doubles, *own_scales))


def test_masks_of_both_parts():
    query, key, value = make_qkv(2, 3, 5, 4, keys=20)
    mask = torch.rand(2, 20) < 0.5
    hidden = ~mask[:, None, :, None]
    key, value = (tensor.masked_fill(hidden, torch.nan) for tensor in (key, value))
    summary = KeySummary.of(key[:, :, :8], value[:, :, :8], BETA, mask[:, :8])
    summary.append(key[:, :, 8:], value[:, :, 8:], key_mask=mask[:, 8:])
    keep = mask[:, None, None, :].expand(-1, 1, 5, -1)
    doubles = (tensor.double() for tensor in (query, key, value))
    assert_close(summary.read(query, 2.0), reference.lln_attention(*doubles, 2.0, BETA, keep=keep))


def test_fully_masked_step_changes_nothing(keys_and_values):
    summary = KeySummary.of(*keys_and_values, BETA)
    before = KeySummary(summary.log_mass, summary.centroid, summary.beta)
    step = torch.full((2, 3, 1, 4), torch.nan), torch.full((2, 3, 1, 5), torch.inf)
    summary.append(*(side.double() for side in step), key_mask=torch.zeros(2, 1).bool())
    assert_same(summary, before, 0)


def test_masked_step_of_one_sample_changes_the_others_only(keys_and_values):
    key, value = keys_and_values
    summary = KeySummary.of(key, value, BETA)
    before = summary.centroid
    summary.append(key[:, :, :1] + 1, value[:, :, :1], key_mask=torch.tensor([[True], [False]]))
    assert torch.equal(summary.centroid[1], before[1])
    assert not torch.isclose(summary.centroid[0], before[0]).all()


def decode(query, key, value, alpha, beta):
    """Row t after t + 1 appended tokens, and the summary at the end."""
    batch, heads, tokens, width = query.shape
    summary = KeySummary.empty(batch, heads, width, value.shape[-1], beta)
    rows = []
    for token in range(tokens):
        now = slice(token, token + 1)
        summary.append(key[:, :, now], value[:, :, now])
        rows.append(summary.read(query[:, :, now], alpha))
    return torch.cat(rows, 2), summary


def test_decoding_4096_tokens_is_parallel_attention():
    query, key, value = make_qkv(1, 1, 4096, 8)
    # A last channel of ones: its attention is the sum of a row's weights.
    value[..., -1] = 1.0
    with torch.no_grad():
        found, summary = decode(query, key, value, 2.3, 2.3)
    doubles = (tensor.double() for tensor in (query, key, value))
    wanted = lln_attention(*doubles, alpha=2.3, beta=2.3, is_causal=True)
    # Each step rounds the log-masses anew; the weights must sum to 1 all the same.
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(found[..., -1], torch.ones(1, 1, 4096), rtol=0, atol=1e-6)
    assert summary.log_mass.shape == (1, 1, 8)
    assert summary.centroid.shape == (1, 1, 8, 8)


def test_size_does_not_grow_with_length():
    summary = KeySummary.empty(2, 3, 4, 5, BETA)
    sizes = set()
    for length in (1, 10, 1000):
        summary.append(torch.randn(2, 3, length, 4), torch.randn(2, 3, length, 5))
        held = (summary.log_mass, summary.centroid)
        sizes.add(sum(tensor.untyped_storage().nbytes() for tensor in held))
    assert sizes == {4 * 2 * 3 * 4 * (5 + 1)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes(dtype):
    query, key, value = make_qkv(2, 3, 9, 4, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    summary = KeySummary.of(key, value, BETA).append(key, value)
    assert summary.log_mass.dtype == summary.centroid.dtype == wide
    out = summary.read(query, 2.0)
    assert out.dtype == dtype
    doubles = (tensor.double() for tensor in (query, key, value))
    assert_close(out, reference.lln_attention(*doubles, 2.0, BETA))


def test_autocast_leaves_the_summary_in_float32():
    query, key, value = make_qkv(2, 3, 50, 8)
    plain = KeySummary.of(key, value, BETA)
    out = plain.read(query, 2.0)
    with torch.autocast("cpu", torch.bfloat16):
        summary = KeySummary.of(key[:, :, :20], value[:, :, :20], BETA)
        summary.append(key[:, :, 20:], value[:, :, 20:])
        found = plain.read(query, 2.0)
    assert_same(summary, plain, 1e-5)
    torch.testing.assert_close(found, out, rtol=1e-5, atol=1e-5)


def test_gradients_through_earlier_reads_stay_valid():
    query, key, value = make_qkv(1, 2, 6, 4, dtype=torch.float64, requires_grad=True)
    found, _ = decode(query, key, value, 2.0, BETA)
    wanted = lln_attention(query, key, value, alpha=2.0, beta=BETA, is_causal=True)
    upstream = torch.randn_like(wanted)
    for grad, expected in zip(
        torch.autograd.grad(found, (query, key, value), upstream.to(found.dtype)),
        torch.autograd.grad(wanted, (query, key, value), upstream),
        strict=True,
    ):
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("other", [1.8, torch.tensor(1.8), torch.full((1, 3, 1, 1), 1.8)])
def test_other_beta_is_refused(keys_and_values, other):
    first, second = KeySummary.of(*keys_and_values, BETA), KeySummary.of(*keys_and_values, other)
    with pytest.raises(InvalidInputError, match="same beta"):
        first.merge(second)
    with pytest.raises(InvalidInputError, match="same beta"):
        second.merge(first)


def test_equal_beta_in_another_object_is_accepted(keys_and_values):
    first = KeySummary.of(*keys_and_values, torch.full((1, 3, 1, 1), 1.5))
    first.merge(KeySummary.of(*keys_and_values, torch.full((1, 3, 1, 1), 1.5)))
    first.merge(KeySummary.of(*keys_and_values, 1.5))


@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (2, 3, 5, 5), (2, 2, 4, 5), (1, 3, 4, 5)], ids=str)
def test_other_shape_is_refused(keys_and_values, shape):
    with pytest.raises(InvalidInputError, match="the same shape"):
        KeySummary.of(*keys_and_values, BETA).merge(KeySummary.empty(*shape, BETA))


@pytest.mark.parametrize(
    "shape", [(2, 3, 7, 5), (1, 3, 7, 4), (2, 4, 7, 4), (2, 2, 7, 4), (3, 7, 4)], ids=str
)
def test_query_that_does_not_fit_is_refused(keys_and_values, shape):
    summary = KeySummary.of(*keys_and_values, BETA)
    with pytest.raises(InvalidInputError, match="query must"):
        summary.read(torch.randn(shape), 2.0)


@pytest.mark.parametrize("shape", [(1, 2, 1, 1), (1, 4, 1, 1), (3, 1, 1, 1), (3,)], ids=str)
def test_beta_that_does_not_fit_is_refused(keys_and_values, shape):
    with pytest.raises(InvalidInputError, match="beta must"):
        KeySummary.of(*keys_and_values, torch.ones(shape))


def test_decode_step_is_append_and_read():
    query, key, value = torch.randn(3, 2, 4, 1, 8)
    one, other = (KeySummary.of(key + 1, value - 1, 2.0) for _ in range(2))
    found = decode_step(query, key, value, one, alpha=1.5)
    expected = other.append(key, value).read(query, 1.5)
    assert torch.equal(found, expected)
    assert torch.equal(one.centroid, other.centroid)


def test_decode_step_refuses_more_than_a_token():
    query, key, value = torch.randn(3, 2, 4, 3, 8)
    summary = KeySummary.empty(2, 4, 8, 8, 2.0)
    with pytest.raises(InvalidInputError, match=r"one token.*T = 3"):
        decode_step(query, key, value, summary, alpha=2.0)
    with pytest.raises(InvalidInputError, match="reference"):
        decode_step(
            *(t[:, :, :1] for t in (query, key, value)), summary, alpha=2.0, impl="reference"
        )
