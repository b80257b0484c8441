"""Whether the kernels can run here, and what fits which chip. Does not import Triton.

The limits depend on the shared memory available to one program. They were found by compiling the
kernels for each kind of chip, which works without the chip; ``tests/kernels/test_chips.py`` repeats
it. If sizes still do not fit, `lln.kernels.launching.recipes.follow` takes smaller ones.

A *walk* is a causal kernel that goes over tiles in order; a *summary* is keys and values as D slots
times E channels (`lln.eager.summary`).

Dimension legend: see `lln.kernels.launching.triton_steps`. In all functions query is ``[…, D]``,
``heads`` are those of all samples, ``mix_grad`` says whether the mix needs a gradient, ``extras``
whether there is a key mask or a mix per channel.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

MAX_WIDTH = 256
# Most programs along the second axis of a grid, which is the heads' axis for split sequences.
MAX_GRID = 65535
# With fewer channels, Triton 3.6 miscompiles tiles of 64 tokens in causal walks on Hopper.
LEAST_CAUSAL_WIDTH = 64
# Causal walks hold a state as well as their tiles, which leaves less room for a block, and for a
# summary's slots times channels.
MAX_CAUSAL_BLOCK_BYTES = 16 * 1024
MAX_CAUSAL_SUMMARY = 64 * 128


class Chip(NamedTuple):
    """Limits of one kind of chip.

    Attributes:
        shared: Least bytes of shared memory per program that such a chip has.
        summary: Most slots times channels of a summary; wider values are read in slices.
        summary_by_blocks: The same where a diagonal part shares a kernel with it.
        summary_float32: The same in float32.
        block_tokens: The longest diagonal block that fits one tile; longer ones are computed
            outside the kernels.
        block_bytes: Most bytes of such a tile of keys.
        joint_tokens: The longest tile of blocks whose gradients fit in one pass with LLN's.
        joint_summary: Most slots times channels of a summary in that pass.
        joint_summary_float32: The same in float32.
        takes_extras: Whether blocks still fit with a key mask or a mix per channel.
        keys_bytes: Most bytes of a block of keys beside exact keys, and of a page.
    """

    shared: int
    summary: int
    summary_by_blocks: int
    summary_float32: int
    block_tokens: int
    block_bytes: int
    joint_tokens: int
    joint_summary: int
    joint_summary_float32: int
    takes_extras: bool
    keys_bytes: int


# H100, H200, B200: 227 KB.
LARGE = Chip(
    shared=200 * 1024,
    summary=256 * 256,
    summary_by_blocks=256 * 128,
    summary_float32=64 * 128,
    block_tokens=128,
    block_bytes=32 * 1024,
    joint_tokens=128,
    joint_summary=64 * 128,
    joint_summary_float32=64 * 64,
    takes_extras=True,
    keys_bytes=32 * 1024,
)
# A100: 163 KB.
MIDDLE = LARGE._replace(
    shared=160 * 1024,
    summary=128 * 128,
    summary_by_blocks=128 * 128,
    joint_tokens=64,
    joint_summary=64 * 64,
    takes_extras=False,
    keys_bytes=16 * 1024,
)
# RTX 30, 40 and 50, A10, L4, L40: 99 KB.
SMALL = Chip(
    shared=99 * 1024,
    summary=64 * 128,
    summary_by_blocks=64 * 128,
    summary_float32=64 * 64,
    block_tokens=64,
    block_bytes=16 * 1024,
    joint_tokens=64,
    joint_summary=64 * 64,
    joint_summary_float32=64 * 32,
    takes_extras=False,
    keys_bytes=8 * 1024,
)
CHIPS = (LARGE, MIDDLE, SMALL)

# Limits of the kernels for exact keys: channels, and the fewest queries that share their chosen
# keys (fewer would not fill a tile).
MAX_KEYS_WIDTH = 128
LEAST_KEYS_GROUP = 16
# Most keys that the kernels choose for a group.
MAX_CHOSEN = 256
# Limits of the kernels for pages: tokens of one, those of a query, heads that share keys.
LONGEST_PAGE, MOST_PAGES, MOST_MEMBERS = 64, 256, 64

_known: dict[tuple[str, int | None], int] = {}


def shared_bytes(kind: str, index: int | None) -> int:
    """Shared memory available to a program on a device; the largest chip's where it is unknown."""
    if (kind, index) not in _known:
        found = CHIPS[0].shared
        if kind == "cuda" and torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(index)
            found = getattr(properties, "shared_memory_per_block_optin", found)
        _known[kind, index] = found
    return _known[kind, index]


# What `torch.compiler.assume_constant_result` does, without importing the compiler with lln.
shared_bytes._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def chip_of(device: torch.device) -> Chip | None:
    """The limits of a device; None if it has less shared memory than any of them needs."""
    shared = shared_bytes(device.type, device.index)
    for chip in CHIPS:
        if shared >= chip.shared:
            return chip
    return None


def _is_installed(package: str) -> bool:
    """Whether a package is installed, without importing it."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


# Looked up once, because torch.compile cannot trace the lookup.
_HAS_TRITON = _is_installed("triton")


def is_interpreted() -> bool:
    """Whether Triton runs kernels in its CPU interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def why_unavailable(query: Tensor) -> str | None:
    """Why the kernels cannot run a call here, as the middle of a sentence; None if they can."""
    if query.device.type != "cuda" and not is_interpreted():
        return f"needs tensors on a CUDA device, got {query.device}"
    if not _HAS_TRITON:
        return 'needs Triton (pip install "lln[triton]")'
    if query.dtype == torch.float64:
        return "computes in float32, but query is float64"
    if is_interpreted() and query.dtype == torch.bfloat16:
        return "runs in Triton's interpreter here, which multiplies bfloat16 wrongly"
    if query.shape[-1] > MAX_WIDTH:
        return f"takes head widths up to {MAX_WIDTH}, got {query.shape[-1]}"
    if chip_of(query.device) is None:
        return f"needs a GPU with {CHIPS[-1].shared >> 10} KB of shared memory for a program"
    return None


def blocks_fit(query: Tensor, block_size: int, is_causal: bool, extras: bool) -> bool:
    """Whether a kernel takes diagonal blocks of that size at all.

    ``is_causal``: the walk of causal LLN attention has to compute them.
    """
    chip = chip_of(query.device)
    tokens = max(16, power_of_two(block_size))
    width = max(16, power_of_two(query.shape[-1]))
    if chip is None or (extras and not chip.takes_extras):
        return False
    room = chip.block_bytes
    if is_causal:
        width, room = max(width, LEAST_CAUSAL_WIDTH), min(room, MAX_CAUSAL_BLOCK_BYTES)
    return tokens <= chip.block_tokens and tokens * width * query.itemsize <= room


def blocks_span(query: Tensor, extras: bool) -> bool:
    """Whether a kernel takes diagonal blocks of any size, tile by tile."""
    return query.dtype in (torch.bfloat16, torch.float16) and not extras


def blocks_join(
    query: Tensor, heads: int, block_size: int, is_causal: bool, mix_grad: bool, extras: bool
) -> bool:
    """Whether the kernels of LLN attention also compute the diagonal part.

    A mix that needs a gradient needs both parts in one pass.
    """
    chip = chip_of(query.device)
    if chip is None or not blocks_fit(query, block_size, is_causal, extras):
        return False
    width = max(16, power_of_two(query.shape[-1]))
    if is_causal or has_own_pass(width, query.dtype, heads, mix_grad):
        return True
    rows = block_rows(block_size, tile_tokens(width, query.dtype))
    return max(16, power_of_two(rows)) <= chip.joint_tokens


def has_own_pass(widest: int, dtype: torch.dtype, heads: int, mix_grad: bool) -> bool:
    """Whether the diagonal's gradients have a pass of their own, without those of wide summaries.

    Together they do not fit the registers.
    """
    return widest > 64 and can_split(dtype, heads, mix_grad)


def can_split(dtype: torch.dtype, heads: int, mix_grad: bool) -> bool:
    """Whether the kernels can compute the gradients of both parts in separate passes."""
    return dtype != torch.float32 and not mix_grad and not is_crowded(heads)


def is_crowded(heads: int) -> bool:
    """Whether there are more heads than the grid of a launch for split sequences can have."""
    return heads > MAX_GRID


def tile_tokens(widest: int, dtype: torch.dtype) -> int:
    """Tokens per tile; fewer for wide heads and float32."""
    room = widest * (2 if dtype == torch.float32 else 1)
    return {16: 64, 32: 64, 64: 64, 128: 64, 256: 32, 512: 16}[room]


def block_rows(block_size: int, tokens: int) -> int:
    """Tokens per tile with the diagonal part: as many whole blocks as fit, at least one."""
    return block_size * max(1, tokens // block_size) if block_size else tokens


def widest_value(
    query: Tensor, heads: int, block_size: int, is_causal: bool, mix_grad: bool
) -> int:
    """How many channels of the values one call takes; a power of two.

    ``block_size`` is that of a diagonal part in the same kernels; 0 = none.
    """
    chip = chip_of(query.device) or CHIPS[-1]
    is_float32 = query.dtype == torch.float32
    # Tiles and summaries share the chip, unless the diagonal part has a pass of its own.
    is_joint = block_size > 0 and not can_split(query.dtype, heads, mix_grad)
    if is_causal:
        most = MAX_CAUSAL_SUMMARY
    elif is_joint:
        most = chip.joint_summary_float32 if is_float32 else chip.joint_summary
    elif is_float32:
        most = chip.summary_float32
    else:
        # The kernels for crowded grids need as much room as those with blocks.
        most = chip.summary_by_blocks if block_size or is_crowded(heads) else chip.summary
    return min(MAX_WIDTH, max(16, most // max(16, power_of_two(query.shape[-1]))))


def widest_block_value(query: Tensor, block_size: int) -> int:
    """How many channels of the values block-diagonal attention alone takes; a power of two."""
    chip = chip_of(query.device) or CHIPS[-1]
    tokens = max(16, power_of_two(block_size))
    return min(MAX_WIDTH, chip.block_bytes // (tokens * query.itemsize))


def why_no_keys(query: Tensor, value_width: int, block_size: int, group_size: int) -> str | None:
    """Why the kernels do not take attention with exact keys; None if they do."""
    chip = chip_of(query.device) or CHIPS[-1]
    widest = max(16, power_of_two(max(query.shape[-1], value_width)))
    block_bytes = max(block_size, 16) * widest * query.itemsize
    fits = widest <= MAX_KEYS_WIDTH and block_bytes <= chip.keys_bytes
    sizes_fit = block_size == power_of_two(block_size) and group_size == power_of_two(group_size)
    if fits and sizes_fit and group_size >= LEAST_KEYS_GROUP:
        return None
    return (
        f"has no tile for blocks of {block_size} tokens in groups of {group_size} with exact keys "
        f"by {max(query.shape[-1], value_width)} channels here"
    )


def why_no_pages(
    query: Tensor, value_width: int, page_size: int, pages: int, members: int
) -> str | None:
    """Why the kernels do not take attention to chosen pages; None if they do.

    ``pages`` are those of a query, ``members`` the query heads per key head.
    """
    chip = chip_of(query.device) or CHIPS[-1]
    widest = max(16, power_of_two(max(query.shape[-1], value_width)))
    page_bytes = max(16, power_of_two(page_size)) * widest * query.itemsize
    if widest > MAX_WIDTH or page_size > LONGEST_PAGE or page_bytes > chip.keys_bytes:
        return (
            f"has no tile for pages of {page_size} tokens by "
            f"{max(query.shape[-1], value_width)} channels here"
        )
    if pages > MOST_PAGES:
        return f"takes up to {MOST_PAGES} pages per query, got {pages}"
    if members > MOST_MEMBERS:
        return f"takes up to {MOST_MEMBERS} query heads per key head, got {members}"
    return None


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(number - 1, 0).bit_length()
