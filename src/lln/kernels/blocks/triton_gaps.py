"""Where diagonal blocks begin under a mask: at the first token of a sample that is not masked.

Blocks are counted from there, so the first block that a kernel visits may begin before token 0. The
kernel then starts at that negative place, and its tiles hold whole blocks as always. The places are
found by a separate launch: a search inside the kernels would take registers that they need.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Tokens of a mask that are read at a time.
LOOK = 1024


@triton.jit
def gap_kernel(p_mask, p_starts, tokens, block_size, LOOK: tl.constexpr):
    """How far before token 0 of a sample its first block begins."""
    batch = tl.program_id(0).to(tl.int64)
    p_mask += batch * tokens
    first, place = tl.cast(tokens, tl.int32), tl.cast(0, tl.int32)
    while place < first:
        at = place + tl.arange(0, LOOK)
        seen = tl.load(p_mask + at, mask=at < tokens, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(seen, at, tokens)))
        place += LOOK
    tl.store(p_starts + batch, (block_size - first % block_size) % block_size)
