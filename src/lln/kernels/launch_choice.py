"""The choice of exact keys from tensors to kernels: allocate, choose sizes, launch.

Dimension legend: see `lln.kernels.launch_keys`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.eager.diagonal import first_tokens
from lln.eager.key_blocks import blocks_in
from lln.kernels.call import mask_bytes
from lln.kernels.limits import multiprocessors, power_of_two
from lln.kernels.recipes import on_device
from lln.kernels.sizes import cdiv
from lln.kernels.triton import keys_select

# Keys in a tile.
TILE = 128
# Candidates that are scored at a time.
FEW = 32


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
    batch, heads, tokens, width = query.shape
    blocks = blocks_in(tokens, block_size, mask is not None)
    per_block = block_size // group_size
    groups = blocks * per_block
    chosen = torch.empty((batch, heads, groups, keys), dtype=torch.int32, device=query.device)
    if chosen.numel() == 0:
        return chosen
    mean = torch.empty((batch, heads, groups, width), dtype=query.dtype, device=query.device)
    padded = max(16, power_of_two(width))
    gaps, byte_mask = gaps_before(mask, block_size, query), mask_bytes(mask, query)
    has_mask = mask is not None
    with on_device(query.device):
        launch(
            keys_select.means_kernel, (blocks, batch * heads),
            query, byte_mask, gaps, mean, tokens, heads, groups, block_size, *query.stride(),
            D=width, BD=padded, BW=max(16, block_size), GROUP=group_size, FLIP=flip,
            HAS_MASK=has_mask, num_warps=4,
        )  # fmt: skip
        rows = min(64, max(16, power_of_two(groups)))
        tiles = cdiv(groups, rows)
        wanted = 4 * multiprocessors(query.device)
        splits = max(1, 2 * power_of_two(keys) // TILE)
        while splits < 8 and splits * tiles * batch * heads < wanted and tokens > TILE * splits * 4:
            splits *= 2
        stretch = cdiv(cdiv(tokens, splits), TILE) * TILE
        room, lines = max(4 * power_of_two(keys), 64), batch * heads * groups
        words = cdiv(tokens, TILE) * TILE // 32
        device = query.device
        peaks = torch.empty((lines, splits * TILE), device=device)
        threshold = torch.empty(lines, device=device)
        marks = torch.empty((lines, words), dtype=torch.int32, device=device)
        scores = torch.empty((lines, room), device=device)
        places = torch.empty((lines, room), dtype=torch.int32, device=device)
        shape = (tokens, heads, groups, heads // key.shape[1])
        sizes: dict[str, Any] = {"W": block_size, "RG": per_block, "D": width, "BD": padded}
        sizes["HAS_MASK"] = has_mask
        sources, strides = (mean, key, byte_mask, gaps), key.stride()
        grid = (tiles * splits, batch * heads)
        walk = {"C": TILE, "EVEN": not has_mask and tokens % TILE == 0, "ROWS": rows, "STAGES": 3}
        walk["PRECISION"] = "tf32" if query.dtype != torch.float32 else "tf32x3"
        part = (splits, stretch, *strides)
        launch(keys_select.peaks_kernel, grid, *sources, peaks, *shape, *part, **sizes, **walk)
        columns = {"COLUMNS": splits * TILE, "WIDE": power_of_two(splits * TILE), "ROWS": 16}
        grid_of_lines = (cdiv(lines, 16),)
        launch(
            keys_select.threshold_kernel, grid_of_lines, peaks, threshold, lines, keys, **columns
        )
        launch(
            keys_select.mark_kernel, grid, *sources, threshold, marks.view(torch.uint8), *shape,
            words * 4, *part, **sizes, **walk,
        )  # fmt: skip
        launch(
            keys_select.finish_kernel, (groups, batch * heads), *sources, marks, scores, places,
            chosen, *shape, keys, words, *strides, **sizes, FEW=FEW, CAP=room, num_warps=1,
        )  # fmt: skip
    return chosen


def gaps_before(mask: Tensor | None, block_size: int, stand_in: Tensor) -> Tensor:
    """How far before token 0 the first block of every sample begins: int32 ``[B]``."""
    if mask is None:
        return stand_in
    return (-first_tokens(mask) % block_size).to(torch.int32)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **sizes: Any) -> None:
    """Launch through Triton; ``num_warps`` is among the sizes."""
    kernel[grid](*arguments, **sizes)
