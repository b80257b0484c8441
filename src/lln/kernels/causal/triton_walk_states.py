"""The state that a stretch (a program's tokens) starts from: the sums of all earlier stretches.

A scan over the stretches' own sums writes these states to memory before a walk starts. In the
backward pass the *gathered* state is what later rows contribute to the gradients of keys; with Z
and δ as `lln.kernels.causal.triton_walk_queries` left them:

    U_f = Σ_i e^{x_if − Z_i} dO_i,  V_f = Σ_i e^{x_if − Z_i} δ_i    over all later rows

It goes through the same scan, from the last stretch to the first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.causal.triton_walk_tiles import query_exponents
from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import (
    exponential,
    find_program,
    find_stretch,
    load_queries,
    load_scale,
    rows_inside,
    rows_of,
    token_ok,
)
from lln.kernels.summaries.triton_mixing import load_gradient, mix_rows
from lln.kernels.summaries.triton_summaries import (
    empty_partial,
    load_partial,
    merge_partials,
    store_partial,
)

# Z of a row without gradient: it makes every weight e^{x − Z} zero.
ALWAYS = tl.constexpr(1e30)


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


@triton.jit
def gather_tile(
    b_peak, b_level, b_sum, b_h, b_do, b_delta, b_row,
    EXP: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add rows with the exponents x − Z ``[BT, BD]`` to the gathered state (u, V, U)."""
    b_new = tl.maximum(b_peak, tl.max(b_h, 0).to(tl.float32))
    b_shrink = exponential(b_peak - b_new)
    b_e = exponential((b_h - b_new[None, :].to(EXP)).to(tl.float32))
    # Without other rows, rows that see no key get weight too, but all keys before them are masked.
    b_e = b_e * b_row[:, None]
    b_level = b_level * b_shrink + tl.sum(b_e * b_delta[:, None], 0)
    b_sum = b_sum * b_shrink[:, None]
    b_sum = tl.dot(tl.trans(b_e.to(LOW)), b_do.to(LOW), b_sum, input_precision=PRECISION)
    return b_new, b_level, b_sum


@triton.jit
def load_levels(p_z, p_delta, first, inside, BT: tl.constexpr):
    """Z and δ of a tile's rows ``[BT]``."""
    rows, offset = tl.arange(0, BT), tl.cast(first, tl.int64)
    b_z = tl.load(p_z + offset + rows, mask=inside, other=ALWAYS)
    return b_z, tl.load(p_delta + offset + rows, mask=inside, other=0.0)


@triton.jit
def causal_gather_kernel(
    p_q, p_g, p_m, p_mask, p_alpha, p_starts, p_peak, p_mass, p_sum, p_z, p_delta,
    alpha, mix, program_tokens, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_mb, stride_mh, stride_mt, stride_md,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
    HAS_ALPHA: tl.constexpr, QUIET: tl.constexpr, MIX: tl.constexpr, EVEN: tl.constexpr,
    PACKED: tl.constexpr, SHIFTED: tl.constexpr, EXP: tl.constexpr, LOW: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """The gathered state of one stretch alone."""
    wait_for_launch(FOLLOWS)
    split, index, part = find_program()
    batch, head, begin, start, end = find_stretch(
        p_starts, split, index, program_tokens, T, H, PACKED, SHIFTED
    )
    q = rows_of(p_q, batch, head, begin, stride_qb, stride_qh, stride_qt, stride_qd)
    gradients = rows_of(p_g, batch, head, begin, stride_gb, stride_gh, stride_gt, stride_gd)
    mixes = rows_of(p_m, batch, head, begin, stride_mb, stride_mh, stride_mt, stride_md)
    p_mask += batch * T
    place = mix_rows(index, head, begin, T, 1, PACKED)
    alpha_here = load_scale(p_alpha, alpha, index, HAS_ALPHA)
    b_peak, b_level, b_sum = empty_partial(BD, BE)
    for first in tl.range(start, end, BT, num_stages=STAGES):
        inside = rows_inside(first, end, BT, SHIFTED)
        ok = token_ok(p_mask, first, end, BT, QUIET)
        b_q = load_queries(q, first, inside, ok, BT, D, BD, EVEN, QUIET)
        _, b_do, _, b_row, _ = load_gradient(
            gradients, mixes, mix, first, inside, E, BE, BT, MIX, EVEN
        )
        b_z, b_delta = load_levels(p_z + place, p_delta + place, first, inside, BT)
        b_h = query_exponents(b_q, alpha_here, D, BD).to(EXP) - b_z[:, None]
        b_peak, b_level, b_sum = gather_tile(
            b_peak, b_level, b_sum, b_h, b_do, b_delta, b_row, EXP, LOW, PRECISION
        )
    slots = tl.arange(0, BD)
    store_partial(p_peak, p_mass, p_sum, part, slots, b_peak, b_level, b_sum, BD, BE)
