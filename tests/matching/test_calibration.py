"""Calibration on real activations: the entropy of softmax attention, measured and met."""

import pytest
import torch
from torch.nn import functional as F

from lln import calibrate, lln_attention, match_moments, reference
from lln.errors import CalibrationWarning, InvalidInputError
from lln.matching.calibration import ENOUGH_TOKENS

N, D = 384, 32

few_tokens = pytest.mark.filterwarnings(
    "ignore:α and β of a head rest:lln.errors.CalibrationWarning"
)
sharp_heads = pytest.mark.filterwarnings("ignore:.*far above the:lln.errors.CalibrationWarning")


def gaussian(generator, *shape):
    return torch.randn(*shape, generator=generator)


def student(generator, *shape):
    """Student-t with five degrees of freedom."""
    squares = sum(torch.randn(*shape, generator=generator).square() for _ in range(5))
    return torch.randn(*shape, generator=generator) / (squares / 5).sqrt()


def varying_norms(generator, *shape):
    norms = torch.randn(*shape[:-1], 1, generator=generator).mul(0.7).exp()
    return norms * torch.randn(*shape, generator=generator)


DRAWS = {"gaussian": gaussian, "student": student, "varying_norms": varying_norms}
every_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


def inputs(draw=gaussian, batch=2, heads=2, tokens=N, width=D, key_heads=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = draw(generator, batch, heads, tokens, width)
    return q, draw(generator, batch, key_heads or heads, tokens, width)


def entropy_gap(q, k, temperatures, keep=None):
    """Entropy of LLN minus that of softmax attention, in bits, for every sample and head."""
    found = reference.lln_matrix(q, k, *temperatures, keep=keep)
    return reference.entropy(found) - reference.entropy(reference.softmax_matrix(q, k, keep=keep))


@every_draw
@pytest.mark.parametrize("scale", [0.7, 1.0])
def test_entropy_of_softmax_is_met(draw, scale):
    q, k = (scale * tensor for tensor in inputs(draw))
    assert entropy_gap(q, k, calibrate(q, k)).abs().max() < 0.3


@every_draw
def test_entropy_is_met_closely_on_the_rows_that_were_measured(draw):
    q, k = inputs(draw)
    assert entropy_gap(q, k, calibrate(q, k, rows=N, steps=18)).abs().max() < 0.005


@pytest.mark.parametrize("draw", [student, varying_norms])
def test_formulas_fail_where_calibration_does_not(draw):
    q, k = inputs(draw)
    formula = entropy_gap(q, k, match_moments(q, k, criterion="entropy")).abs()
    measured = entropy_gap(q, k, calibrate(q, k)).abs()
    assert (formula > 2.0).all()
    assert (measured < 0.3).all()


def test_formula_and_calibration_agree_on_gaussians():
    q, k = inputs(batch=4, heads=4, width=64)
    formula = match_moments(q, k, criterion="entropy")
    for found, expected in zip(calibrate(q, k), formula, strict=True):
        torch.testing.assert_close(found.mean(), expected.mean(), rtol=0.04, atol=0)


def test_both_temperatures_share_one_spread():
    q, k = inputs()
    k = 3 * k + 1.0
    alpha, beta = calibrate(q, k)
    spread_q = alpha[..., 0, 0] * q.square().mean((-1, -2)).sqrt()
    spread_k = beta[..., 0, 0] * k.var(-2, correction=0).mean(-1).sqrt()
    torch.testing.assert_close(spread_q, spread_k)


def test_scale_of_the_softmax():
    q, k = inputs()
    found = calibrate(q, k, scale=2 / D**0.5)
    expected = calibrate(2 * q, k)
    torch.testing.assert_close(found[0], 2 * expected[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=0)


def test_batch_scope_is_one_value_a_head():
    q, k = inputs(batch=3)
    q, k = (torch.tensor([0.8, 1.0, 1.2])[:, None, None, None] * tensor for tensor in (q, k))
    alpha, beta = calibrate(q, k, scope="batch", rows=N)
    assert alpha.shape == beta.shape == (1, 2, 1, 1)
    assert entropy_gap(q, k, (alpha, beta)).mean(0).abs().max() < 0.02


def test_batch_scope_of_one_sample_is_head_scope():
    q, k = inputs(batch=1)
    for found, expected in zip(calibrate(q, k, scope="batch"), calibrate(q, k), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("fill", [0.0, float("nan"), float("inf"), 1e4])
def test_batch_scope_does_not_count_a_sample_without_tokens(fill):
    q, k = inputs()
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[1] = False
    expected = calibrate(q[:1], k[:1], scope="batch", key_mask=mask[:1])
    q[1], k[1] = fill, fill
    found = calibrate(q, k, scope="batch", key_mask=mask)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=0)


@every_draw
@pytest.mark.parametrize("fill", [0.0, float("nan"), 1e4])
def test_masked_tokens_do_not_count(draw, fill):
    q, k = inputs(draw)
    valid = N // 2
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[1, valid:] = False
    expected = calibrate(q[1:, :, :valid], k[1:, :, :valid], rows=valid)
    q[1, :, valid:], k[1, :, valid:] = fill, fill
    found = calibrate(q, k, key_mask=mask, rows=N)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[1:], other, rtol=2e-3, atol=0)


@pytest.mark.parametrize("scope", ["head", "batch"])
@pytest.mark.parametrize("rows", [100, 256])
@pytest.mark.parametrize("before", [0, 90])
def test_padding_moves_no_temperature(before, rows, scope):
    """More rows than tokens, or fewer: the same rows are measured, each of them once."""
    q, k = inputs(varying_norms, batch=1, tokens=170)
    expected = calibrate(q, k, rows=rows, steps=30, scope=scope)
    padded = (F.pad(side, (0, 0, before, 90 - before), value=torch.nan) for side in (q, k))
    mask = torch.ones(1, 170, dtype=torch.bool)
    mask = F.pad(mask, (before, 90 - before))
    found = calibrate(*padded, key_mask=mask, rows=rows, steps=30, scope=scope)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-5, atol=0)


def test_masked_holes_are_met_on_the_valid_rows():
    q, k = inputs()
    mask = torch.rand(2, N, generator=torch.Generator().manual_seed(3)) < 0.6
    temperatures = calibrate(q, k, key_mask=mask)
    for i in range(2):
        own = (tensor[i : i + 1, :, mask[i]] for tensor in (q, k))
        gap = entropy_gap(*own, [side[i : i + 1] for side in temperatures])
        assert gap.abs().max() < 0.1


def test_grouped_queries_are_repeated_keys():
    q, k = inputs(heads=4, key_heads=2)
    found, expected = calibrate(q, k), calibrate(q, k.repeat_interleave(2, 1))
    assert all(map(torch.equal, found, expected))
    assert found[0].shape == (2, 4, 1, 1)


def test_cross_attention():
    q, k = inputs()
    q = q[:, :, :100]
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[1, 200:] = False
    temperatures = calibrate(q, k, key_mask=mask)
    assert entropy_gap(q, k, temperatures, keep=mask[:, None, None]).abs().max() < 0.02


@sharp_heads
def test_samples_are_independent():
    q, k = inputs()
    expected = calibrate(q, k)
    q[1] *= 50
    found = calibrate(q, k)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(found, expected, strict=True))


@few_tokens
@pytest.mark.parametrize("tokens", [2, 3, 5, 17])
def test_few_tokens(tokens):
    q, k = inputs(tokens=tokens)
    alpha, beta = calibrate(q, k)
    assert ((alpha > 0) & alpha.isfinite()).all()
    assert ((beta > 0) & beta.isfinite()).all()
    assert entropy_gap(q, k, (alpha, beta)).abs().max() < 0.02


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("scope", ["head", "batch"])
def test_nothing_to_measure_is_refused(tokens, scope):
    with pytest.raises(InvalidInputError, match=f"two tokens .* the longest one has {tokens}; cal"):
        calibrate(*inputs(tokens=tokens), scope=scope)
    mask = torch.arange(N).expand(2, N) < tokens
    with pytest.raises(InvalidInputError, match=f"the longest one has {tokens}"):
        calibrate(*inputs(), scope=scope, key_mask=mask)


@pytest.mark.parametrize("scope", ["head", "batch"])
def test_few_tokens_are_warned_of(scope):
    """Of heads that are alike, α scatters by 9 % and more below this number."""
    needed = ENOUGH_TOKENS if scope == "head" else ENOUGH_TOKENS // 2
    calibrate(*inputs(tokens=needed), scope=scope)
    seen = needed - 1 if scope == "head" else 2 * (needed - 1)
    with pytest.warns(CalibrationWarning, match=f"rest on {seen} tokens, too few to trust"):
        calibrate(*inputs(tokens=needed - 1), scope=scope)
    mask = torch.zeros(2, N, dtype=torch.bool)
    mask[0, :9] = True
    with pytest.warns(CalibrationWarning, match="rest on 9 tokens"):
        calibrate(*inputs(), scope=scope, key_mask=mask)


def test_that_many_tokens_are_enough():
    """α of heads that are alike: within a tenth of each other, and two tokens are not."""

    def scatter(tokens):
        alpha, _ = calibrate(*inputs(heads=48, batch=1, tokens=tokens))
        return (alpha.std() / alpha.mean()).item()

    assert scatter(ENOUGH_TOKENS) < 0.1
    with pytest.warns(CalibrationWarning):
        assert scatter(2) > 0.3


def test_heads_that_attend_to_a_single_token_are_warned_of():
    q, k = inputs()
    q[:, 1] *= 50
    for scope, of in (("head", 4), ("batch", 2)):
        with pytest.warns(
            CalibrationWarning, match=rf"^{of // 2} of {of} heads got α up to \d+ and"
        ):
            calibrate(q, k, scope=scope)


@few_tokens
@pytest.mark.parametrize("value", [0.0, 1.0, 1000.1])
@pytest.mark.parametrize("scope", ["head", "batch"])
def test_constant_keys_give_exactly_one(value, scope):
    q, k = inputs(tokens=50)
    for side in calibrate(q, torch.full_like(k, value), scope=scope):
        assert (side == 1).all()


def test_constant_queries_are_met_as_any_other():
    q, k = inputs()
    q = torch.full_like(q, 0.8)
    assert entropy_gap(q, k, calibrate(q, k)).abs().max() < 0.02


def test_one_dead_head_leaves_the_others():
    q, k = inputs()
    expected = calibrate(q, k)
    k[1, 1] = 2.0
    found = calibrate(q, k)
    for one, other in zip(found, expected, strict=True):
        assert one[1, 1].item() == 1
        assert torch.equal(one[:, 0], other[:, 0])
        assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes(dtype):
    q, k = (tensor.to(dtype) for tensor in inputs())
    temperatures = calibrate(q, k)
    assert entropy_gap(q, k, temperatures).abs().max() < 0.1
    assert not temperatures[0].requires_grad


def test_result_carries_no_gradient_and_inputs_stay():
    q, k = (tensor.requires_grad_() for tensor in inputs())
    alpha, beta = calibrate(q, k)
    assert not alpha.requires_grad
    assert not beta.requires_grad
    assert q._version == k._version == 0


def test_slices_of_the_work_change_nothing(monkeypatch):
    q, k = inputs()
    expected = calibrate(q, k)
    monkeypatch.setattr("lln.matching.calibration.PAIR_BUDGET", 1)
    for found, other in zip(calibrate(q, k), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-4, atol=0)


def test_temperatures_feed_attention():
    q, k = inputs(student)
    v = torch.randn_like(q)
    alpha, beta = calibrate(q, k)
    expected = reference.lln_attention(q, k, v, alpha, beta)
    found = lln_attention(q, k, v, alpha=alpha, beta=beta)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
