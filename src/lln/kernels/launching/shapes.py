"""Shapes that the operators' schemas and the launches must agree on. Does not import Triton."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

# A tile has at most this many tokens or channels, and its offsets have 31 bits.
_FARTHEST = 2**31 // 256


def within_reach(tensor: Tensor) -> Tensor:
    """``[B, H, T, D]``, copied if its tokens or channels lie too far apart for a tile's offsets."""
    _, _, token, channel = tensor.stride()
    return tensor if token < _FARTHEST and channel < _FARTHEST else tensor.contiguous()


def layout_of(tensor: Tensor | None) -> Hashable:
    """What a launch can depend on besides a tensor's values: shape, strides, type, alignment."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16


def summary_heads(query: Tensor, key: Tensor, beta: Tensor | None) -> int:
    """SH: the number of key heads, or of query heads if β differs within a group."""
    if beta is not None and beta.shape[1] == query.shape[1]:
        return query.shape[1]
    return key.shape[1]


def output_like(query: Tensor, width: int) -> Tensor:
    """An empty ``[B, H, T, E]`` in the memory order of query, so that transposing back is free."""
    batch, heads, tokens, _ = query.shape
    row, plane = (
        (heads * width, width) if query.stride(1) < query.stride(2) else (width, tokens * width)
    )
    strides = (heads * tokens * width, plane, row, 1)
    sizes = (batch, heads, tokens, width)
    return torch.empty_strided(sizes, strides, dtype=query.dtype, device=query.device)
