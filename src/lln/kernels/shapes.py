"""Shapes that the operators' schemas and the launches must agree on. No Triton here."""

from __future__ import annotations

import torch
from torch import Tensor


def summary_heads(query: Tensor, key: Tensor, beta: Tensor | None) -> int:
    """SH: the key heads, unless β tells the query heads of a group apart."""
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
