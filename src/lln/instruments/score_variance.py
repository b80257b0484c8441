"""Variance of the softmax scores and its parts: what the temperature of Eq. (5) is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from lln.instruments.attention_inputs import AttentionInputs
from lln.instruments.head_groups import measure_all
from lln.instruments.instrument import instrument
from lln.instruments.merged_moments import row_and_total_variance
from lln.instruments.rows import AttentionRows
from lln.instruments.unmasked_heads import UnmaskedHeads


class ScoreVariance(NamedTuple):
    """The variance of the scores a_ij = scale·q_i·k_j, ``[B, H]`` each.

    Attributes:
        total: Over all pairs, σ²_sm of Eq. (5) = σq²σk² + C_cross.
        within_row: Mean over the rows of the variance inside a row. Softmax sees only this part:
            the mean of the keys moves a whole row.
        sigma_q: σq = √(mean of q²).
        sigma_k: σk = √(mean over features of the variance over tokens).
        cross: C_cross = total − σq²σk² (times scale²·D, if a scale is given): the part that comes
            from features of unequal spread, from correlations and from the means.
        trace: scale²·tr(M_q Σ_k), with M_q = QᵀQ/T and Σ_k the covariance of the keys: the
            variance inside a row of bidirectional attention, from two D×D matrices.
    """

    total: Tensor
    within_row: Tensor
    sigma_q: Tensor
    sigma_k: Tensor
    cross: Tensor
    trace: Tensor


@instrument(AttentionInputs)
def score_variance(inputs: AttentionInputs) -> ScoreVariance:
    """Variance of the softmax scores and its parts, Eq. (5).

    O(N·D²) from second moments where every query sees every key; with causal attention, diagonal
    blocks and windows (tiles) only the pairs that P keeps count. For the LLN kinds these are the
    scores of the softmax attention that moment matching imitates.

    Returns:
        A `ScoreVariance` of ``[B, H]`` tensors, float64; NaN as in `entropy`.
    """
    return ScoreVariance(*measure_all(inputs, score_parts, ((),) * 6))


def score_parts(heads: UnmaskedHeads) -> tuple[Tensor, ...]:
    """The fields of `ScoreVariance`, ``[G]`` each."""
    query, key, squared = heads.query, heads.key, heads.scale**2
    key_mean = key.mean(-2, keepdim=True)
    spread = key - key_mean
    covariance = spread.mT @ spread / key.shape[-2]
    second_moment = query.mT @ query / query.shape[-2]
    trace = squared * (second_moment * covariance).sum((-2, -1)).clamp_min(0.0)
    if heads.is_causal or heads.is_near:
        kind = heads.kind if heads.is_near else "softmax"
        scores = AttentionRows(replace(heads, kind=kind), normalised=False)
        within_row, total = row_and_total_variance(scores)
    else:
        # The mean of the keys moves row i by q_i·k̄; inside a row only the rest varies.
        between = squared * (query @ key_mean.mT).squeeze(-1).var(-1, correction=0)
        within_row, total = trace, trace + between
    query_variance = query.square().mean((-2, -1))
    key_variance = spread.square().mean((-2, -1))
    isotropic = squared * query.shape[-1] * query_variance * key_variance
    return (
        total,
        within_row,
        query_variance.sqrt(),
        key_variance.sqrt(),
        total - isotropic,
        trace,
    )
