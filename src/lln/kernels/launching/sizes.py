"""Which tiles a call gets, and the other sizes of its launches: nothing is timed at run time.

How sequences are split over programs with them: `stretches`. A causal *walk* goes over
the tiles of a stretch in order; a *summary* is keys and values as D slots (`lln.eager.summary`).

Dimension legend: see `lln.kernels.launching.triton_steps`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lln.kernels.launching.limits import (
    LEAST_CAUSAL_WIDTH,
    block_rows,
    has_own_pass,
    is_crowded,
    multiprocessors,
    power_of_two,
    tile_tokens,
)
from lln.kernels.launching.stretches import Tile

# Heads of 33 to 64 channels in 16-bit types: whole waves on an H200 (docs/kernels.md).
MIDDLE_TILES = {
    "read": Tile(64, 4, 3, 12, resident=4),
    "query_grad": Tile(64, 4, 3, 8, resident=2),
    "key_grad": Tile(64, 4, 3, 8, resident=2),
}
# The same with tiles of 64 tokens that hold blocks.
MIDDLE_BLOCK_TILES = {
    "joint_read": Tile(64, 4, 3, 8, resident=2),
    "joint_grad": Tile(64, 4, 2, 8, resident=2),
}

# From this length on, heads of up to 32 channels have fewer partial summaries.
LONG_NARROW = 8192

# Wider heads in 16-bit types: the fastest of a sweep on an H200.
WIDE_TILES = {
    128: {
        "summarise": Tile(128, 8, 3, 2),
        "read": Tile(128, 8, 3, 8),
        "query_grad": Tile(64, 8, 3, 2),
        "key_grad": Tile(64, 8, 3, 8),
    },
    256: {
        "summarise": Tile(64, 8, 3, 2),
        "read": Tile(64, 8, 3, 8),
        "query_grad": Tile(16, 8, 3, 2),
        "key_grad": Tile(64, 8, 3, 8),
    },
}

# Those of heads whose passes have kernels of their own, by another sweep.
SLOT_MAJOR_TILES = {
    128: {
        "summarise": Tile(64, 4, 4, 2, resident=2),
        "read": Tile(64, 4, 2, 8, resident=3),
        "query_grad": Tile(64, 4, 1, 8, resident=2),
        "slot_grad": Tile(32, 4, 4, 2, resident=3),
        "key_grad": Tile(64, 8, 3, 8, resident=1),
    },
    256: {
        "summarise": Tile(64, 4, 4, 2, resident=2),
        "read": Tile(64, 8, 3, 8, resident=1),
        "query_grad": Tile(64, 8, 1, 8, resident=1),
        "slot_grad": Tile(32, 4, 4, 2, resident=3),
        "key_grad": Tile(32, 8, 2, 8, resident=2),
    },
}
# Those of 256 slots by as many channels, which leave room for fewer programs.
WIDEST_TILES = {
    "summarise": Tile(64, 4, 2, 2, resident=2),
    "read": Tile(64, 8, 3, 8, resident=1),
    "query_grad": Tile(64, 8, 1, 8, resident=1),
    "slot_grad": Tile(32, 4, 4, 2, resident=2),
    "key_grad": Tile(64, 8, 1, 8, resident=1),
}

# Sliding windows and long blocks, by the padded width of the wider side: the fastest of a sweep
# on an H200.
WINDOW_TILES = {
    64: {
        "window_read": Tile(64, 4, 3, across=64),
        "window_query": Tile(64, 4, 3, across=32),
        "window_value": Tile(64, 4, 3, across=32),
        "window_key": Tile(64, 4, 2, across=32),
    },
    128: {
        "window_read": Tile(64, 4, 3, across=32),
        "window_query": Tile(64, 4, 2, across=32),
        "window_value": Tile(64, 4, 2, across=32),
        "window_key": Tile(64, 4, 2, across=32),
    },
    256: {
        "window_read": Tile(64, 4, 2, across=32),
        "window_query": Tile(128, 8, 3, across=32),
        "window_value": Tile(128, 8, 3, across=32),
        "window_key": Tile(128, 8, 1, across=64),
    },
}
# Chosen pages by the same width; nothing was timed yet.
PAGE_TILES = {
    64: {"page_read": Tile(128, 4, 2), "page_grad": Tile(64, 4, 2)},
    128: {"page_read": Tile(64, 4, 2), "page_grad": Tile(64, 4, 1)},
    256: {"page_read": Tile(64, 8, 1), "page_grad": Tile(32, 8, 1)},
}
# The keys of narrow heads with blocks, and all of wide heads with blocks of so many tokens at most.
SHORT_BLOCK = 64
BLOCK_KEY_TILE = Tile(64, 4, 3, across=32)
SHORT_BLOCK_TILES = dict.fromkeys(WINDOW_TILES[256], Tile(64, 4, 2, across=32))

# Causal attention by chunks, of one size for all passes: the fastest of a sweep on an H200.
CHUNK_TILES = {
    "chunk_state": Tile(64, 4, 3, 2),
    "chunk_gather": Tile(64, 4, 3, 2, 168),
    "chunk": Tile(64, 4, 1, 1, 128),
    "chunk_query": Tile(64, 4, 1, 1, 168),
    "chunk_key": Tile(64, 4, 1, 1, 168),
}


@dataclass(frozen=True)
class Sizes:
    """The tiles of one call, and the other sizes of its launches.

    Attributes:
        width: BD, the head width padded to a power of two.
        value_width: BE.
        measure: Moments of queries and keys.
        summarise: Keys and values into a summary.
        read: Queries against it.
        joint_read: The same with the diagonal part; its tile holds ``block_rows`` tokens.
        ahead_read: The same for `triton_forward.read_both_ahead`; None = not used.
        query_grad: Backward over the queries; so is ``slot_grad``, the second pass of wide heads
            (`triton_wide_queries`).
        key_grad: Backward over the keys; ``joint_grad`` over both, with the diagonal part.
        walk: Causal attention, tile by tile; ``walk_query`` and ``walk_key`` are its backward,
            forward and backward over the tiles.
        chunk_state: Its states before every chunk, where it goes by chunks; ``chunk_gather`` the
            gathered ones behind it. The others are the outputs of a chunk and its backward.
        window_read: Sliding windows, and blocks tile by tile; then gradients of the queries, of the
            values, where wide heads have a pass for them, and of the keys, or of both.
        page_score: Rows of queries, and keys across, whose scores are computed at once.
        page_read: Rows that read one page; ``page_grad`` with gradients.
        has_chunks: Whether causal attention goes by chunks where it can
            (`lln.kernels.causal.launch_chunks`).
        block_rows: Tokens per tile with the diagonal part: whole blocks.
        has_blocks: Whether there is a diagonal part.
        split_blocks: Whether its gradients have a separate pass: together with those of wide
            summaries they do not fit the registers.
        is_slot_major: Whether the passes of wide heads have kernels of their own
            (`triton_wide_summary`, `triton_wide_queries` and `triton_slot_major_grads`).
        summary_slots: Slots that these kernels compute at once.
        is_joined: Whether the gradients of keys and values and those of the diagonal share a pass
            after the queries' (`triton_slot_major_joint`), if their kernels are turned.
        folds: Whether a pass over tokens first sums up the parts that the pass before it has
            left, which saves the launch between them and costs more the larger a part is.
        short: Whether one program handles a whole (sample, head).
        cores: Multiprocessors to fill.
    """

    width: int
    value_width: int
    measure: Tile
    summarise: Tile
    read: Tile
    joint_read: Tile
    ahead_read: Tile | None
    query_grad: Tile
    slot_grad: Tile
    key_grad: Tile
    joint_grad: Tile
    walk: Tile
    walk_query: Tile
    walk_key: Tile
    chunk_state: Tile
    chunk_gather: Tile
    chunk: Tile
    chunk_query: Tile
    chunk_key: Tile
    window_read: Tile
    window_query: Tile
    window_value: Tile
    window_key: Tile
    page_score: Tile
    page_read: Tile
    page_grad: Tile
    has_chunks: bool
    block_rows: int
    has_blocks: bool
    split_blocks: bool
    is_slot_major: bool
    summary_slots: int
    is_joined: bool
    folds: bool
    short: bool
    cores: int


# Set by tests and benchmarks to try other sizes: name of a field → value.
overrides: dict[str, Any] = {}


def choose_sizes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    samples: int,
    summary_heads: int,
    block_size: int,
    longest: int = 0,
    causal: bool = False,
) -> Sizes:
    """Choose the sizes for a call.

    Its tensors are ``[B, heads, tokens, channels]``; ``samples`` are B, or packed sequences, of
    which the longest has ``longest`` tokens (0 = not packed), and each has so many summaries. The
    block size is that of a diagonal part, 0 = none.
    """
    return _choose(
        query.shape[-1],
        value.shape[-1],
        query.dtype,
        query.device,
        longest or max(query.shape[2], key.shape[2]),
        samples * query.shape[1],
        samples * summary_heads,
        block_size,
        causal,
        tuple(overrides.items()),
    )


@lru_cache(4096)
def _choose(
    head_width: int,
    value_width: int,
    dtype: torch.dtype,
    device: torch.device,
    longest: int,
    heads: int,
    summaries: int,
    block_size: int,
    causal: bool,
    overridden: tuple[tuple[str, Any], ...],
) -> Sizes:
    width, value_width = (max(16, power_of_two(size)) for size in (head_width, value_width))
    widest = max(width, value_width)
    # Wide heads and float32 leave less room on the chip: smaller tiles, more warps.
    room = widest * (2 if dtype == torch.float32 else 1)
    tokens = tile_tokens(widest, dtype)
    warps = 4 if widest <= 64 else 8
    stages = 3 if room <= 64 else 2
    is_wide = widest > 64 and dtype != torch.float32
    is_narrow = widest <= 32 and dtype != torch.float32
    rows = block_rows(block_size, tokens)
    block_tile = max(16, power_of_two(rows))
    if causal and block_size and block_tile >= 64:
        width, value_width = (max(size, LEAST_CAUSAL_WIDTH) for size in (width, value_width))
    block_warps = 4 if max(widest, block_tile) <= 64 else 8
    walk_warps = 4 if width <= 64 and block_tile <= 64 else 8
    walk_tokens = block_tile if block_size else 16 if room > 128 else 32
    walk = Tile(walk_tokens, walk_warps, 1 if room > 128 else 2 if room > 64 else 3)
    cores = multiprocessors(device)
    # Two wide summaries per program leave no room to prefetch.
    short = (longest <= 1024 and summaries >= 2 * cores and not is_wide) or is_crowded(heads)
    chosen = {
        "width": width,
        "value_width": value_width,
        "measure": Tile(tokens, warps, stages, 4),
        "summarise": Tile(tokens, warps, stages, 2),
        "read": Tile(tokens, warps, stages, 8),
        "joint_read": Tile(block_tile, block_warps, stages, 4),
        "ahead_read": None,
        "query_grad": Tile(tokens, warps, stages, 2),
        "slot_grad": Tile(tokens, warps, stages, 2),
        "key_grad": Tile(tokens, warps, stages, 8),
        "joint_grad": Tile(block_tile, block_warps, 2, 8),
        **dict.fromkeys(("walk", "walk_query", "walk_key"), walk),
        **CHUNK_TILES,
        **WINDOW_TILES[min(max(64, room), 256)],
        **PAGE_TILES[min(max(64, room), 256)],
        "page_score": Tile(128, 4, 3, across=128 if width <= 32 and dtype.itemsize == 2 else 64)
        if room <= 128
        else Tile(64, 4, 2, across=32),
        # Other types would round their states, or move twice the memory.
        "has_chunks": causal and width == value_width == 64 and dtype == torch.bfloat16,
        "block_rows": rows,
        "has_blocks": block_size > 0,
        "split_blocks": block_size > 0 and has_own_pass(widest, dtype, heads, mix_grad=False),
        "is_slot_major": is_wide and width == widest and not (short or causal),
        "summary_slots": 64,
        # Wider heads and larger blocks leave no registers for both.
        "is_joined": widest <= 128 and block_tile <= 64,
        "folds": is_narrow and not causal,
        "short": short,
        "cores": cores,
    }
    if is_narrow:
        chosen |= _narrow_tiles(longest, block_tile, block_warps, short, block_size > 0)
    if block_size and room <= 64:
        chosen["window_key"] = BLOCK_KEY_TILE
    elif 0 < block_size <= SHORT_BLOCK and room > 128:
        chosen |= SHORT_BLOCK_TILES
    if widest == 64 and dtype != torch.float32:
        chosen |= MIDDLE_TILES | (MIDDLE_BLOCK_TILES if block_tile == 64 else {})
    if is_wide:
        chosen |= (SLOT_MAJOR_TILES if chosen["is_slot_major"] else WIDE_TILES)[widest]
        reading, updating = (3, 2) if widest == 128 else (2, 1)
        chosen["joint_read"] = Tile(block_tile, block_warps, reading, 8)
        chosen["joint_grad"] = Tile(block_tile, block_warps, updating, 8)
        if chosen["is_slot_major"] and width == value_width == 256:
            chosen |= WIDEST_TILES
        if chosen["is_slot_major"] and chosen["is_joined"] and block_tile == 64:
            chosen["joint_read"] = Tile(block_tile, 4, reading, 8, resident=1)
            chosen["ahead_read"] = Tile(block_tile, 4, 2, 8, resident=2)
            chosen["joint_grad"] = Tile(block_tile, block_warps, updating, 8, resident=1)
    chosen |= {name: size for name, size in overridden if name in chosen}
    return Sizes(**chosen)


def _narrow_tiles(
    longest: int, block_tile: int, block_warps: int, short: bool, has_blocks: bool
) -> dict[str, Tile]:
    """Tiles of heads of up to 32 channels in 16-bit types, by a sweep on an H200.

    A summary of 32 slots is two warps high: with four, each row would have two warps, which meet at
    every tile.
    """
    # A tile that is not full costs more than a smaller one.
    long_tile = 128 if longest % 128 == 0 else 64
    joint = Tile(block_tile, block_warps, 3, 12)
    if short and not has_blocks:
        return {"summarise": Tile(32, 2, 4), "read": Tile(32, 2, 4)}
    if short:
        return {"query_grad": Tile(long_tile, 4, 3), "joint_read": joint, "joint_grad": joint}
    # Whoever reads a summary merges its parts: long sequences are cut into fewer of them.
    summarise = Tile(long_tile, 2, 3, 3, resident=3)
    if longest >= LONG_NARROW:
        summarise = Tile(long_tile, 2, 4, 2, resident=2)
    return {
        "summarise": summarise,
        "read": Tile(64, 4, 4, 8, resident=8),
        "query_grad": Tile(64, 4, 3, 4, resident=3),
        "key_grad": Tile(64, 4, 3, 12, resident=4),
        "joint_read": joint,
        "joint_grad": Tile(64, 4, 4, 8, resident=2) if block_tile == 64 else joint,
    }


def smaller(chosen: Sizes) -> Sizes | None:
    """The next sizes that need less of the chip: fewer stages, then smaller tiles; None at the end.

    Tiles with the diagonal part keep their size, which the blocks dictate.
    """
    walks = [
        field.name for field in fields(chosen) if isinstance(getattr(chosen, field.name), Tile)
    ]
    tiles: dict[str, Tile] = {name: getattr(chosen, name) for name in walks}
    fixed = ["joint_read", "ahead_read", "joint_grad"]
    if chosen.has_blocks:
        fixed += ["walk", "walk_query", "walk_key"]
    if any(tile.stages > 1 for tile in tiles.values()):
        less = {name: t._replace(stages=max(1, t.stages - 1)) for name, t in tiles.items()}
    elif any(tile.tokens > 16 for name, tile in tiles.items() if name not in fixed):
        less = {name: t if name in fixed else _halved(t) for name, t in tiles.items()}
    else:
        return None
    return replace(chosen, **less)


def _halved(tile: Tile) -> Tile:
    tokens, across = (max(16, size // 2) for size in (tile.tokens, tile.across))
    return tile._replace(tokens=tokens, across=across if tile.across else 0)
