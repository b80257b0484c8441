"""The choice of exact keys from tensors to kernels: allocate, choose sizes, launch.

Dimension legend: see `lln.kernels.keys.launch_keys`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.eager.diagonal import first_tokens
from lln.eager.key_blocks import blocks_in
from lln.kernels.keys import triton_keys_select as keys_select
from lln.kernels.launching.kernel_arguments import mask_bytes
from lln.kernels.launching.limits import multiprocessors, power_of_two
from lln.kernels.launching.recipes import on_device
from lln.kernels.launching.stretches import cdiv

# Keys in a tile.
TILE = 128
# Candidates that are scored at a time.
FEW = 32


class BlockPlace(NamedTuple):
    """How keys and groups lie in blocks.

    Attributes:
        mask: bool ``[B, T]``, which tokens count; None = all.
        gaps: int32 ``[B]``: token t lies in block (t + gap) // W; None = 0.
        block_size: W, a power of two.
        group_size: Queries in a group, a power of two.
    """

    mask: Tensor | None
    gaps: Tensor | None
    block_size: int
    group_size: int

    @property
    def flags(self) -> dict[str, bool]:
        """What the kernels are told of it."""
        return {"HAS_MASK": self.mask is not None, "SHIFTED": self.gaps is not None}

    def tensors(self, stand_in: Tensor) -> tuple[Tensor, Tensor]:
        """The mask as bytes and the gaps; ``stand_in`` where there are none."""
        return mask_bytes(self.mask, stand_in), stand_in if self.gaps is None else self.gaps


def choose(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    keys: int,
    block_size: int,
    group_size: int,
    flip: bool,
) -> Tensor:
    """The chosen keys of every group by its mean query: int32 ``[B, H, G, K]``.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, T, D]``.
        mask: bool ``[B, T]`` or None.
        keys: K, at most T.
        block_size: W, a power of two.
        group_size: Queries in a group, a power of two.
        flip: Whether scores have a negative factor.
    """
    gaps = None if mask is None else gaps_before(mask, block_size, query)
    place = BlockPlace(mask, gaps, block_size, group_size)
    blocks = blocks_in(query.shape[2], block_size, mask is not None)
    if keys == 0:
        groups = blocks * (block_size // group_size)
        return torch.empty((*query.shape[:2], groups, 0), dtype=torch.int32, device=query.device)
    return best_keys(mean_queries(query, place, blocks, flip), key, place, keys)[0]


def mean_queries(query: Tensor, place: BlockPlace, blocks: int, flip: bool) -> Tensor:
    """The mean query of every group, in the dtype of query: ``[B, H, G, D]``.

    Args:
        query: ``[B, H, T, D]``.
        place: How the queries lie in blocks; those that do not count are left out.
        blocks: How many there are.
        flip: Whether scores have a negative factor.
    """
    batch, heads, tokens, width = query.shape
    size, group_size = place.block_size, place.group_size
    groups = blocks * (size // group_size)
    mean = torch.empty((batch, heads, groups, width), dtype=query.dtype, device=query.device)
    if mean.numel() == 0:
        return mean
    with on_device(query.device):
        launch(
            keys_select.means_kernel, (blocks, batch * heads),
            query, *place.tensors(query), mean, tokens, heads, groups, size, *query.stride(),
            D=width, BD=max(16, power_of_two(width)), BW=max(16, size), GROUP=group_size,
            FLIP=flip, **place.flags, num_warps=4,
        )  # fmt: skip
    return mean


def best_keys(
    mean: Tensor, key: Tensor, place: BlockPlace, keys: int, *, scored: bool = False
) -> tuple[Tensor, Tensor]:
    """The K keys with the largest products with every mean query, none of the group's block.

    Args:
        mean: ``[B, H, G, D]`` in the dtype of key, contiguous; W / group_size groups to a block.
        key: ``[B, Hk, T, D]``; T need not be the number of queries.
        place: How the keys lie in the blocks of the groups.
        keys: K, at least 1.
        scored: Whether the scores are wanted as well.

    Returns:
        int32 ``[B, H, G, K]``, ascending, -1 where there are fewer; and the float32 scores of
        these keys, -inf where there are fewer, or nothing.
    """
    (batch, heads, groups, width), tokens = mean.shape, key.shape[2]
    device = mean.device
    chosen = torch.empty((batch, heads, groups, keys), dtype=torch.int32, device=device)
    best = torch.empty(chosen.shape if scored else 0, device=device)
    if chosen.numel() == 0 or tokens == 0:
        return chosen.fill_(-1), best.fill_(-torch.inf)
    byte_mask, gaps = place.tensors(mean)
    with on_device(device):
        rows = min(64, max(16, power_of_two(groups)))
        tiles = cdiv(groups, rows)
        wanted = 4 * multiprocessors(device)
        splits = max(1, 2 * power_of_two(keys) // TILE)
        while splits < 8 and splits * tiles * batch * heads < wanted and tokens > TILE * splits * 4:
            splits *= 2
        stretch = cdiv(cdiv(tokens, splits), TILE) * TILE
        room, lines = max(4 * power_of_two(keys), 64), batch * heads * groups
        words = cdiv(tokens, TILE) * TILE // 32
        peaks = torch.empty((lines, splits * TILE), device=device)
        threshold = torch.empty(lines, device=device)
        marks = torch.empty((lines, words), dtype=torch.int32, device=device)
        scores = torch.empty((lines, room), device=device)
        places = torch.empty((lines, room), dtype=torch.int32, device=device)
        shape = (tokens, heads, groups, heads // key.shape[1])
        sizes: dict[str, Any] = {"W": place.block_size, "RG": place.block_size // place.group_size}
        sizes |= {"D": width, "BD": max(16, power_of_two(width)), **place.flags}
        sources, strides = (mean, key, byte_mask, gaps), key.stride()
        grid = (tiles * splits, batch * heads)
        even = place.mask is None and tokens % TILE == 0
        walk = {"C": TILE, "EVEN": even, "ROWS": rows, "STAGES": 3}
        walk["PRECISION"] = "tf32" if mean.dtype != torch.float32 else "tf32x3"
        part = (splits, stretch, *strides)
        launch(keys_select.peaks_kernel, grid, *sources, peaks, *shape, *part, **sizes, **walk)
        columns = {"COLUMNS": splits * TILE, "WIDE": power_of_two(splits * TILE), "ROWS": 16}
        grid_of_lines = (cdiv(lines, 16),)
        launch(
            keys_select.threshold_kernel,
            grid_of_lines,
            peaks,
            threshold,
            lines,
            keys,
            **columns,
        )
        launch(
            keys_select.mark_kernel, grid, *sources, threshold, marks.view(torch.uint8), *shape,
            words * 4, *part, **sizes, **walk,
        )  # fmt: skip
        launch(
            keys_select.finish_kernel, (groups, batch * heads), *sources, marks, scores, places,
            chosen, best if scored else scores, *shape, keys, words, *strides, **sizes, FEW=FEW,
            CAP=room, SCORED=scored, num_warps=1,
        )  # fmt: skip
    return chosen, best


def gaps_before(mask: Tensor | None, block_size: int, stand_in: Tensor) -> Tensor:
    """How far before token 0 the first block of every sample begins: int32 ``[B]``."""
    if mask is None:
        return stand_in
    return (-first_tokens(mask) % block_size).to(torch.int32)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **sizes: Any) -> None:
    """Launch through Triton; ``num_warps`` is among the sizes."""
    kernel[grid](*arguments, **sizes)
