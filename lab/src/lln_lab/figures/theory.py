"""The paper's propositions and theorems as code: what they predict, and checks on any matrix.

docs/instruments.md says with measured numbers where each holds and where it fails.

Variances of the LLN kernel are written with σ̃² = α²σq² + β²σk², Eq. (26). Arguments may be numbers
or tensors; predictions have their type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lln import reference
from lln.errors import InvalidInputError
from lln.instruments import of_matrix

Number = TypeVar("Number", float, Tensor)

# What rounding may do to an inequality that is an equality in the limit.
_SLACK = 1e-9


class LogNormal(NamedTuple):
    """Mean and variance of a logarithm that is taken to be normal."""

    mean: float | Tensor
    variance: float | Tensor


def proposition_3_1(score_variance: Number, keys: float) -> LogNormal:
    """Proposition 3.1: log P of softmax attention has mean −ln N − p/2 and variance p.

    The variance is right inside a row, whatever p. The mean needs p ≲ 0.7·ln N, where the
    normaliser still is its own expectation; see `softmax_total_variance` for the whole matrix.

    Args:
        score_variance: p = σ²_sm = σq²σk² + C_cross.
        keys: N.
    """
    return LogNormal(-math.log(keys) - score_variance / 2, score_variance)


def softmax_total_variance(score_variance: Number, head_width: int) -> Number:
    """Variance of log P of softmax attention over the whole matrix, p + p²/2D.

    A row's normaliser follows the norm of its query, which varies: its logarithm is about p_i/2
    with p_i of relative variance 2/D. Proposition 3.1 leaves this out.

    Args:
        score_variance: p.
        head_width: D.
    """
    return score_variance + score_variance**2 / (2 * head_width)


def narrow_sum_variance(variance: Number, terms: int) -> Number:
    """Variance of log Σ e^{x_i} for x_i of small variance, σ̃²/n.

    Eq. (27) has n·σ̃², which is the variance of the sum and not of its logarithm.

    Args:
        variance: σ̃² ≪ 1 of every exponent.
        terms: n.
    """
    return variance / terms


def fenton_variance(variance: Number, terms: int) -> Number:
    """Eq. (28) and (29), Fenton: variance of log Σ e^{x_i} is about ln((e^σ̃² − 1)/n + 1).

    Right for σ̃² ≲ 1. Beyond, the second moment it matches is carried by terms too rare to occur.

    Args:
        variance: σ̃² of every exponent.
        terms: n: D for the numerator, Eq. (28), N for the denominator, Eq. (29).
    """
    if isinstance(variance, Tensor):
        return (variance.expm1() / terms).log1p()
    return math.log1p(math.expm1(variance) / terms)


def fenton_mean(variance: Number, terms: int) -> Number:
    """Mean of log Σ e^{x_i} for centred x_i by Fenton: ln n + (σ̃² − σ_Σ²)/2 (appendix A.5).

    Args:
        variance: σ̃² of every exponent.
        terms: n.
    """
    return math.log(terms) + (variance - fenton_variance(variance, terms)) / 2


def broad_variance(
    variance: Number, slope: float = reference.PAPER_A, intercept: float = reference.PAPER_B
) -> Number:
    """Eq. (30), (31) and (33): in the broad case the variance is a line, a·σ̃² + b.

    Args:
        variance: σ̃².
        slope: a; the default is the authors' a of Eq. (33), fitted at D = 64 to log P.
        intercept: b; likewise.
    """
    return slope * variance + intercept


def lln_variance(numerator: Number, denominator: Number) -> Number:
    """Eq. (32): σ²_lln = σ²_nom + σ²_den.

    A sum for independent numerator and denominator. They share the query, so that twice their
    covariance is missing: the prediction is too large.

    Args:
        numerator: Variance of the numerator's logarithm.
        denominator: Variance of the denominator's logarithm.
    """
    return numerator + denominator


def sample_sum_variance(
    variance: float,
    terms: int,
    *,
    draws: int = 1 << 16,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> float:
    """Variance of log Σ e^{x_i} over ``draws`` draws of n normal x_i: what the others predict.

    Args:
        variance: σ̃² of every x_i.
        terms: n.
        draws: Its relative error is about √(2/draws) for a near-normal logarithm.
        seed: Of the generator, which is the CPU's on every device.
        device: Where to compute.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    sums = []
    step = max((1 << 22) // terms, 1)
    for start in range(0, draws, step):
        shape = (min(step, draws - start), terms)
        normal = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        sums.append((math.sqrt(variance) * normal.to(device)).logsumexp(-1))
    return torch.cat(sums).var(correction=0).item()


@dataclass(frozen=True)
class Check:
    """Both sides of a statement about P, and whether it holds.

    Attributes:
        statement: In words, left to right.
        left: ``[...]``, one value per matrix.
        right: Likewise.
        holds: bool ``[...]``.
    """

    statement: str
    left: Tensor
    right: Tensor
    holds: Tensor


def at_temperature(matrix: Tensor, factor: float) -> Tensor:
    """P with all temperatures raised by a factor: P_ij^{1/factor}, normalised again; Eq. (6).

    Args:
        matrix: ``[..., T, S]``, row-stochastic; zeros stay zeros.
        factor: > 0.
    """
    if not factor > 0 or not math.isfinite(factor):
        raise InvalidInputError(f"factor must be positive and finite, got {factor}.")
    heated = (matrix.double().log() / factor).softmax(-1)
    # A row of zeros is a query without keys, and stays one.
    return torch.where(matrix.sum(-1, keepdim=True) > 0, heated, 0.0)


def theorem_3_2(matrix: Tensor, factor: float = 1.1) -> Check:
    """Theorem 3.2: the entropy, Eq. (7), rises with the temperature.

    Args:
        matrix: ``[..., T, S]``, row-stochastic.
        factor: > 1, how much hotter the right side is.
    """
    _check_hotter(factor)
    left = of_matrix.entropy(matrix)
    right = of_matrix.entropy(at_temperature(matrix, factor))
    statement = f"entropy ≤ entropy at {factor:g} times the temperature"
    return Check(statement, left, right, left <= right + _SLACK)


def entropy_slope(matrix: Tensor) -> Tensor:
    """dH/dτ in bits at τ = 1: the mean over the rows of Var_p(ln p)/ln 2, ``[...]``.

    The derivative in the proof of Theorem 3.2, which drops the factor 1/ln 2 on the way.

    Args:
        matrix: ``[..., T, S]``, row-stochastic.
    """
    matrix = matrix.double()
    logs = torch.where(matrix > 0, matrix, 1.0).log()
    mean = (matrix * logs).sum(-1, keepdim=True)
    return (matrix * (logs - mean).square()).sum(-1).mean(-1) / math.log(2)


def theorem_3_3(matrix: Tensor, tolerance: float = 1e-6) -> Check:
    """Theorem 3.3: |λ₂| equals σ₁(P̄), the spread of P along its major principal component.

    The proof takes eigenvectors of P̄ for principal components, which they are if P̄ is normal
    (`departure_from_normality`). In general |λ₂| ≤ σ₁(P̄), see `spectral_bound`.

    Args:
        matrix: ``[..., N, N]``, row-stochastic.
        tolerance: How far apart equal sides may be.
    """
    left, right = 1 - of_matrix.spectral_gap(matrix), _spread(matrix)
    return Check("|λ₂| = σ₁(P̄)", left, right, (left - right).abs() <= tolerance)


def spectral_bound(matrix: Tensor) -> Check:
    """The part of Theorem 3.3 that holds for every P: |λ₂| ≤ σ₁(P̄).

    Args:
        matrix: ``[..., N, N]``, row-stochastic.
    """
    left, right = 1 - of_matrix.spectral_gap(matrix), _spread(matrix)
    return Check("|λ₂| ≤ σ₁(P̄)", left, right, left <= right + 1e-6)


def departure_from_normality(matrix: Tensor) -> Tensor:
    """‖P̄P̄ᵀ − P̄ᵀP̄‖ / ‖P̄‖² (Frobenius), ``[...]``: zero where Theorem 3.3 holds.

    Args:
        matrix: ``[..., N, N]``, row-stochastic.
    """
    centred = _centred(matrix)
    difference = centred @ centred.mT - centred.mT @ centred
    return torch.linalg.matrix_norm(difference) / centred.square().sum((-2, -1))


def theorem_3_4(matrix: Tensor, factor: float = 1.1) -> Check:
    """Theorem 3.4: the variance of P falls with the temperature.

    Args:
        matrix: ``[..., T, S]``, row-stochastic.
        factor: > 1, how much hotter the left side is.
    """
    _check_hotter(factor)
    left = of_matrix.variance(at_temperature(matrix, factor))
    right = of_matrix.variance(matrix)
    statement = f"variance of P at {factor:g} times the temperature ≤ variance of P"
    return Check(statement, left, right, left <= right * (1 + _SLACK) + 1e-30)


def _check_hotter(factor: float) -> None:
    if not factor > 1:
        raise InvalidInputError(f"factor must be greater than 1, got {factor}.")


def _centred(matrix: Tensor) -> Tensor:
    """P̄ = P − 1μᵀ of appendix A.4.2."""
    matrix = matrix.double()
    return matrix - matrix.mean(-2, keepdim=True)


def _spread(matrix: Tensor) -> Tensor:
    """σ₁(P̄), the largest singular value."""
    return torch.linalg.matrix_norm(_centred(matrix), ord=2)
