"""Where diagonal blocks begin under a mask: at the first token of a sample that is not masked.

Blocks are counted from there, so the first one that a walk meets may begin before token 0. The walk
then starts at that negative place, and its tiles hold whole blocks as always. The places are found
by a launch of their own: a search inside the walks would take registers that they need.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lln.kernels.call import Call
from lln.kernels.recipes import Step, places

# Tokens of a mask that are looked at together.
LOOK = 1024


@triton.jit
def gap_kernel(p_mask, p_gap, tokens, block_size, LOOK: tl.constexpr):
    """How far before token 0 of a sample its first block begins."""
    batch = tl.program_id(0).to(tl.int64)
    p_mask += batch * tokens
    first, place = tl.cast(tokens, tl.int32), tl.cast(0, tl.int32)
    while place < first:
        at = place + tl.arange(0, LOOK)
        seen = tl.load(p_mask + at, mask=at < tokens, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(seen, at, tokens)))
        place += LOOK
    tl.store(p_gap + batch, (block_size - first % block_size) % block_size)


def find_gaps(
    samples: int, tokens: int, block_size: int
) -> tuple[list[Step], dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """The launch that leaves ``gaps``, and the room for them."""
    arguments = [*places("mask gaps"), tokens, block_size]
    step = Step(gap_kernel, (samples,), arguments, {"LOOK": LOOK}, 4)
    return [step], {"gaps": ((samples,), torch.int32)}


def starts_of(
    call: Call,
) -> tuple[str, list[Step], dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """What the kernels take where sequences or blocks begin, and how it comes to be.

    Returns:
        ``"gaps"`` under a mask, else ``"bounds"``; the steps and the room that it takes.
    """
    if not call.is_shifted:
        return "bounds", [], {}
    return "gaps", *find_gaps(call.samples, call.key.shape[2], call.block_size)
