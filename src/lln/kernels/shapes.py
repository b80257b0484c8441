"""Shapes that the operators' schemas and the launches must agree on. No Triton here."""

from __future__ import annotations

from torch import Tensor


def summary_heads(query: Tensor, key: Tensor, beta: Tensor | None) -> int:
    """SH: the key heads, unless β tells the query heads of a group apart."""
    if beta is not None and beta.shape[1] == query.shape[1]:
        return query.shape[1]
    return key.shape[1]


def output_like(query: Tensor, width: int) -> Tensor:
    """An empty ``[B, H, T, E]`` in the memory order of query, so that transposing back is free."""
    batch, heads, tokens, _ = query.shape
    if query.stride(1) < query.stride(2):
        return query.new_empty(batch, tokens, heads, width).transpose(1, 2)
    return query.new_empty(batch, heads, tokens, width)
