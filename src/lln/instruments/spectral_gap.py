"""Spectral gap of P, section 3.2.2: how fast a walk along the attention forgets its start."""

from __future__ import annotations

import torch
from torch import Tensor

from lln.instruments.factors import factors
from lln.instruments.heads import Heads, select
from lln.instruments.rows import AttentionRows


def spectral_gap(
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
) -> Tensor:
    """Spectral gap γ = 1 − |λ₂| of P (section 3.2.2).

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

    Returns:
        ``[B, H]``, float64, from 0 to 1; NaN as in `entropy`. A single token has gap 1.
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
    return selection.measure(_gap)


def _gap(heads: Heads) -> Tensor:
    if heads.kind == "lln" and not heads.is_causal:
        slots, tokens = factors(heads)
        return _dense_gap(tokens @ slots)
    tokens = heads.key.shape[1]
    matrix = heads.query.new_zeros(heads.query.shape[0], tokens, tokens)
    for tile in AttentionRows(heads).tiles():
        _, height, width = tile.log_p.shape
        rows, columns = slice(tile.row, tile.row + height), slice(tile.column, tile.column + width)
        matrix[:, rows, columns] = tile.log_p.exp()
    return _dense_gap(matrix)


def _dense_gap(matrix: Tensor) -> Tensor:
    if matrix.shape[-1] < 2:
        return matrix.new_ones(matrix.shape[0])
    magnitudes = torch.linalg.eigvals(matrix.cpu()).abs().sort(-1, descending=True).values
    return (1 - magnitudes[:, 1]).clamp(0.0, 1.0).to(matrix.device)
