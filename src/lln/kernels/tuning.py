"""How a call is cut into programs and tiles: fixed choices, nothing is timed at run time.

Dimension legend: see `lln.kernels.steps`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lln.errors import BackendUnavailableError

MAX_WIDTH = 256
MAX_FUSED_BLOCK = 128


@dataclass(frozen=True)
class Plan:
    """Sizes for one call.

    Attributes:
        width: BD, the head width padded to a power of two.
        value_width: BE.
        tile: Tokens of a tile over keys or queries.
        block_rows: Tokens of a tile with the diagonal part: whole blocks of it.
        block_tile: The same padded to a power of two.
        short: Whether one program does a whole (sample, head).
        splits: Programs a (sample, head), if not short.
        program_tokens: Tokens of such a program.
        warps: Of a program.
        diag_warps: Of a program with the diagonal part.
        stages: Depth of the loads' pipeline.
    """

    width: int
    value_width: int
    tile: int
    block_rows: int
    block_tile: int
    short: bool
    splits: int
    program_tokens: int
    warps: int
    diag_warps: int
    stages: int


# Set by tests and benchmarks to try other plans: name of a field → value.
overrides: dict[str, int] = {}


def make_plan(
    query: Tensor, key: Tensor, value: Tensor, summaries: int, block_size: int, backward: bool
) -> Plan:
    """Choose the sizes for a call.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, S, D]``.
        value: ``[B, Hk, S, E]``.
        summaries: B times the number of summary heads.
        block_size: Of the diagonal part; 0 = none.
        backward: Whether gradients are computed.
    """
    width, value_width = (max(16, _power_of_two(t.shape[-1])) for t in (query, value))
    widest = max(width, value_width)
    wide_type = query.dtype == torch.float32
    tile = {16: 128, 32: 128, 64: 128, 128: 64, 256: 32}[widest]
    if wide_type:
        tile = max(16, tile // 2)
    rows = block_size * max(1, 64 // block_size) if block_size else tile
    block_tile = max(16, _power_of_two(rows))
    tokens = max(query.shape[2], key.shape[2])
    cores = multiprocessors(query.device)
    short = tokens <= 1024 and summaries >= 2 * cores
    align = rows if block_size else tile
    programs = overrides.get("programs_per_core", 4)
    wanted = max(1, min(-(-programs * cores // summaries), -(-tokens // align)))
    program_tokens = -(-tokens // wanted)
    program_tokens = -(-program_tokens // align) * align
    chosen = {
        "width": width,
        "value_width": value_width,
        "tile": tile,
        "block_rows": rows,
        "block_tile": block_tile,
        "short": short,
        "splits": -(-tokens // program_tokens),
        "program_tokens": program_tokens,
        "warps": 4 if widest <= 64 else 8,
        "diag_warps": 4 if max(widest, block_tile) <= 64 else 8,
        "stages": 2,
    }
    chosen |= {name: size for name, size in overrides.items() if name in chosen}
    return Plan(**chosen)  # pyright: ignore[reportArgumentType]


def is_interpreted() -> bool:
    """Whether Triton runs kernels in its CPU interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def check_available(query: Tensor, value: Tensor) -> None:
    """Refuse what the kernels cannot run, with the fix.

    Raises:
        BackendUnavailableError: Always with a sentence that names the way out.
    """
    way_out = "use impl='eager', or impl='auto' to let lln choose"
    try:
        import triton  # noqa: F401
    except ImportError:
        raise BackendUnavailableError(
            f"impl='triton' needs Triton: pip install \"lln[triton]\", or {way_out}."
        ) from None
    if query.device.type != "cuda" and not is_interpreted():
        raise BackendUnavailableError(
            f"impl='triton' needs tensors on a CUDA device, got {query.device}: move them, or "
            f"{way_out} (TRITON_INTERPRET=1 runs the kernels on the CPU, for tests)."
        )
    if query.dtype == torch.float64:
        raise BackendUnavailableError(
            f"impl='triton' computes in float32, but query is float64: {way_out}."
        )
    if is_interpreted() and query.dtype == torch.bfloat16:
        raise BackendUnavailableError(
            "Triton's interpreter multiplies bfloat16 wrongly: use float32 or float16 under "
            "TRITON_INTERPRET=1."
        )
    if max(query.shape[-1], value.shape[-1]) > MAX_WIDTH:
        raise BackendUnavailableError(
            f"impl='triton' takes head widths up to {MAX_WIDTH}, got {query.shape[-1]} and "
            f"{value.shape[-1]}: {way_out}."
        )


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
