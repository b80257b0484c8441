"""Temperature of attention, Eq. (5) and (11): the lower, the more concentrated."""

from __future__ import annotations

from torch import Tensor

from lln import reference
from lln.instruments.head_groups import Heads, select
from lln.instruments.merged_moments import row_and_total_variance
from lln.instruments.rows import AttentionRows, Rows
from lln.instruments.score_variance import score_parts


def temperature(
    query: Tensor,
    key: Tensor,
    *,
    kind: str = "softmax",
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    matching: str = "variance",
    block_size: int | None = None,
    mix: float | Tensor = 0.5,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    measured: bool = False,
) -> Tensor:
    """Temperature τ of attention.

    ``"softmax"`` and ``"diag"``: Eq. (5), τ_sm = 1/σ_sm with the variance of the scores over all
    pairs that P keeps. ``"lln"``: Eq. (11), τ_lln = 1/√(a(α²σq² + β²σk²) + b) with the authors'
    constants, fitted at D = 64; infinite where that variance is not positive. ``"lln_diag"`` has no
    equation in the paper and is measured.

    Measured, every kind has one and the same definition: 1/√(variance of log P inside a row), which
    is what both equations stand for, without the assumption that entries are Gaussian or, in
    Eq. (5), that the keys have no mean (softmax does not see it).

    Args:
        query: As in `entropy`.
        key: As in `entropy`.
        kind: As in `entropy`.
        alpha: As in `entropy`.
        beta: As in `entropy`.
        matching: As in `entropy`.
        block_size: As in `entropy`.
        mix: As in `entropy`.
        key_mask: As in `entropy`.
        is_causal: As in `entropy`.
        scale: As in `entropy`.
        cu_seqlens: As in `entropy`.
        measured: Whether to measure log P instead of using the equations.

    Returns:
        ``[B, H]``, float64; infinite where scores do not vary; NaN as in `entropy`.
    """
    selection = select(
        query,
        key,
        kind=kind,
        alpha=alpha,
        beta=beta,
        matching=matching,
        block_size=block_size,
        mix=mix,
        key_mask=key_mask,
        is_causal=is_causal,
        scale=scale,
        cu_seqlens=cu_seqlens,
    )
    if measured or kind == "lln_diag":
        return selection.measure(lambda heads: measured_temperature(AttentionRows(heads)))
    return selection.measure(_lln_temperature if kind == "lln" else _softmax_temperature)


def measured_temperature(rows: Rows) -> Tensor:
    """1/√(variance of log P inside a row), ``[G]``."""
    within_row, _ = row_and_total_variance(rows)
    return within_row.rsqrt()


def _softmax_temperature(heads: Heads) -> Tensor:
    """Eq. (5)."""
    return score_parts(heads)[0].rsqrt()


def _lln_temperature(heads: Heads) -> Tensor:
    """Eq. (11)."""
    query_variance = heads.query.square().mean((-2, -1))
    key_variance = heads.key.var(-2, correction=0).mean(-1)
    alpha, beta = heads.alpha.flatten(), heads.beta.flatten()
    total = alpha**2 * query_variance + beta**2 * key_variance
    return (reference.PAPER_A * total + reference.PAPER_B).clamp_min(0.0).rsqrt()
