"""Moment matching: the statistics, the curves s(p, D, N), and what they promise."""

import itertools
import math

import pytest
import torch

import lln
from lln import match_moments, reference
from lln.matching.curves import matched_spread
from lln.matching.moments import head_moments, packed_moments, temperatures, tensor_moments

CRITERIA = ("variance", "entropy", "paper")
NAN = float("nan")


def gaussian(*shape, scale=1.0, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=dtype)


def queries_and_keys(batch=2, heads=3, tokens=24, width=8, scale=1.0, **options):
    return gaussian(2, batch, heads, tokens, width, scale=scale, **options).unbind()


def lengths_mask(*lengths, tokens=24):
    return torch.arange(tokens) < torch.tensor(lengths).unsqueeze(-1)


# The curves


@pytest.mark.parametrize(
    ("criterion", "width", "p", "expected"),
    [
        ("variance", 64, 0.25, 1.501),
        ("variance", 64, 1.0, 2.274),
        ("variance", 64, 4.0, 3.799),
        ("variance", 32, 1.0, 2.076),
        ("variance", 128, 1.0, 2.462),
        ("entropy", 64, 0.25, 1.379),
        ("entropy", 64, 1.0, 1.887),
        ("entropy", 64, 4.0, 2.776),
    ],
)
def test_reference_values_of_the_spread(criterion, width, p, expected):
    found = matched_spread(torch.tensor(p, dtype=torch.float64), width, 1024.0, criterion)
    assert found.item() == pytest.approx(expected, rel=0.02)


def test_papers_constants():
    found = matched_spread(torch.tensor(1.7, dtype=torch.float64), 64, 1024.0, "paper").item()
    alpha, beta = reference.matched_temperatures(1.7**0.5, 1.0)
    assert found == pytest.approx(alpha * 1.7**0.5, rel=1e-12)
    assert found == pytest.approx(beta, rel=1e-12)
    assert found == pytest.approx(
        math.sqrt((1.7 + 0.35487039130661086) / (2 * 0.14855178144710912))
    )


@pytest.mark.parametrize("criterion", ["variance", "entropy"])
@pytest.mark.parametrize(("edge", "outside"), [(0.03, 0.0003), (18.0, 1800.0)])
def test_power_law_outside_the_fitted_range(criterion, edge, outside):
    p = torch.tensor([edge, outside], dtype=torch.float64)
    inside, beyond = matched_spread(p, 64, 1024.0, criterion).tolist()
    assert beyond / inside == pytest.approx(math.sqrt(outside / edge), rel=1e-9)


@pytest.mark.parametrize("criterion", ["variance", "entropy"])
@pytest.mark.parametrize(("beyond", "edge"), [(1, 8), (4, 8), (1024, 512)])
def test_head_widths_outside_the_fitted_range_take_the_nearest(criterion, beyond, edge):
    p = torch.tensor(1.3, dtype=torch.float64)
    found, expected = (matched_spread(p, width, 1024.0, criterion) for width in (beyond, edge))
    assert torch.equal(found, expected)


def test_only_the_entropy_depends_on_the_number_of_keys():
    p = torch.tensor(1.0, dtype=torch.float64)
    counts = (2.0, 64.0, 1024.0, 65536.0, 1e6)
    entropy = [matched_spread(p, 64, n, "entropy").item() for n in counts]
    assert entropy[0] == entropy[1] != entropy[2] != entropy[3] == entropy[4]
    assert len({matched_spread(p, 64, n, "variance").item() for n in counts}) == 1


@pytest.mark.parametrize("criterion", CRITERIA)
def test_more_concentrated_scores_need_a_larger_spread(criterion):
    p = torch.logspace(-4, 3, 200, dtype=torch.float64)
    for width in (8, 64, 512):
        assert (matched_spread(p, width, 1024.0, criterion).diff() > 0).all()


# What the criteria promise, on the reference matrices


def row_variance(matrix):
    return matrix.log().var(-1, correction=0).mean().item()


def measured(criterion, width, p, keys=256):
    """Relative error of the within-row variance of log P, and error of the entropy in bits."""
    q = gaussian(8, 1, 64, width, scale=p**0.25, seed=width)
    k = gaussian(8, 1, keys, width, scale=p**0.25, seed=width + 1)
    lln_matrix = reference.lln_matrix(q, k, *match_moments(q, k, criterion=criterion))
    softmax = reference.softmax_matrix(q, k)
    entropy = (reference.entropy(lln_matrix) - reference.entropy(softmax)).mean().item()
    return row_variance(lln_matrix) / row_variance(softmax) - 1, entropy


GRID = [(width, p) for width in (16, 64, 200) for p in (0.25, 1.0, 4.0)]


def test_variance_criterion_matches_the_variance_of_log_p():
    errors = [abs(measured("variance", *point)[0]) for point in GRID]
    assert max(errors) < 0.07
    assert sum(errors) / len(errors) < 0.03


def test_entropy_criterion_matches_the_entropy():
    errors = [abs(measured("entropy", *point)[1]) for point in GRID]
    assert max(errors) < 0.5
    assert sum(errors) / len(errors) < 0.12


def test_the_two_criteria_are_not_the_same():
    assert measured("variance", 64, 1.0)[1] < -0.4
    assert measured("entropy", 64, 1.0)[0] < -0.2


# The statistics


def test_head_moments_by_hand():
    q, k = queries_and_keys(scale=1.7)
    k = k + gaussian(1, 3, 1, 8, seed=5)
    moments = head_moments(q, k)
    for b in range(2):
        for h in range(3):
            assert moments.query_variance[b, h].item() == pytest.approx(
                sum(x * x for x in q[b, h].flatten().tolist()) / (24 * 8)
            )
            by_feature = [
                sum((x - sum(column) / 24) ** 2 for x in column) / 24
                for column in k[b, h].T.tolist()
            ]
            assert moments.key_variance[b, h].item() == pytest.approx(sum(by_feature) / 8)
    assert moments.keys.tolist() == [[24], [24]]
    assert not moments.degenerate.any()


def test_score_variance_is_the_product_of_the_moments():
    """E_i Var_j(q_i·k_j/√d) = σq²σk² for isotropic inputs, whatever the mean of the keys."""
    q, k = gaussian(1, 1, 512, 64), gaussian(1, 1, 512, 64, scale=1.4, seed=1) + 3.0
    moments = head_moments(q, k)
    scores = reference.log_softmax_kernel(q, k)
    expected = scores.var(-1, correction=0).mean()
    found = (moments.query_variance * moments.key_variance).squeeze()
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0)


def test_temperatures_divide_the_spread():
    q, k = queries_and_keys(scale=1.7)
    k = 0.4 * k
    for criterion in ("variance", "entropy"):
        alpha, beta = match_moments(q, k, criterion=criterion)
        moments = head_moments(q, k)
        p = moments.query_variance * moments.key_variance
        spread = matched_spread(p, 8, 24.0, criterion)
        torch.testing.assert_close(alpha[..., 0, 0], spread / moments.query_variance.sqrt())
        torch.testing.assert_close(beta[..., 0, 0], spread / moments.key_variance.sqrt())
        assert alpha.shape == beta.shape == (2, 3, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tensor_scope_is_the_authors_standard_deviation(dtype):
    q, k = queries_and_keys(scale=1.7, dtype=dtype)
    q = q + 0.3
    alpha, beta = match_moments(q, k, criterion="paper", scope="tensor")
    expected = reference.matched_temperatures(q.std().item(), k.std().item())
    assert (alpha.item(), beta.item()) == pytest.approx(expected, rel=1e-5)
    assert alpha.shape == beta.shape == (1, 1, 1, 1)
    moments = tensor_moments(q, k)
    assert moments.query_variance.item() == pytest.approx(q.var().item(), rel=1e-5)


def test_tensor_scope_with_a_mask_counts_valid_tokens_only():
    q, k = queries_and_keys()
    mask = lengths_mask(24, 10)
    alpha, beta = match_moments(q, k, criterion="paper", scope="tensor", key_mask=mask)
    valid = [torch.cat([t[0].flatten(), t[1, :, :10].flatten()]).std().item() for t in (q, k)]
    assert (alpha.item(), beta.item()) == pytest.approx(reference.matched_temperatures(*valid))


@pytest.mark.parametrize("scope", ["head", "tensor"])
@pytest.mark.parametrize("fill", [NAN, math.inf, -math.inf, 1e8, 1e30])
def test_what_lies_under_the_mask_has_no_effect(scope, fill):
    q, k = queries_and_keys(dtype=torch.float32)
    mask = lengths_mask(24, 10)
    expected = match_moments(q, k, scope=scope, key_mask=mask)
    hidden = ~mask[:, None, :, None]
    q, k = (tensor.masked_fill(hidden, fill) for tensor in (q, k))
    found = match_moments(q, k, scope=scope, key_mask=mask)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("criterion", ["variance", "entropy"])
def test_mask_is_the_same_as_leaving_the_tokens_out(criterion):
    q, k = queries_and_keys()
    masked = match_moments(q, k, criterion=criterion, key_mask=lengths_mask(24, 10))
    alone = match_moments(q[1:, :, :10], k[1:, :, :10], criterion=criterion)
    for found, expected in zip(masked, alone, strict=True):
        torch.testing.assert_close(found[1:], expected)


def test_mask_of_cross_attention_is_for_the_keys():
    q, k = queries_and_keys(tokens=24)
    q = q[:, :, :15]
    mask = lengths_mask(24, 10)
    moments = head_moments(q, k, mask)
    torch.testing.assert_close(moments.query_variance, q.square().mean((-1, -2)))
    torch.testing.assert_close(
        moments.key_variance[1:], head_moments(q, k[:, :, :10]).key_variance[1:]
    )
    assert moments.keys.tolist() == [[24], [10]]


@pytest.mark.parametrize("criterion", ["variance", "entropy"])
def test_samples_and_heads_are_independent(criterion):
    q, k = queries_and_keys()
    expected = match_moments(q, k, criterion=criterion)
    loud_q, loud_k = q.clone(), k.clone()
    loud_q[1], loud_k[0, 2] = 30 * q[1], 1e-3 * k[0, 2]
    found = match_moments(loud_q, loud_k, criterion=criterion)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one[0, :2], other[0, :2])
        assert not torch.isclose(one[1:], other[1:]).any()


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("scope", ["head", "tensor"])
def test_grouped_queries_are_repeated_keys(criterion, scope):
    q, k = queries_and_keys(heads=6)
    k = k[:, :2]
    found = match_moments(q, k, criterion=criterion, scope=scope)
    repeated = match_moments(q, k.repeat_interleave(3, 1), criterion=criterion, scope="head")
    if scope == "head":
        for one, other in zip(found, repeated, strict=True):
            torch.testing.assert_close(one, other)
    else:
        assert found[0].shape == (1, 1, 1, 1)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("scope", ["head", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [0.0, 1.0, 1000.1])
@pytest.mark.parametrize("which", ["query", "key"])
def test_degenerate_inputs_give_exactly_one(criterion, scope, dtype, value, which):
    q, k = queries_and_keys(dtype=torch.float64)
    constant = torch.full_like(q, value)
    if which == "query":
        q = constant
    else:
        k = constant
    alpha, beta = match_moments(q.to(dtype), k.to(dtype), criterion=criterion, scope=scope)
    centred = scope == "tensor"
    if which == "query" and value and not centred:
        # The second moment of the queries is not centred: a constant query has a spread.
        assert alpha.isfinite().all()
        assert not (alpha == 1).any()
    else:
        assert (alpha == 1).all()
        assert (beta == 1).all()


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("scope", ["head", "tensor"])
def test_nothing_to_measure_gives_exactly_one(criterion, scope):
    q, k = queries_and_keys()
    options = {"criterion": criterion, "scope": scope}
    hidden = match_moments(q, k, key_mask=torch.zeros(2, 24, dtype=torch.bool), **options)
    empty = match_moments(q[:, :, :0], k[:, :, :0], **options)
    one = match_moments(q[:1, :1, :1, :1], k[:1, :1, :1, :1], **options)
    for alpha, beta in (hidden, empty, one):
        assert (alpha == 1).all()
        assert (beta == 1).all()


def test_one_degenerate_head_leaves_the_others():
    q, k = queries_and_keys()
    expected = match_moments(q, k)
    k[1, 2] = 4.0
    found = match_moments(q, k)
    for one, other in zip(found, expected, strict=True):
        assert one[1, 2].item() == 1.0
        one[1, 2] = other[1, 2]
        assert torch.equal(one, other)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("size", [1e-3, 1e3, 1e4])
def test_small_and_large_inputs_are_finite(criterion, size):
    q, k = queries_and_keys(scale=size, dtype=torch.float32)
    alpha, beta = match_moments(q, k, criterion=criterion)
    assert ((alpha > 0) & alpha.isfinite()).all()
    assert ((beta > 0) & beta.isfinite()).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scope", ["head", "tensor"])
@pytest.mark.parametrize("sizes", [(1e19, 1.0), (3.0, 1e19), (1e18, 1e19), (1e10, 1e10)])
def test_squares_of_huge_inputs_do_not_overflow(sizes, scope, masked):
    """Scores of softmax attention are finite there."""
    q, k = (
        side * size for side, size in zip(queries_and_keys(dtype=torch.float32), sizes, strict=True)
    )
    options = {"scope": scope, "criterion": "variance" if scope == "head" else "paper"}
    options["key_mask"] = lengths_mask(24, 20) if masked else None
    expected = match_moments(q.double(), k.double(), **options)
    for found, wide in zip(match_moments(q, k, **options), expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wide, rtol=1e-5, atol=0)


def test_a_huge_head_leaves_the_bits_of_others():
    q, k = queries_and_keys(dtype=torch.float32)
    expected = match_moments(q, k)
    q[1, 2] *= 1e19
    for found, other in zip(match_moments(q, k), expected, strict=True):
        assert found[1, 2].isfinite()
        found[1, 2] = other[1, 2]
        assert torch.equal(found, other)


def test_huge_packed_inputs_are_matched():
    q, k, v = gaussian(3, 60, 2, 8, dtype=torch.float32).unbind()
    bounds = torch.tensor([0, 25, 60])
    out = lln.lln_attention_varlen(q * 1e19, k, v, bounds)
    wide = lln.lln_attention_varlen(q.double() * 1e19, k.double(), v.double(), bounds)
    torch.testing.assert_close(out, wide.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mean", [0.0, 0.9, 1.1, 300.0])
def test_a_mean_of_the_keys_loses_no_digits(mean):
    """Around a spread of 1 the way of adding up squares changes, head by head."""
    q, k = queries_and_keys(dtype=torch.float32)
    k[:, 0] += mean
    found, wanted = match_moments(q, k), match_moments(q.double(), k.double())
    for one, other in zip(found, wanted, strict=True):
        assert ((one - other).abs() <= 2e-6 * other).all()


@pytest.mark.parametrize("mask", [None, torch.ones(2, 24, dtype=torch.bool)], ids=["plain", "mask"])
@pytest.mark.parametrize(("spread", "flat"), [(1.5e-3, False), (0.5e-3, True)])
def test_a_spread_counts_from_a_millionth_of_the_size_on(mask, spread, flat):
    q, k = queries_and_keys(width=64)
    assert (head_moments(q, 1000 + spread * k, mask).degenerate == flat).all()


@pytest.mark.parametrize("layout", ["heads before tokens", "tokens before heads"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (37, 64), (48, 80), (4096, 64), (3, 1100)])
def test_squares_are_summed_without_rounding_away_digits(tokens, width, layout):
    q, k = queries_and_keys(heads=2, tokens=tokens, width=width, dtype=torch.float32)
    if layout == "tokens before heads":
        q, k = (side.transpose(1, 2).contiguous().transpose(1, 2) for side in (q, k))
    moments = head_moments(q, k)
    expected = q.double().square().mean((-1, -2))
    torch.testing.assert_close(moments.query_variance.double(), expected, rtol=5e-7, atol=0)
    expected = k.double().var(-2, correction=0).mean(-1)
    torch.testing.assert_close(moments.key_variance.double(), expected, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_temperatures_are_detached(criterion):
    q, k = (tensor.requires_grad_() for tensor in queries_and_keys())
    for scope in ("head", "tensor"):
        for temperature in match_moments(q, k, criterion=criterion, scope=scope):
            assert not temperature.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_narrow_inputs_are_measured_in_float32(dtype):
    q, k = (tensor.to(dtype) for tensor in queries_and_keys(tokens=400, scale=30.0))
    found = match_moments(q, k)
    expected = match_moments(q.double(), k.double())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=0)


@pytest.mark.parametrize("criterion", ["variance", "entropy"])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_packed_is_every_sequence_by_itself(criterion, key_heads):
    q, k = gaussian(60, 4, 8), gaussian(60, key_heads, 8, seed=1) + 2.0
    bounds = [0, 7, 7, 8, 31, 60]
    k[7] = 5.0
    moments = packed_moments(q, k, torch.tensor(bounds))
    alpha, beta = temperatures(moments, 8, criterion)
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        own = (tensor[start:end].transpose(0, 1)[None] for tensor in (q, k))
        for found, expected in zip(
            (alpha, beta), match_moments(*own, criterion=criterion), strict=True
        ):
            torch.testing.assert_close(found[i : i + 1], expected, rtol=1e-12, atol=0)
    # One empty sequence and one of a single token: nothing to match.
    assert (alpha[1:3] == 1).all()


def test_packed_entry_point_uses_them():
    q, k, v = gaussian(3, 60, 2, 8).unbind()
    bounds = torch.tensor([0, 25, 60])
    alpha, beta = temperatures(packed_moments(q, k, bounds), 8, "entropy")
    found = lln.lln_attention_varlen(q, k, v, bounds, matching="entropy")
    expected = lln.lln_attention_varlen(q, k, v, bounds, alpha=alpha, beta=beta)
    assert torch.equal(found, expected)
