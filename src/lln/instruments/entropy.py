"""Entropy of the rows of P: how many keys a query spreads over, Eq. (7)."""

from __future__ import annotations

import math

from torch import Tensor

from lln.instruments.head_groups import select
from lln.instruments.rows import AttentionRows, Rows, Tile, sum_over_rows

# e^x is zero in float64 far above this; a product with it is therefore zero, and not NaN as with
# the logarithm of an exact zero.
LOWEST_LOG = -1e4


def entropy(
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
    """Mean entropy of the rows of P in bits, Eq. (7), exact in O(N) memory.

        H(P) = −(1/N) Σ_ij P_ij log₂ P_ij

    From 0 (every query reads one key) to log₂ S (every query reads all keys alike).

    Args:
        query: ``[B, H, T, D]``; ``[T, H, D]`` with ``cu_seqlens``.
        key: ``[B, Hk, S, D]``, H a multiple of Hk (grouped queries), or ``[T, Hk, D]``.
        kind: Whose P: ``"softmax"``, ``"lln"``, ``"diag"`` (block-diagonal softmax) or
            ``"lln_diag"`` (Figure 3).
        alpha: α of the LLN part, a positive number or a tensor that broadcasts to
            ``[B, H, 1, 1]``; None = matched to the inputs, as `lln.lln_attention` does. Kinds
            without an LLN part do not read it.
        beta: Likewise; also ``[B, Hk, 1, 1]``.
        matching: The criterion when α and β are not given: ``"variance"``, ``"entropy"`` or
            ``"paper"``.
        block_size: Tokens in a diagonal block; None = D. Kinds without a diagonal part do not
            read it.
        mix: Weight of the LLN part in ``"lln_diag"``: a number in [0, 1], or a tensor that
            broadcasts to ``[B, H, T, 1]``.
        key_mask: bool ``[B, S]``, True = attend. If T = S, padded queries do not count either.
        is_causal: Whether row i sees keys 0 … i only. LLN kinds then need α and β.
        scale: Factor of the softmax scores; None = 1/√D.
        cu_seqlens: int ``[n + 1]``, boundaries of packed sequences; B is then n.

    Returns:
        ``[B, H]``, float64, on the device of query. NaN for a sample without any valid token, and
        for a head with a NaN or infinity in a valid token; other heads are not touched by it.

    Raises:
        InvalidInputError: One sentence on what does not fit.

    Example:
        >>> import torch
        >>> query = torch.zeros(1, 2, 256, 8)
        >>> entropy(query, query).round(decimals=9).tolist()
        [[8.0, 8.0]]
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
    return selection.measure(lambda heads: mean_row_entropy(AttentionRows(heads)))


def mean_row_entropy(rows: Rows) -> Tensor:
    """Eq. (7) of every head: ``[G]``."""
    return sum_over_rows(rows, _tile_entropy) / rows.shape[1]


def _tile_entropy(tile: Tile) -> Tensor:
    """Sum of the entropies of a tile's rows in bits: ``[G]``."""
    return -(tile.p * tile.log_p.clamp_min(LOWEST_LOG)).sum((-2, -1)) / math.log(2)
