"""Variance of the entries of P: what Theorem 3.4 says falls with the temperature."""

from __future__ import annotations

from torch import Tensor

from lln.instruments.attention_inputs import AttentionInputs
from lln.instruments.head_groups import measure
from lln.instruments.instrument import instrument
from lln.instruments.rows import AttentionRows, Rows, RowTile, sum_over_rows
from lln.instruments.unmasked_heads import UnmaskedHeads


@instrument(AttentionInputs)
def variance(inputs: AttentionInputs) -> Tensor:
    """Variance of the entries of P over the whole matrix, σ_p² of Theorem A.3.

        σ_p² = (1/NS) Σ_ij (P_ij − 1/S)²

    Entries that P leaves out (later keys, other blocks, keys out of the window) are zeros and
    count. LLN attention takes O(N·D²) time, by ΣP² = Σ (AᵀA)∘(BBᵀ) for P = A·B; the others O(N²·D)
    in tiles.

    Returns:
        ``[B, H]``, float64; NaN as in `entropy`.

    Example:
        >>> import torch
        >>> variance(torch.zeros(1, 1, 16, 8), torch.zeros(1, 1, 16, 8)).item()
        0.0
    """
    return measure(inputs, _variance)


def _variance(heads: UnmaskedHeads) -> Tensor:
    if heads.kind == "lln" and not heads.is_causal:
        # Rows of A sum to one, so that 1/S may be taken from B before the product.
        slots, tokens = heads.lln_factors()
        centred = tokens - 1 / tokens.shape[-1]
        squares = ((slots.mT @ slots) * (centred @ centred.mT)).sum((-2, -1))
        return squares.clamp_min(0.0) / (slots.shape[-2] * tokens.shape[-1])
    return matrix_variance(AttentionRows(heads))


def matrix_variance(rows: Rows) -> Tensor:
    """σ_p² of every matrix: ``[G]``."""
    _, tokens, keys = rows.shape

    def squares(tile: RowTile) -> Tensor:
        left_out = keys - tile.log_p.shape[-1]
        seen = (tile.p - 1 / keys).square().sum((-2, -1))
        return seen + tile.log_p.shape[-2] * left_out / keys**2

    return sum_over_rows(rows, squares) / (tokens * keys)
