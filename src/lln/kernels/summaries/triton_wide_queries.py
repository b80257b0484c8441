"""Gradients of the queries of wide heads in two passes: dq by rows, then dC and shift by slots.

The equations are those of `triton_backward_ranges`. In one pass, dC of a wide head
takes the registers that a second program on the multiprocessor needs. Here the first pass leaves
two numbers per row, and the second one reads queries and dO again:

    Z_i = log Σ_f e^{x_if + L_f},  m_i = Σ_f A_if dA_if,  A_if = e^{x_if + L_f − Z_i}

Dimension legend: see `lln.kernels.launching.triton_steps`; R query heads per summary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import (
    NEVER,
    exponential,
    find_program,
    find_stretch,
    load_queries,
    load_scale,
    quiet_rows,
    rows_of,
    store_rows,
    token_ok,
    widen,
    widen_turned,
)
from lln.kernels.summaries.triton_backward import load_summary
from lln.kernels.summaries.triton_backward_ranges import centred_queries
from lln.kernels.summaries.triton_mixing import load_gradient, mix_rows
from lln.kernels.summaries.triton_wide_summary import load_slots


@triton.jit
def query_rows_kernel(
    p_q, p_g, p_dq, p_m, p_mask, p_alpha, p_dalpha, p_log_mass, p_centroid, p_z, p_mean, p_starts,
    alpha, mix, program_tokens, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd, stride_mb, stride_mh, stride_mt, stride_md,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_ALPHA: tl.constexpr, ALPHA_GRAD: tl.constexpr, EVEN: tl.constexpr,
    QUIET: tl.constexpr, MIX: tl.constexpr, SPLIT: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One stretch of queries of one (sample, head): dq, Z and m, and its part of dα.

    With the diagonal part dq is written later, by the pass over both parts, unless ``SPLIT``.
    """
    wait_for_launch(FOLLOWS)
    split, index, part = find_program()
    batch, head, begin, start, end = find_stretch(
        p_starts, split, index, program_tokens, T, H, PACKED, False
    )
    q = rows_of(p_q, batch, head, begin, stride_qb, stride_qh, stride_qt, stride_qd)
    gradients = rows_of(p_g, batch, head, begin, stride_gb, stride_gh, stride_gt, stride_gd)
    dq = rows_of(p_dq, batch, head, begin, stride_dqb, stride_dqh, stride_dqt, stride_dqd)
    mixes = rows_of(p_m, batch, head, begin, stride_mb, stride_mh, stride_mt, stride_md)
    p_mask += batch * T
    place = mix_rows(index, head, begin, T, 1, PACKED)
    alpha_here = load_scale(p_alpha, alpha, index, HAS_ALPHA)
    b_log_mass, b_c = load_summary(p_log_mass, p_centroid, index // R, D, E, BD, BE)
    rows, b_dalpha = tl.arange(0, BT), 0.0
    for first in tl.range(start, end, BT, num_stages=STAGES):
        inside = first + rows < end
        ok = token_ok(p_mask, first, end, BT, QUIET)
        b_q = load_queries(q, first, inside, ok, BT, D, BD, EVEN, QUIET)
        _, b_do, _, b_row, _ = load_gradient(
            gradients, mixes, mix, first, inside, E, BE, BT, MIX, EVEN
        )
        b_x = widen(b_q, BD) * alpha_here + b_log_mass[None, :]
        if D < BD:
            b_x = tl.where((tl.arange(0, BD) < D)[None, :], b_x, NEVER)
        b_top = tl.max(b_x, 1)
        b_e = exponential(b_x - b_top[:, None])
        b_norm = tl.sum(b_e, 1)
        b_da = tl.dot(b_do, tl.trans(b_c), input_precision=PRECISION)
        b_mean = tl.sum(b_e * b_da, 1) / b_norm
        tl.store(p_z + place + first + rows, b_top + tl.log(b_norm), mask=inside)
        tl.store(p_mean + place + first + rows, b_mean, mask=inside)
        b_g = b_e * (b_row / b_norm)[:, None] * (b_da - b_mean[:, None])
        if ALPHA_GRAD:
            b_dalpha += tl.sum(b_g * centred_queries(b_q, b_e, b_norm, BD))
        if MIX == 0 or SPLIT:
            store_rows(dq, first, b_g * alpha_here, inside, BT, D, BD, EVEN)
    if ALPHA_GRAD:
        tl.store(p_dalpha + part, b_dalpha)


@triton.jit
def slot_grad_kernel(
    p_q, p_g, p_m, p_mask, p_alpha, p_log_mass, p_z, p_mean, p_shift_out, p_dc_out, p_starts,
    alpha, mix, program_tokens, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_mb, stride_mh, stride_mt, stride_md,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    SLOTS: tl.constexpr, OUT_D: tl.constexpr, OUT_E: tl.constexpr, BT: tl.constexpr,
    HAS_ALPHA: tl.constexpr, EVEN: tl.constexpr, QUIET: tl.constexpr, MIX: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """SLOTS slots of one stretch of one (sample, head): their columns of dCᵀ, and their shift.

    dCᵀ is ``[OUT_E, OUT_D]``. Where that is all that reads a summary, it is final; else a part,
    which is padded. Heads come in reverse: what the first pass has touched last is in the cache.
    """
    wait_for_launch(FOLLOWS)
    SHARES: tl.constexpr = BD // SLOTS
    split, first_slot = tl.program_id(0) // SHARES, tl.program_id(0) % SHARES * SLOTS
    index = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    part = index * (tl.num_programs(0) // SHARES) + split
    batch, head, begin, start, end = find_stretch(
        p_starts, split, index, program_tokens, T, H, PACKED, False
    )
    q = rows_of(p_q, batch, head, begin, stride_qb, stride_qh, stride_qt, stride_qd)
    gradients = rows_of(p_g, batch, head, begin, stride_gb, stride_gh, stride_gt, stride_gd)
    mixes = rows_of(p_m, batch, head, begin, stride_mb, stride_mh, stride_mt, stride_md)
    p_mask += batch * T
    place = mix_rows(index, head, begin, T, 1, PACKED)
    alpha_here = load_scale(p_alpha, alpha, index, HAS_ALPHA)
    slots, rows = first_slot + tl.arange(0, SLOTS), tl.arange(0, BT)
    b_log_mass = tl.load(p_log_mass + index // R * D + slots, mask=slots < D, other=NEVER)
    b_dc, b_shift = tl.zeros([SLOTS, BE], tl.float32), tl.zeros([SLOTS], tl.float32)
    for first in tl.range(start, end, BT, num_stages=STAGES):
        inside = first + rows < end
        ok = token_ok(p_mask, first, end, BT, QUIET)
        b_q = load_slots(q, first, inside, first_slot, BT, D, BD, SLOTS, EVEN)
        if QUIET:
            b_q = quiet_rows(b_q, ok)
        _, b_do, _, b_row, _ = load_gradient(
            gradients, mixes, mix, first, inside, E, BE, BT, MIX, EVEN
        )
        b_z = tl.load(p_z + place + first + rows, mask=inside, other=0.0)
        b_mean = tl.load(p_mean + place + first + rows, mask=inside, other=0.0)
        b_x = widen_turned(b_q, SLOTS) * alpha_here + b_log_mass[:, None]
        b_a = exponential(b_x - b_z[None, :]) * b_row[None, :]
        if not EVEN:
            b_a = tl.where(inside[None, :], b_a, 0.0)
        b_dc = tl.dot(b_a.to(b_do.dtype), b_do, b_dc, input_precision=PRECISION)
        b_shift -= tl.sum(b_a * b_mean[None, :], 1)
    exists = slots < OUT_D
    tl.store(p_shift_out + part * OUT_D + slots, b_shift, mask=exists)
    columns = tl.arange(0, BE)
    p_out = p_dc_out + part * OUT_D * OUT_E + columns[:, None] * OUT_D + slots[None, :]
    exists = (columns < OUT_E)[:, None] & exists[None, :]
    tl.store(p_out, tl.trans(b_dc).to(p_dc_out.dtype.element_ty), mask=exists)
