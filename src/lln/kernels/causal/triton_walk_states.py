"""The state that a stretch (a program's tokens) starts from: the sums of all earlier stretches.

A scan over the stretches' own sums writes these states to memory before a walk starts. The states
of the walk over the keys (`gathering`) go through the same scan, from the last stretch to the
first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.summaries.triton_summaries import (
    empty_partial,
    load_partial,
    merge_partials,
    store_partial,
)


@triton.jit
def load_state(
    p_peak, p_mass, p_sum, part, BD: tl.constexpr, BE: tl.constexpr, HAS_STATE: tl.constexpr
):
    """The state that a stretch starts from: peak ``[BD]``, mass ``[BD]``, sum ``[BD, BE]``."""
    if HAS_STATE:
        b_peak, b_mass, b_sum = load_partial(p_peak, p_mass, p_sum, part, tl.arange(0, BD), BD, BE)
        return b_peak, b_mass, b_sum.to(tl.float32)
    return empty_partial(BD, BE)


@triton.jit
def scan_kernel(
    p_peak, p_mass, p_sum, p_peak_out, p_mass_out, p_sum_out, segments,
    BD: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr, REVERSE: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    """Turn every stretch's own sums into those of all stretches before (or after) it.

    Not in place: several warps load the same peak, and one could store before another loads.
    """
    wait_for_launch(FOLLOWS)
    index = tl.program_id(1).to(tl.int64)
    slots = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b_peak, b_mass, b_sum = empty_partial(ROWS, BE)
    for step in range(segments):
        segment = segments - 1 - step if REVERSE else step
        part = index * segments + segment
        b_other, b_more, b_add = load_partial(p_peak, p_mass, p_sum, part, slots, BD, BE)
        store_partial(p_peak_out, p_mass_out, p_sum_out, part, slots, b_peak, b_mass, b_sum, BD, BE)
        b_peak, b_mass, b_sum = merge_partials(b_peak, b_mass, b_sum, b_other, b_more, b_add)
