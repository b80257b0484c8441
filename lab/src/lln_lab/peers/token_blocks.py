"""Tokens in blocks: cut, filled up at the end, next to their neighbours, or picked by place.

Dimension legend: B batch, H heads, N tokens, D head width, n blocks of l tokens, M picked tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def cut(tokens: Tensor, size: int, dim: int = -2) -> Tensor:
    """Blocks along an axis, the last one filled up with zeros: ``[…, N, …]`` → ``[…, n, l, …]``."""
    return _filled(tokens, dim, 0, -tokens.shape[dim] % size).unflatten(dim, (-1, size))


def windows(tokens: Tensor, size: int, margin: int, dim: int = -2) -> Tensor:
    """Every block of ``size`` tokens with ``margin`` more on both sides, zeros beyond the ends.

    A view: the axis now counts the blocks, and the tokens of a window are a new last axis.
    """
    filled = _filled(tokens, dim, margin, margin + -tokens.shape[dim] % size)
    return filled.unfold(dim, size + 2 * margin, size)


def with_neighbours(blocks: Tensor) -> Tensor:
    """Every block between its neighbours: ``[..., n, l, D]`` → ``[..., n, 3l, D]``.

    Beyond the ends there are zeros (False).
    """
    count = blocks.shape[-3]
    padded = F.pad(blocks, (0, 0, 0, 0, 1, 1))
    return torch.cat([padded[..., i : i + count, :, :] for i in range(3)], dim=-2)


def pick(tokens: Tensor, places: Tensor) -> Tensor:
    """The tokens of ``[B, H, N, D]`` at places ``[B, H or 1, M]``, as ``[B, H, M, D]``."""
    index = places.unsqueeze(-1)
    return tokens.gather(2, index.expand(*tokens.shape[:2], -1, tokens.shape[-1]))


def real_first(real: Tensor) -> Tensor:
    """Places of the tokens ``[B, N]``, the real ones first and in their order."""
    return real.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)


def _filled(tokens: Tensor, dim: int, before: int, after: int) -> Tensor:
    axes_behind = tokens.dim() - 1 - dim % tokens.dim()
    return F.pad(tokens, (0, 0) * axes_behind + (before, after))
