"""Gradients of attention to chosen pages, without atomics.

The window kernels have written what comes from near keys, with the normaliser of all parts. Then,
with the formulas of `lln.kernels.blocks.triton_window`:

1. ``page_grad``: a segment (`lln.kernels.pages.triton_page_lists`) leaves dk and dv of its page,
   and a share of dq in every row's own place.
2. ``page_query``: the shares of a query are added to dq.
3. ``page_key``: the segments of a page are added to dk and dv, sinks' and the page's own.

Dimension legend: see `lln.kernels.pages.triton_page_read`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.blocks.triton_window import power_of_two
from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import NEVER, load_rows, rows_of, store_rows
from lln.kernels.pages.triton_page_choice import first_valid, load_group
from lln.kernels.pages.triton_page_read import (
    find_joined,
    find_segment,
    has_page,
    load_page_queries,
    page_keys,
    page_rows,
    page_scores,
)


@triton.jit
def page_grad_kernel(
    p_q, p_k, p_v, p_g, p_norm, p_level, p_dq_part, p_dk_part, p_dv_part,
    p_order, p_ends, p_table, p_mask, p_first,
    scale, window, sinks, page, ahead, first_part, parts, chunk, slots, sink_pages, most, V, T, S,
    HK, stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One segment; dk and dv go to ``[parts here, most, page, D or E]``, dq as in `page_read`."""
    wait_for_launch(FOLLOWS)
    local, batch, head, first_query, number, begin, end = find_segment(
        p_table, p_ends, first_part, parts, chunk, most, V, HK, C
    )
    if number < 0:
        return
    start, b_key, seen = page_keys(
        p_mask, p_first, batch, number, page, sinks, sink_pages, S, BK, HAS_MASK
    )
    k = rows_of(p_k, batch, head, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, head, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    b_k = load_rows(k, start, seen, BK, D, BD, False)
    b_v = load_rows(v, start, seen, BK, E, BE, False)
    b_dk = tl.zeros([BK, BD], tl.float32)
    b_dv = tl.zeros([BK, BE], tl.float32)
    p_order += (first_part + local) * chunk * slots
    columns = tl.arange(0, BD)
    for at in tl.range(begin, end, BT // R, num_stages=STAGES):
        b_entry, b_query, b_member, ok = page_rows(p_order, at, end, first_query, slots, R, BT)
        b_q = load_page_queries(
            p_q, p_mask, batch, head * R, b_query, b_member, ok, ahead, S,
            stride_qb, stride_qh, stride_qt, stride_qd, D, BD, HAS_MASK,
        )  # fmt: skip
        b_do = load_group(
            p_g, batch, head * R, b_query, b_member, ok, stride_gb, stride_gh, stride_gt, stride_gd,
            E, BE,
        )  # fmt: skip
        b_at = ((batch * HK + head) * R + b_member) * T + b_query
        # No row: its weights are zero.
        b_norm = tl.load(p_norm + b_at, mask=ok, other=-NEVER)
        b_level = tl.load(p_level + b_at, mask=ok, other=0.0)
        b_s = page_scores(
            b_q, b_k, b_query, b_key, seen, ok, ahead, window, scale, CAUSAL, PRECISION
        )
        b_p = power_of_two(b_s - b_norm[:, None])
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        b_ds = b_p * (b_dp - b_level[:, None])
        b_dv = tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do, b_dv, input_precision=PRECISION)
        b_short = b_ds.to(b_k.dtype)
        b_dk = tl.dot(tl.trans(b_short), b_q, b_dk, input_precision=PRECISION)
        b_dq = tl.dot(b_short, b_k, input_precision=PRECISION) * scale
        b_row = (local * R + b_member) * chunk * slots + b_entry
        p_out = p_dq_part + b_row[:, None] * D + columns[None, :]
        b_dq = b_dq.to(p_dq_part.dtype.element_ty)
        tl.store(p_out, b_dq, mask=ok[:, None] & (columns < D)[None, :])
    b_lane = tl.arange(0, BK)
    first = tl.program_id(0).to(tl.int64) * page
    dk = rows_of(p_dk_part, 0, 0, 0, 0, 0, D, 1)
    dv = rows_of(p_dv_part, 0, 0, 0, 0, 0, E, 1)
    store_rows(dk, first, b_dk * scale, b_lane < page, BK, D, BD, False)
    store_rows(dv, first, b_dv, b_lane < page, BK, E, BE, False)


@triton.jit
def page_query_kernel(
    p_dq, p_dq_part, p_chosen, first_part, parts, chunk, tiles, slots, sink_pages, V, T, P, HK,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd,
    R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    """Add the shares of BT queries of one head to dq, in place."""
    wait_for_launch(FOLLOWS)
    line, batch, head, first, b_row, ok, p_chosen = find_joined(
        p_chosen, first_part, parts, chunk, tiles, T, P, HK, R, BT
    )
    dq = rows_of(p_dq, batch, head, 0, stride_dqb, stride_dqh, stride_dqt, stride_dqd)
    b_dq = load_rows(dq, first, ok, BT, D, BD, False).to(tl.float32)
    columns = tl.arange(0, BD)
    for slot in tl.range(0, slots, num_stages=STAGES):
        there = has_page(p_chosen, slot, sink_pages, V, ok)
        p_in = p_dq_part + ((line * chunk + b_row) * slots + slot)[:, None] * D + columns[None, :]
        b_x = tl.load(p_in, mask=ok[:, None] & (columns < D)[None, :], other=0)
        b_dq += tl.where(there[:, None], b_x.to(tl.float32), 0.0)
    store_rows(dq, first, b_dq, ok, BT, D, BD, False)


@triton.jit
def add_segments(
    rows, p_part, local, number, p_counts, p_segment_ends, first, there, page, most, V, sink_pages,
    D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add what the segments of a page left to its keys, in place: its own, then the sinks'."""
    b_sum = load_rows(rows, first, there, BK, D, BD, False).to(tl.float32)
    part = rows_of(p_part, 0, 0, 0, 0, 0, D, 1)
    for which in tl.static_range(2):
        if which == 0 or number < sink_pages:
            at = local * V + number + (sink_pages if which == 0 else 0)
            segments = tl.cdiv(tl.load(p_counts + at), C)
            end = tl.load(p_segment_ends + at)
            for segment in range(end - segments, end):
                begin = (local * most + segment) * page
                b_sum += load_rows(part, begin, there, BK, D, BD, False)
    store_rows(rows, first, b_sum, there, BK, D, BD, False)


@triton.jit
def page_key_kernel(
    p_dk, p_dv, p_dk_part, p_dv_part, p_counts, p_segment_ends, p_first,
    page, first_part, parts, most, V, sink_pages, pages, S, HK,
    stride_dkb, stride_dkh, stride_dkt, stride_dkd, stride_dvb, stride_dvh, stride_dvt, stride_dvd,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    C: tl.constexpr, HAS_MASK: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """Add a part's gradients of the keys and values of one page, in place."""
    wait_for_launch(FOLLOWS)
    number, local = tl.program_id(0) % pages, (tl.program_id(0) // pages).to(tl.int64)
    index = (first_part + local) // parts
    batch, head = index // HK, index % HK
    first = first_valid(p_first, batch, HAS_MASK) + number * page
    b_lane = tl.arange(0, BK)
    there = (b_lane < page) & (first + b_lane < S)
    dk = rows_of(p_dk, batch, head, 0, stride_dkb, stride_dkh, stride_dkt, stride_dkd)
    dv = rows_of(p_dv, batch, head, 0, stride_dvb, stride_dvh, stride_dvt, stride_dvd)
    p_counts += first_part * V
    p_segment_ends += first_part * V
    add_segments(
        dk, p_dk_part, local, number, p_counts, p_segment_ends, first, there, page, most, V,
        sink_pages, D, BD, BK, C,
    )  # fmt: skip
    add_segments(
        dv, p_dv_part, local, number, p_counts, p_segment_ends, first, there, page, most, V,
        sink_pages, E, BE, BK, C,
    )  # fmt: skip
