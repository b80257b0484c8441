"""The state that a stretch starts from: the sums of all stretches before it.

A scan over the stretches' own sums leaves these states in memory, before a walk starts. The states
that the walk over the keys gathers (`gathering`) go through the same scan
from the last stretch to the first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.steps import NEVER, exponential


@triton.jit
def load_state(
    p_peak, p_mass, p_sum, part, BD: tl.constexpr, BE: tl.constexpr, HAS_STATE: tl.constexpr
):
    """The state that a stretch starts from: peak ``[BD]``, mass ``[BD]``, sum ``[BD, BE]``."""
    slots = tl.arange(0, BD)
    if HAS_STATE:
        p_in = p_sum + part * BD * BE + slots[:, None] * BE + tl.arange(0, BE)[None, :]
        b_peak = tl.load(p_peak + part * BD + slots)
        return b_peak, tl.load(p_mass + part * BD + slots), tl.load(p_in)
    b_peak = tl.full([BD], NEVER, tl.float32)
    return b_peak, tl.zeros([BD], tl.float32), tl.zeros([BD, BE], tl.float32)


@triton.jit
def scan_kernel(
    p_peak, p_mass, p_sum, p_peak_before, p_mass_before, p_sum_before, segments,
    BD: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """From every stretch's own sums to those of all stretches before (or after) it.

    Not in place: several warps load the same peak, and one could store before another loads.
    """
    index = tl.program_id(1).to(tl.int64)
    slots = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b_peak = tl.full([ROWS], NEVER, tl.float32)
    b_mass = tl.zeros([ROWS], tl.float32)
    b_sum = tl.zeros([ROWS, BE], tl.float32)
    for step in range(segments):
        segment = segments - 1 - step if REVERSE else step
        part = index * segments + segment
        places = part * BD * BE + slots[:, None] * BE + tl.arange(0, BE)[None, :]
        b_other = tl.load(p_peak + part * BD + slots)
        b_other_mass = tl.load(p_mass + part * BD + slots)
        b_other_sum = tl.load(p_sum + places)
        tl.store(p_peak_before + part * BD + slots, b_peak)
        tl.store(p_mass_before + part * BD + slots, b_mass)
        tl.store(p_sum_before + places, b_sum)
        b_new = tl.maximum(b_peak, b_other)
        b_old, b_add = exponential(b_peak - b_new), exponential(b_other - b_new)
        b_mass = b_mass * b_old + b_other_mass * b_add
        b_sum = b_sum * b_old[:, None] + b_other_sum * b_add[:, None]
        b_peak = b_new
