"""How a call is cut into programs and tiles: fixed choices, nothing is timed at run time.

Dimension legend: see `lln.kernels.steps`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_WIDTH = 128
MAX_FUSED_BLOCK = 128
# Programs along the second axis of a launch, where split sequences have their heads.
MAX_GRID = 65535
# The joint backward keeps tiles of q, k, v, dO and two summaries on the chip.
MAX_WIDTH_WITH_BLOCKS = 64


def _is_installed(package: str) -> bool:
    """Whether a package could be imported, found out without importing it."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


# Asked once, because torch.compile cannot trace the question.
_HAS_TRITON = _is_installed("triton")


class Tile(NamedTuple):
    """How one kernel walks over its tokens.

    Attributes:
        tokens: In a tile; a power of two.
        warps: Of a program.
        stages: Depth of the pipeline of loads.
        programs: For every multiprocessor, at least; the sequence is split for that.
    """

    tokens: int
    warps: int
    stages: int
    programs: int = 4

    def stretch(self, tokens: int, rows: int, heads: int, cores: int) -> int:
        """Tokens of one program: whole tiles of ``rows`` tokens."""
        tiles = -(-tokens // rows)
        programs = min(max(1, -(-self.programs * cores // max(heads, 1))), tiles)
        return -(-tiles // programs) * rows


@dataclass(frozen=True)
class Plan:
    """Sizes for one call.

    Attributes:
        width: BD, the head width padded to a power of two.
        value_width: BE.
        summarise: Keys and values into a summary.
        read: Queries against it.
        joint_read: The same with the diagonal part; its tile holds ``block_rows`` tokens.
        query_grad: Backward over the queries.
        key_grad: Backward over the keys.
        joint_grad: Backward over both, with the diagonal part.
        block_rows: Tokens of a tile with the diagonal part: whole blocks of it.
        short: Whether one program does a whole (sample, head).
        cores: Multiprocessors to fill.
    """

    width: int
    value_width: int
    summarise: Tile
    read: Tile
    joint_read: Tile
    query_grad: Tile
    key_grad: Tile
    joint_grad: Tile
    block_rows: int
    short: bool
    cores: int


# Set by tests and benchmarks to try other plans: name of a field → value.
overrides: dict[str, Any] = {}


def make_plan(query: Tensor, key: Tensor, value: Tensor, summaries: int, block_size: int) -> Plan:
    """Choose the sizes for a call.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, S, D]``.
        value: ``[B, Hk, S, E]``.
        summaries: B times the number of summary heads.
        block_size: Of the diagonal part; 0 = none.
    """
    width, value_width = (max(16, _power_of_two(t.shape[-1])) for t in (query, value))
    widest = max(width, value_width)
    # Wide heads and float32 leave less room on the chip: smaller tiles, more warps.
    room = widest * (2 if query.dtype == torch.float32 else 1)
    tokens = {16: 64, 32: 64, 64: 64, 128: 64, 256: 32, 512: 16}[room]
    warps = 4 if widest <= 64 else 8
    stages = 3 if room <= 64 else 2
    rows = block_size * max(1, 64 // block_size) if block_size else tokens
    block_tile = max(16, _power_of_two(rows))
    block_warps = 4 if max(widest, block_tile) <= 64 else 8
    longest = max(query.shape[2], key.shape[2])
    heads = query.shape[0] * query.shape[1]
    cores = multiprocessors(query.device)
    chosen = {
        "width": width,
        "value_width": value_width,
        "summarise": Tile(tokens, warps, stages, 2),
        "read": Tile(tokens, warps, stages, 8),
        "joint_read": Tile(block_tile, block_warps, min(stages, 3), 4),
        "query_grad": Tile(tokens, warps, stages, 2),
        "key_grad": Tile(tokens, warps, stages, 8),
        "joint_grad": Tile(block_tile, block_warps, 2, 8),
        "block_rows": rows,
        "short": (longest <= 1024 and summaries >= 2 * cores) or heads > MAX_GRID,
        "cores": cores,
    }
    chosen |= {name: size for name, size in overrides.items() if name in chosen}
    return Plan(**chosen)


def smaller(plan: Plan) -> Plan | None:
    """The next plan that needs less of the chip: fewer stages, then smaller tiles; None at the end.

    The tiles with the diagonal part keep their size, which the blocks dictate.
    """
    walks = ("summarise", "read", "joint_read", "query_grad", "key_grad", "joint_grad")
    tiles: dict[str, Tile] = {name: getattr(plan, name) for name in walks}
    if any(tile.stages > 1 for tile in tiles.values()):
        less = {name: t._replace(stages=max(1, t.stages - 1)) for name, t in tiles.items()}
    elif any(tile.tokens > 16 for name, tile in tiles.items() if "joint" not in name):
        less = {
            name: t if "joint" in name else t._replace(tokens=max(16, t.tokens // 2))
            for name, t in tiles.items()
        }
    else:
        return None
    return replace(plan, **less)


def is_interpreted() -> bool:
    """Whether Triton runs kernels in its CPU interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def why_unavailable(
    query: Tensor, value: Tensor, is_causal: bool, is_packed: bool, block_size: int
) -> str | None:
    """Why the kernels cannot run a call here, as the middle of a sentence; None if they can."""
    if query.device.type != "cuda" and not is_interpreted():
        return f"needs tensors on a CUDA device, got {query.device}"
    if not _HAS_TRITON:
        return 'needs Triton (pip install "lln[triton]")'
    if query.dtype == torch.float64:
        return "computes in float32, but query is float64"
    if is_interpreted() and query.dtype == torch.bfloat16:
        return "runs in Triton's interpreter here, which multiplies bfloat16 wrongly"
    if max(query.shape[-1], value.shape[-1]) > MAX_WIDTH:
        return f"takes head widths up to {MAX_WIDTH}, got {query.shape[-1]} and {value.shape[-1]}"
    if is_causal:
        return "has no causal kernel yet"
    if is_packed:
        return "has no kernel for packed sequences yet"
    if block_size and max(query.shape[-1], value.shape[-1]) > MAX_WIDTH_WITH_BLOCKS:
        return (
            f"takes head widths up to {MAX_WIDTH_WITH_BLOCKS} with diagonal blocks, got "
            f"{query.shape[-1]} and {value.shape[-1]}"
        )
    if block_size > MAX_FUSED_BLOCK:
        return f"takes diagonal blocks up to {MAX_FUSED_BLOCK} tokens, got {block_size}"
    return None


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
