"""Softmax attention to a window of neighbours, by chunks: time and memory O(N·w), no N×N.

Dimension legend: B batch, H heads, N tokens, D head width, n chunks, c tokens of a chunk,
w reach of the window, K keys that a chunk may look at, G keys that everyone sees.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.peers.masked import attend
from lln.peers.peer import Mask

# Narrow windows share chunks of this size, or the products would be too small to be fast.
SMALLEST_CHUNK = 16


class Everywhere(NamedTuple):
    """Keys that every query sees besides its window.

    Attributes:
        key: ``[B, H, G, D]``.
        value: Like key.
        valid: bool ``[B, G]``.
    """

    key: Tensor
    value: Tensor
    valid: Tensor


def band_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    reach: int,
    key_mask: Mask = None,
    is_causal: bool = False,
    everywhere: Everywhere | None = None,
) -> Tensor:
    """P = softmax(QKᵀ/√d) over the keys with |i − j| ≤ w, times V.

    Args:
        query: ``[B, H, N, D]``.
        key: Like query.
        value: Like query.
        reach: w, how many neighbours a token sees on each side.
        key_mask: bool ``[B, N]``, True = a key that may be seen.
        is_causal: Whether the side of later tokens is closed.
        everywhere: Keys seen from any distance.

    Returns:
        ``[B, H, N, D]``; zeros where a query sees nothing.
    """
    tokens = query.shape[-2]
    reach = min(reach, tokens - 1)
    size = max(reach, SMALLEST_CHUNK)
    if tokens <= size + 2 * reach:
        # Chunks would look at as many keys as there are, and more of them beyond the ends.
        size = tokens
    short = -tokens % size
    # A single chunk holds all there is to see.
    margin = reach if tokens > size else 0
    queries = F.pad(query, (0, 0, 0, short)).unflatten(-2, (-1, size)).transpose(1, 2)
    keys, values = (_windows(side, size, margin, short).transpose(1, 2) for side in (key, value))
    if key_mask is None:
        key_mask = query.new_ones(1, tokens, dtype=torch.bool)
    real = F.pad(key_mask, (margin, margin + short)).unfold(-1, size + 2 * margin, size)
    ahead = _ahead(size, margin, query.device)
    seen = real[:, :, None, None, :] & (ahead >= -reach) & (ahead <= (0 if is_causal else reach))
    seen = seen.expand(query.shape[0], -1, -1, -1, -1)
    if everywhere is not None:
        chunks = queries.shape[1]
        keys, values = (
            torch.cat((side.unsqueeze(1).expand(-1, chunks, -1, -1, -1), near), dim=-2)
            for side, near in ((everywhere.key, keys), (everywhere.value, values))
        )
        always = everywhere.valid[:, None, None, None, :].expand(-1, chunks, -1, size, -1)
        seen = torch.cat((always, seen), dim=-1)
    out = attend(*(tensor.flatten(0, 1) for tensor in (queries, keys, values, seen)))
    out = out.unflatten(0, queries.shape[:2]).transpose(1, 2).flatten(2, 3)
    return out[..., :tokens, :]


def _windows(tensor: Tensor, size: int, margin: int, short: int) -> Tensor:
    """What each chunk may look at: ``[B, H, N, D]`` → a view ``[B, H, n, K, D]``."""
    padded = F.pad(tensor, (0, 0, margin, margin + short))
    return padded.unfold(-2, size + 2 * margin, size).mT


def _ahead(size: int, margin: int, device: torch.device) -> Tensor:
    """``[c, K]``: how many tokens after its query each key of a chunk stands."""
    rows = torch.arange(size, device=device).unsqueeze(-1)
    return torch.arange(size + 2 * margin, device=device) - margin - rows
