"""The choice of exact keys from tensors to kernels: allocate, choose sizes, launch.

Dimension legend: see `lln.kernels.keys.launch_keys`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.eager.diagonal import first_tokens
from lln.eager.key_blocks import blocks_in
from lln.kernels.keys import triton_keys_select as keys_select
from lln.kernels.launching.kernel_arguments import mask_bytes, strides_of
from lln.kernels.launching.limits import multiprocessors, power_of_two
from lln.kernels.launching.recipes import Place, Recipe, Step, Workspace, launch_fixed
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
    def options(self) -> tuple[Hashable, ...]:
        """What the launches depend on besides how the tensors lie in memory."""
        return self.mask is None, self.gaps is None, self.block_size, self.group_size

    @property
    def flags(self) -> dict[str, bool]:
        """What the kernels are told of it."""
        return {"HAS_MASK": self.mask is not None, "SHIFTED": self.gaps is not None}

    def tensors(self, stand_in: Tensor) -> dict[str, Tensor]:
        """The mask as bytes and the gaps; ``stand_in`` where there are none."""
        gaps = stand_in if self.gaps is None else self.gaps
        return {"p_mask": mask_bytes(self.mask, stand_in), "p_gaps": gaps}


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

    K, ``keys``, is at most T; ``flip`` says whether scores have a negative factor.
    """
    gaps = None if mask is None else gaps_before(mask, block_size)
    place = BlockPlace(mask, gaps, block_size, group_size)
    blocks = blocks_in(query.shape[2], block_size, mask is not None)
    if keys == 0:
        groups = blocks * (block_size // group_size)
        return torch.empty((*query.shape[:2], groups, 0), dtype=torch.int32, device=query.device)
    return best_keys(mean_queries(query, place, blocks, flip), key, place, keys)[0]


def mean_queries(query: Tensor, place: BlockPlace, blocks: int, flip: bool) -> Tensor:
    """The mean query of every group, in the dtype of query: ``[B, H, G, D]``.

    It is that of the tokens that count; ``flip`` says whether scores have a negative factor.
    """
    batch, heads, tokens, width = query.shape
    size, group_size = place.block_size, place.group_size
    groups = blocks * (size // group_size)
    mean = torch.empty((batch, heads, groups, width), dtype=query.dtype, device=query.device)
    if mean.numel() == 0:
        return mean

    def write() -> Recipe:
        values = {"T": tokens, "H": heads, "G": groups, "W": size, "GROUP": group_size}
        values |= {"D": width, "BD": max(16, power_of_two(width)), "BW": max(16, size)}
        values |= {"FLIP": flip, **place.flags, **strides_of(False, p_q=query)}
        return Recipe([Step(keys_select.means_kernel, (blocks, batch * heads), values, 4)], {})

    runtime = {"p_q": query, "p_mean": mean, **place.tensors(query)}
    launch_fixed(("means", flip, *place.options), runtime, query.device, write)
    return mean


def best_keys(
    mean: Tensor, key: Tensor, place: BlockPlace, keys: int, *, scored: bool = False
) -> tuple[Tensor, Tensor]:
    """The K keys with the largest products with every mean query, none of the group's block.

    Mean queries ``[B, H, G, D]`` have the dtype of key and are contiguous, W / group_size to a
    block; ``place`` says how the keys ``[B, Hk, T, D]`` lie in these blocks. T need not be the
    number of queries, K is at least 1.

    Returns:
        int32 ``[B, H, G, K]``, ascending, -1 where there are fewer; and, if ``scored``, the float32
        scores of these keys, -inf where there are fewer.
    """
    (batch, heads, groups), tokens = mean.shape[:3], key.shape[2]
    device = mean.device
    chosen = torch.empty((batch, heads, groups, keys), dtype=torch.int32, device=device)
    best = torch.empty(chosen.shape if scored else 0, device=device)
    if chosen.numel() == 0 or tokens == 0:
        return chosen.fill_(-1), best.fill_(-torch.inf)
    lines, words = batch * heads * groups, cdiv(tokens, TILE) * TILE // 32
    # Two kinds of pointers to the same memory: it is written by bytes and read by words.
    marks = torch.empty((lines, words), dtype=torch.int32, device=device)
    runtime = {"p_mean": mean, "p_k": key, **place.tensors(mean), "p_chosen": chosen}
    runtime |= {"p_best": best, "p_marks": marks, "p_mark_bytes": marks.view(torch.uint8)}
    kind = ("best keys", scored, *place.options)
    launch_fixed(kind, runtime, device, lambda: _write_best(mean, key, place, keys, scored))
    return chosen, best


def _write_best(mean: Tensor, key: Tensor, place: BlockPlace, keys: int, scored: bool) -> Recipe:
    (batch, heads, groups, width), (key_heads, tokens) = mean.shape, key.shape[1:3]
    rows = min(64, max(16, power_of_two(groups)))
    tiles = cdiv(groups, rows)
    wanted = 4 * multiprocessors(mean.device)
    splits = max(1, 2 * power_of_two(keys) // TILE)
    while splits < 8 and splits * tiles * batch * heads < wanted and tokens > TILE * splits * 4:
        splits *= 2
    stretch = cdiv(cdiv(tokens, splits), TILE) * TILE
    room, lines = max(4 * power_of_two(keys), 64), batch * heads * groups
    columns, words = splits * TILE, cdiv(tokens, TILE) * TILE // 32
    workspace: Workspace = {
        "p_peaks": ((lines, columns), torch.float32),
        "p_threshold": ((lines,), torch.float32),
        "p_scores": ((lines, room), torch.float32),
        "p_places": ((lines, room), torch.int32),
    }
    values: dict[str, Any] = {"T": tokens, "H": heads, "G": groups, "R": heads // key_heads}
    values |= {"K": keys, "words": words, "splits": splits, "stretch": stretch, **place.flags}
    values |= {"W": place.block_size, "RG": place.block_size // place.group_size}
    values |= {"D": width, "BD": max(16, power_of_two(width)), **strides_of(False, p_k=key)}
    walk = {"C": TILE, "EVEN": place.mask is None and tokens % TILE == 0, "ROWS": rows, "STAGES": 3}
    walk["PRECISION"] = "tf32" if mean.dtype != torch.float32 else "tf32x3"
    by_bytes = {"p_marks": Place("p_mark_bytes"), "bytes_per_row": words * 4}
    limits = {"groups": lines, "keys": keys, "COLUMNS": columns, "WIDE": power_of_two(columns)}
    finish = {"FEW": FEW, "CAP": room, "SCORED": scored}
    finish |= {} if scored else {"p_best": Place("p_scores")}
    grid = (tiles * splits, batch * heads)
    steps = [
        Step(keys_select.peaks_kernel, grid, values | walk, 4),
        Step(keys_select.threshold_kernel, (cdiv(lines, 16),), limits | {"ROWS": 16}, 4),
        Step(keys_select.mark_kernel, grid, values | walk | by_bytes, 4),
        Step(keys_select.finish_kernel, (groups, batch * heads), values | finish, 1),
    ]
    return Recipe(steps, workspace)


def gaps_before(mask: Tensor, block_size: int) -> Tensor:
    """How far before token 0 the first block of every sample begins: int32 ``[B]``."""
    return (-first_tokens(mask) % block_size).to(torch.int32)
