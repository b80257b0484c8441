"""The mix of LLN and the diagonal part: the weight of a row, and where its gradient goes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_weights(p_mix, mix, offset, stride_mt, inside, BT: tl.constexpr, MIX: tl.constexpr):
    """The weight of the LLN part in every row ``[BT]``.

    MIX: 0 no diagonal part, 1 one number, 2 a value a row, 3 a value a row and channel (dO is then
    weighed itself, and the rows count in full).
    """
    if MIX == 2:
        places = offset + tl.arange(0, BT)
        return tl.load(p_mix + places * stride_mt, mask=inside, other=0.0).to(tl.float32)
    if MIX == 1:
        return tl.zeros([BT], tl.float32) + mix
    return tl.full([BT], 1.0, tl.float32)


@triton.jit
def mix_rows(index, first_query, begin, T, R: tl.constexpr, PACKED: tl.constexpr):
    """Where the gradient of mix for a head's first row goes, in rows: it is ``[B, H, T, ...]``."""
    if PACKED:
        return tl.cast(first_query, tl.int64) * T + begin
    return index * R * T
