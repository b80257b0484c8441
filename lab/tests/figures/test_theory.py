"""Predictions against Monte Carlo, theorems under hypothesis, and where they fail."""

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.instruments.test_public import check_arguments_are_documented

from lln import InvalidInputError, instruments
from lln.instruments import of_matrix
from lln_lab.figures import theory


@st.composite
def stochastic_matrices(draw, square=False):
    """Softmax of Gaussian scores of any spread, sometimes causal, sometimes with one-hot rows."""
    rows = draw(st.integers(1, 24))
    columns = rows if square else draw(st.integers(1, 24))
    spread = draw(st.floats(0, 60))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scores = spread * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        hidden = torch.ones(rows, columns, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    matrix = scores.softmax(-1)
    if draw(st.booleans()):
        matrix[0] = torch.eye(columns, dtype=torch.float64)[draw(st.integers(0, columns - 1))]
    return matrix


@given(stochastic_matrices(), st.floats(1.001, 50))
def test_theorem_3_2_holds(matrix, factor):
    check = theory.theorem_3_2(matrix, factor)
    assert check.holds.all(), check


@given(stochastic_matrices(), st.floats(1.001, 50))
def test_theorem_3_4_holds(matrix, factor):
    check = theory.theorem_3_4(matrix, factor)
    assert check.holds.all(), check


@given(stochastic_matrices(square=True))
def test_the_second_eigenvalue_is_at_most_the_first_singular_value(matrix):
    check = theory.spectral_bound(matrix)
    assert check.holds.all(), check


@given(stochastic_matrices(), st.floats(1.001, 5))
def test_the_checks_are_not_blind(matrix, factor):
    """Cooling is the reverse of heating: the same inequality, the other way round."""
    cold, hot = matrix, theory.at_temperature(matrix, factor)
    entropy = of_matrix.entropy(torch.stack([cold, hot]))
    again = theory.at_temperature(hot, 1 / factor)
    if (matrix[matrix > 0] > 1e-200).all():
        torch.testing.assert_close(again, cold, rtol=1e-9, atol=1e-12)
    assert entropy[1] >= entropy[0] - 1e-9


def test_slope_of_the_entropy_has_the_factor_the_proof_drops():
    matrix = torch.randn(20, 30, dtype=torch.float64).mul(2).softmax(-1)
    step = 1e-5
    hot, cold = (theory.at_temperature(matrix, 1 + sign * step) for sign in (1, -1))
    measured = (of_matrix.entropy(hot) - of_matrix.entropy(cold)) / (2 * step)
    torch.testing.assert_close(theory.entropy_slope(matrix), measured, rtol=1e-6, atol=0)
    as_printed = theory.entropy_slope(matrix) * math.log(2)
    assert abs(as_printed / measured - 1) > 0.3


def test_theorem_3_3_holds_for_a_normal_matrix_and_fails_for_attention():
    circulant = torch.rand(12, dtype=torch.float64).softmax(-1)
    normal = torch.stack([circulant.roll(shift) for shift in range(12)])
    assert theory.departure_from_normality(normal) < 1e-12
    assert theory.theorem_3_3(normal).holds
    scores = torch.randn(64, 64, dtype=torch.float64)
    attention = scores.softmax(-1)
    check = theory.theorem_3_3(attention)
    assert theory.departure_from_normality(attention) > 0.1
    assert not check.holds
    assert check.right > 1.5 * check.left
    assert theory.spectral_bound(attention).holds


def test_the_spread_of_theorem_3_3_may_exceed_one():
    """Half of the tokens read the first, half the second: σ₁(P̄) = √N/2·√2, while |λ₂| ≤ 1."""
    matrix = torch.zeros(50, 50, dtype=torch.float64)
    matrix[:25, 0] = matrix[25:, 1] = 1
    check = theory.theorem_3_3(matrix)
    assert check.right.item() == pytest.approx(5)
    assert check.left.item() == 0


@pytest.mark.parametrize("factor", [1.0, 0.5, math.nan])
def test_factors_that_do_not_heat_are_refused(factor):
    matrix = torch.eye(2)
    for check in (theory.theorem_3_2, theory.theorem_3_4):
        with pytest.raises(InvalidInputError, match="greater than 1"):
            check(matrix, factor)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf])
def test_temperatures_that_do_not_exist_are_refused(factor):
    with pytest.raises(InvalidInputError, match="positive and finite"):
        theory.at_temperature(torch.eye(2), factor)


def test_checks_take_batches_and_zero_rows():
    matrix = torch.rand(2, 3, 8, 8).softmax(-1)
    matrix[:, :, 5:] = 0
    matrix[:, :, :, 5:] = 0
    matrix[:, :, :5, :5] = torch.rand(2, 3, 5, 5).softmax(-1)
    for check in (theory.theorem_3_2, theory.theorem_3_4, theory.spectral_bound):
        found = check(matrix)
        assert found.holds.shape == (2, 3)
        assert found.holds.all()


# Predictions


@pytest.mark.parametrize(("variance", "terms"), [(0.2, 64), (1.0, 64), (0.5, 16), (0.5, 512)])
def test_fenton_in_the_moderate_case(variance, terms):
    measured = theory.sample_sum_variance(variance, terms, draws=20000)
    assert theory.fenton_variance(variance, terms) == pytest.approx(measured, rel=0.06)


def test_fenton_fails_at_the_working_point():
    assert theory.fenton_variance(10.0, 64) > 3 * theory.sample_sum_variance(10.0, 64, draws=20000)


def test_fenton_mean():
    normal = torch.randn(20000, 64, dtype=torch.float64).mul(0.8)
    assert theory.fenton_mean(0.64, 64) == pytest.approx(
        normal.logsumexp(-1).mean().item(), abs=0.005
    )


def test_narrow_sums():
    measured = theory.sample_sum_variance(0.01, 32, draws=20000)
    assert theory.narrow_sum_variance(0.01, 32) == pytest.approx(measured, rel=0.04)
    assert theory.fenton_variance(0.01, 32) == pytest.approx(measured, rel=0.04)


def test_broad_sums_grow_linearly():
    variances = [16.0, 24.0, 32.0, 40.0]
    measured = [theory.sample_sum_variance(v, 64, draws=20000) for v in variances]
    slope = (measured[-1] - measured[0]) / 24
    line = [theory.broad_variance(v, slope, measured[0] - slope * 16) for v in variances]
    assert line == pytest.approx(measured, rel=0.05)


def test_predictions_take_tensors():
    variance = torch.tensor([0.3, 1.0], dtype=torch.float64)
    for predict in (theory.fenton_variance, theory.fenton_mean, theory.narrow_sum_variance):
        one_by_one = torch.tensor([predict(v, 16) for v in variance.tolist()], dtype=torch.float64)
        torch.testing.assert_close(predict(variance, 16), one_by_one)
    mean, spread = theory.proposition_3_1(variance, 512)
    torch.testing.assert_close(mean, -math.log(512) - variance / 2)
    torch.testing.assert_close(spread, variance)


@pytest.mark.parametrize("p", [0.5, 2.0])
def test_proposition_3_1(p):
    query, key = p**0.25 * torch.randn(2, 1, 4, 1024, 64, dtype=torch.float64)
    measured = instruments.log_normality(query, key)
    predicted = theory.proposition_3_1(p, 1024)
    assert measured.row_variance.mean().item() == pytest.approx(predicted.variance, rel=0.02)
    assert measured.mean.mean().item() == pytest.approx(predicted.mean, abs=0.05)
    total = theory.softmax_total_variance(p, 64)
    assert measured.variance.mean().item() == pytest.approx(total, rel=0.02)


def test_equation_32_counts_the_shared_query_twice():
    """σ²_nom + σ²_den against the variance of log P itself."""
    exponent_q, exponent_k = 2.3 * torch.randn(2, 256, 32, dtype=torch.float64)
    kernel = (exponent_q[:, None] + exponent_k).logsumexp(-1)
    numerator = kernel.var(correction=0)
    denominator = kernel.logsumexp(-1).var(correction=0)
    measured = kernel.log_softmax(-1).var(correction=0)
    assert theory.lln_variance(numerator, denominator) > 1.2 * measured


def test_equation_33_is_a_chord_of_a_curve():
    """The authors' line fits their range as a whole (D = 64, N = 512) and no point inside it."""
    query, key = torch.randn(2, 512, 64, dtype=torch.float64)
    spreads = torch.linspace(0.8, 3.0, 6, dtype=torch.float64)
    measured = []
    for spread in spreads:
        feature_q, feature_k = (spread * query).exp(), (spread * key).exp()
        weights = feature_q @ feature_k.mT
        logs = (weights / weights.sum(-1, keepdim=True)).log()
        measured.append(logs.var(correction=0))
    measured, argument = torch.stack(measured), 2 * spreads**2
    design = torch.stack([argument, torch.ones_like(argument)], -1)
    slope, intercept = torch.linalg.lstsq(design, measured[:, None]).solution.flatten().tolist()
    assert slope == pytest.approx(0.1487, rel=0.08)
    assert intercept == pytest.approx(-0.355, rel=0.25)
    middle = theory.broad_variance(2 * 1.7**2)
    assert middle > 1.1 * measured[2].item()


@pytest.mark.parametrize(
    "function",
    [
        item
        for name, item in vars(theory).items()
        if inspect.isfunction(item) and item.__module__ == theory.__name__ and name[0] != "_"
    ],
    ids=lambda function: function.__name__,
)
def test_arguments_are_documented(function):
    check_arguments_are_documented(function)
