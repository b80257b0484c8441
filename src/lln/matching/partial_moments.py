"""Moments of a sequence from those of its parts: what matching needs, in a form that merges.

A mean and a sum of squares around it merge exactly (Chan, Golub and LeVeque 1979):

    n = Σ n_r,   μ = Σ n_r μ_r / n,   M = Σ ( M_r + n_r (μ_r − μ)² )

so statistics of shards give those of the whole sequence, however the mean moves between them.

Dimension legend: R parts, B batch, H query heads, Hk key heads, T queries, S keys, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.matching.moments import (
    Moments,
    count_tokens,
    is_degenerate,
    moments_of_sums,
    sums_of_heads,
)
from lln.precision import accumulation_dtype


def part_of_heads(
    query: Tensor, key: Tensor, key_mask: Tensor | None, *, masks_queries: bool
) -> Tensor:
    """What one part adds to `lln.matching.moments.head_moments`, as one row of numbers.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, S, D]``.
        key_mask: bool ``[B, S]``.
        masks_queries: Whether the mask says which queries count, too.
    """
    sides = sums_of_heads(query, key, key_mask if masks_queries else None, key_mask)
    return torch.cat([side.flatten() for side in sides])


def merge_heads(parts: Tensor, query: Tensor, key: Tensor) -> Moments:
    """The moments of all parts together, ``[B, H]``.

    Args:
        parts: ``[R, numbers]``, each a `part_of_heads`.
        query: ``[B, H, T, D]``; only its shape counts, as that of key.
        key: ``[B, Hk, S, D]``.
    """
    batch, heads, _, width = query.shape
    groups = key.shape[1]
    shapes = ((batch, 1), (batch, heads), (batch, 1), (batch, groups, width), (batch, groups))
    query_count, query_squares, count, mean, squares = _unpack(parts, shapes)
    keys = count.sum(0)
    share = count / keys.clamp_min(1)
    whole_mean = (share.unsqueeze(-1) * mean).sum(0)
    moved = (mean - whole_mean).square().sum(-1)
    sums = (query_squares.sum(0), (squares + count * moved).sum(0), whole_mean.square().mean(-1))
    counts = (query_count.sum(0), keys)
    return Moments(*moments_of_sums(torch, *sums, *counts, width, heads // max(groups, 1)))


def part_of_tensor(
    query: Tensor, key: Tensor, key_mask: Tensor | None, *, masks_queries: bool
) -> Tensor:
    """What one part adds to `lln.matching.moments.tensor_moments`; arguments as above."""
    dtype = accumulation_dtype(query.dtype)
    query, key = query.detach().to(dtype), key.detach().to(dtype)
    sides = [count_tokens(key, key_mask).flatten()]
    for side, mask in ((query, key_mask if masks_queries else None), (key, key_mask)):
        number = count_tokens(side, mask).sum() * side.shape[1] * side.shape[3]
        mean = _kept(side, mask).sum() / number.clamp_min(1)
        squares = _kept(side - mean, mask).square().sum()
        sides.append(torch.stack([number, mean, squares]))
    return torch.cat(sides)


def merge_tensors(parts: Tensor, query: Tensor) -> Moments:
    """The moments of all parts together, ``[1, 1]``."""
    batch = query.shape[0]
    count, *sides = _unpack(parts, ((batch, 1), (3,), (3,)))
    found, sizes = [], []
    for side in sides:
        number, mean, squares = side.unbind(-1)
        total = number.sum()
        whole_mean = (number * mean).sum() / total.clamp_min(1)
        spread = (squares + number * (mean - whole_mean).square()).sum()
        variance = (spread / (total - 1).clamp_min(1)).reshape(1, 1)
        found.append(variance)
        sizes.append(variance + whole_mean.square())
    keys = count.sum(0).mean(0, keepdim=True)
    return Moments(found[0], found[1], keys, is_degenerate(found[0], found[1], *sizes))


def _kept(tensor: Tensor, mask: Tensor | None) -> Tensor:
    return tensor if mask is None else torch.where(mask[:, None, :, None], tensor, 0.0)


def _unpack(parts: Tensor, shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    """Rows of numbers as tensors ``[R, *shape]``."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    pieces = parts.split(sizes, -1)
    return [
        piece.reshape(parts.shape[0], *shape) for piece, shape in zip(pieces, shapes, strict=True)
    ]
