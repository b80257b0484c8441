"""Temperature of attention, Eq. (5) and (11): the lower, the more concentrated."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lln import reference
from lln.instruments.attention_inputs import AttentionInputs
from lln.instruments.head_groups import measure
from lln.instruments.instrument import instrument
from lln.instruments.merged_moments import row_and_total_variance
from lln.instruments.rows import AttentionRows, Rows
from lln.instruments.score_variance import score_parts
from lln.instruments.unmasked_heads import UnmaskedHeads


@dataclass(frozen=True, eq=False, repr=False)
class TemperatureInputs(AttentionInputs):
    """An attention to find the temperature of.

    Args:
        measured: Whether to measure log P instead of using the equations.
    """

    measured: bool = field(default=False, kw_only=True)


@instrument(TemperatureInputs)
def temperature(inputs: TemperatureInputs) -> Tensor:
    """Temperature τ of attention.

    ``"softmax"``, ``"diag"`` and ``"window"``: Eq. (5), τ_sm = 1/σ_sm with the variance of the
    scores over all pairs that P keeps. ``"lln"``: Eq. (11), τ_lln = 1/√(a(α²σq² + β²σk²) + b) with
    the authors' constants, fitted at D = 64; infinite where that variance is not positive.
    ``"lln_diag"`` and ``"lln_keys"`` have no equation in the paper and are measured.

    Measured, every kind has one and the same definition: 1/√(variance of log P inside a row), which
    is what both equations stand for, without the assumption that entries are Gaussian or, in
    Eq. (5), that the keys have no mean (softmax does not see it).

    Returns:
        ``[B, H]``, float64; infinite where scores do not vary; NaN as in `entropy`.
    """
    if inputs.measured or inputs.kind in ("lln_diag", "lln_keys"):
        return measure(inputs, lambda heads: measured_temperature(AttentionRows(heads)))
    if inputs.kind == "lln":
        return measure(inputs, _lln_temperature)
    # Eq. (5).
    return measure(inputs, lambda heads: score_parts(heads)[0].rsqrt())


def measured_temperature(rows: Rows) -> Tensor:
    """1/√(variance of log P inside a row), ``[G]``."""
    within_row, _ = row_and_total_variance(rows)
    return within_row.rsqrt()


def _lln_temperature(heads: UnmaskedHeads) -> Tensor:
    """Eq. (11)."""
    query_variance = heads.query.square().mean((-2, -1))
    key_variance = heads.key.var(-2, correction=0).mean(-1)
    alpha, beta = heads.alpha.flatten(), heads.beta.flatten()
    total = alpha**2 * query_variance + beta**2 * key_variance
    return (reference.PAPER_A * total + reference.PAPER_B).clamp_min(0.0).rsqrt()
