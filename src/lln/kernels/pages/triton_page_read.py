"""Attention to a window, sinks and chosen pages: page by page, and forward.

The window kernels attend to what is near. What else a query sees comes page by page, so that keys
and values are read once and met by tiles of rows that chose them:

1. ``page_read``: a program takes a segment of a page's list
   (`lln.kernels.pages.triton_page_lists`). Rows are entries times the R heads that share the keys.
   Every row's softmax over the page, without what is near, goes to a place of its own: output, and
   log₂ of its normaliser.
2. ``page_join``: near and all pages of a query, under one normaliser.

Dimension legend: see `lln.kernels.pages.triton_page_choice`; BK keys in a page's tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.blocks.triton_window import power_of_two, scores
from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import (
    NEVER,
    load_rows,
    quiet_rows,
    rows_of,
    store_rows,
)
from lln.kernels.pages.triton_page_choice import first_valid, load_group


@triton.jit
def find_segment(
    p_table, p_ends, first_part, parts, chunk, most, V, HK, C: tl.constexpr
):  # fmt: skip
    """A program's segment: place among parts, sample, head, first query, page or -1, entries."""
    segment, local = tl.program_id(0) % most, (tl.program_id(0) // most).to(tl.int64)
    part = first_part + local
    index = part // parts
    p_table += (part * most + segment) * 2
    page = tl.load(p_table)
    begin, end = 0, 0
    if page >= 0:
        begin = tl.load(p_table + 1)
        end = tl.minimum(begin + C, tl.load(p_ends + part * V + page))
    return local, index // HK, index % HK, (part % parts * chunk).to(tl.int32), page, begin, end


@triton.jit
def page_keys(
    p_mask, p_first, batch, number, page, sinks, sink_pages, S, BK: tl.constexpr,
    HAS_MASK: tl.constexpr,
):  # fmt: skip
    """The first key of a page, its keys ``[BK]``, and which are there: sinks, or all others."""
    first = first_valid(p_first, batch, HAS_MASK)
    is_sink = number < sink_pages
    begin = first + tl.where(is_sink, number, number - sink_pages) * page
    b_lane = tl.arange(0, BK)
    b_key = begin + b_lane
    seen = (b_lane < page) & (b_key < S) & ((b_key - first < sinks) == is_sink)
    if HAS_MASK:
        seen = seen & (tl.load(p_mask + batch * S + b_key, mask=seen, other=0) != 0)
    return begin, b_key, seen


@triton.jit
def page_rows(p_order, at, end, first_query, slots, R: tl.constexpr, BT: tl.constexpr):
    """Entry, query, head of its group, and whether there is one, of the rows from ``at`` on."""
    rows = tl.arange(0, BT)
    b_at, b_member = at + rows // R, rows % R
    ok = (rows < BT // R * R) & (b_at < end)
    b_entry = tl.load(p_order + b_at, mask=ok, other=0)
    return b_entry, first_query + b_entry // slots, b_member, ok


@triton.jit
def load_page_queries(
    p_q, p_mask, batch, head, b_query, b_member, ok, ahead, S,
    stride_qb, stride_qh, stride_qt, stride_qd,
    D: tl.constexpr, BD: tl.constexpr, QUIET: tl.constexpr,
):  # fmt: skip
    """Rows of queries; QUIET: NaN and infinity in padded ones become zero."""
    b_q = load_group(
        p_q, batch, head, b_query, b_member, ok, stride_qb, stride_qh, stride_qt, stride_qd, D, BD
    )  # fmt: skip
    if QUIET:
        valid = tl.load(p_mask + batch * S + ahead + b_query, mask=ok, other=0) != 0
        b_q = quiet_rows(b_q, valid)
    return b_q


@triton.jit
def page_scores(
    b_q, b_k, b_query, b_key, seen, ok, ahead, window, scale,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores ``[BT, BK]`` in units of log 2; NEVER for what is near, later or not there."""
    b_s = scores(b_q, b_k, scale, PRECISION)
    b_distance = (ahead + b_query)[:, None] - b_key[None, :]
    if not CAUSAL:
        b_distance = tl.abs(b_distance)
    return tl.where(ok[:, None] & seen[None, :] & (b_distance > window), b_s, NEVER)


@triton.jit
def page_read_kernel(
    p_q, p_k, p_v, p_part, p_part_norm, p_order, p_ends, p_table, p_mask, p_first,
    scale, window, sinks, page, ahead, first_part, parts, chunk, slots, sink_pages, most, V, S, HK,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One segment: outputs ``[parts here, R, entries, E]``, log₂ of normalisers likewise."""
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
    p_order += (first_part + local) * chunk * slots
    columns = tl.arange(0, BE)
    for at in tl.range(begin, end, BT // R, num_stages=STAGES):
        b_entry, b_query, b_member, ok = page_rows(p_order, at, end, first_query, slots, R, BT)
        b_q = load_page_queries(
            p_q, p_mask, batch, head * R, b_query, b_member, ok, ahead, S,
            stride_qb, stride_qh, stride_qt, stride_qd, D, BD, HAS_MASK,
        )  # fmt: skip
        b_s = page_scores(
            b_q, b_k, b_query, b_key, seen, ok, ahead, window, scale, CAUSAL, PRECISION
        )
        b_peak = tl.max(b_s, 1)
        b_p = power_of_two(b_s - b_peak[:, None])
        b_mass = tl.sum(b_p, 1)
        # A row with NaN sees it.
        sees = (b_peak > 0.5 * NEVER) | (b_mass != b_mass)
        b_out = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
        b_out = tl.where(sees[:, None], b_out * (1.0 / b_mass)[:, None], 0.0)
        b_row = (local * R + b_member) * chunk * slots + b_entry
        p_out = p_part + b_row[:, None] * E + columns[None, :]
        b_out = b_out.to(p_part.dtype.element_ty)
        tl.store(p_out, b_out, mask=ok[:, None] & (columns < E)[None, :])
        b_norm = tl.where(sees, b_peak + tl.log2(b_mass), NEVER)
        tl.store(p_part_norm + b_row, b_norm, mask=ok)


@triton.jit
def find_joined(
    p_chosen, first_part, parts, chunk, tiles, T, P, HK, R: tl.constexpr, BT: tl.constexpr
):
    """A program's queries: line of results, sample, head, first, rows, which are there, pages."""
    tile, rest = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    local, member = rest // R, rest % R
    index = (first_part + local) // parts
    batch, head = index // HK, index % HK * R + member
    first = ((first_part + local) % parts * chunk).to(tl.int32) + tile * BT
    b_row = tile * BT + tl.arange(0, BT)
    ok = (b_row < chunk) & (first + tl.arange(0, BT) < T)
    p_chosen += (index * T + first + tl.arange(0, BT)) * P
    return local * R + member, batch, head, first, b_row, ok, p_chosen


@triton.jit
def has_page(p_chosen, slot, sink_pages, V, ok):
    """Which queries have a page in a slot."""
    b_page = tl.load(p_chosen + slot - sink_pages, mask=ok & (slot >= sink_pages), other=0)
    return ok & (b_page >= 0) & (b_page + sink_pages < V)


@triton.jit
def page_join_kernel(
    p_o, p_norm, p_part, p_part_norm, p_chosen, first_part, parts, chunk, tiles, slots, sink_pages,
    V, T, P, HK, stride_ob, stride_oh, stride_ot, stride_od,
    R: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr, HAS_NEAR: tl.constexpr,
    STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """Add the pages of BT queries of one head to what is near, in place."""
    wait_for_launch(FOLLOWS)
    line, batch, head, first, b_row, ok, p_chosen = find_joined(
        p_chosen, first_part, parts, chunk, tiles, T, P, HK, R, BT
    )
    o = rows_of(p_o, batch, head, 0, stride_ob, stride_oh, stride_ot, stride_od)
    p_norm += (batch * HK * R + head) * T + first + tl.arange(0, BT)
    if HAS_NEAR:
        b_peak = tl.load(p_norm, mask=ok, other=0.0)
        # A row that saw nothing has -NEVER.
        b_mass = tl.where(b_peak > -0.5 * NEVER, 0.0, 1.0)
        b_peak = tl.where(b_peak > -0.5 * NEVER, NEVER, b_peak)
        b_o = load_rows(o, first, ok, BT, E, BE, False).to(tl.float32)
    else:
        b_peak = tl.full([BT], NEVER, tl.float32)
        b_mass = tl.zeros([BT], tl.float32)
        b_o = tl.zeros([BT, BE], tl.float32)
    columns = tl.arange(0, BE)
    for slot in tl.range(0, slots, num_stages=STAGES):
        # What is not there is loaded, too: nothing waits for the pages, which come along.
        there = has_page(p_chosen, slot, sink_pages, V, ok)
        b_at = (line * chunk + b_row) * slots + slot
        b_part = tl.where(there, tl.load(p_part_norm + b_at, mask=ok, other=NEVER), NEVER)
        p_in = p_part + b_at[:, None] * E + columns[None, :]
        b_x = tl.load(p_in, mask=ok[:, None] & (columns < E)[None, :], other=0)
        b_x = tl.where(there[:, None], b_x, tl.zeros_like(b_x))
        b_new = tl.maximum(b_peak, b_part)
        b_old = power_of_two(b_peak - b_new)
        b_share = tl.where(b_part <= 0.5 * NEVER, 0.0, power_of_two(b_part - b_new))
        b_o = b_o * b_old[:, None] + b_x.to(tl.float32) * b_share[:, None]
        b_mass = b_mass * b_old + b_share
        b_peak = b_new
    sees = b_mass != 0
    b_o = tl.where(sees[:, None], b_o * (1.0 / b_mass)[:, None], 0.0)
    store_rows(o, first, b_o, ok, BT, E, BE, False)
    tl.store(p_norm, tl.where(sees, b_peak + tl.log2(b_mass), -NEVER), mask=ok)
