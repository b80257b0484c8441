"""Softmax attention to a window of neighbours, by chunks: time and memory O(N·w), no N×N.

Dimension legend: B batch, H heads, N tokens, D head width, n chunks, c tokens of a chunk,
w reach of the window, K keys that a chunk may look at, G keys that everyone sees.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lln_lab.peers.masked import attend
from lln_lab.peers.peer import Mask, real_tokens
from lln_lab.peers.token_blocks import cut, windows

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
        # Windows would cover all the keys anyway, and zeros beyond the ends.
        size = tokens
    # A single chunk holds all there is to see.
    margin = reach if tokens > size else 0
    queries = cut(query, size).transpose(1, 2)
    keys, values = (windows(side, size, margin).mT.transpose(1, 2) for side in (key, value))
    real = windows(real_tokens(query, key_mask), size, margin, dim=-1)
    # How many tokens after its query each key of a window stands.
    place = torch.arange(-margin, size + margin, device=query.device)
    ahead = place - place[margin : margin + size].unsqueeze(-1)
    near = (ahead >= -reach) & (ahead <= (0 if is_causal else reach))
    seen = real[:, :, None, None, :] & near
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
