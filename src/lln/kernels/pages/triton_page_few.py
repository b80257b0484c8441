"""Attention of a few queries to a window, sinks and chosen pages, as decoding has them.

A program takes a share of what one query sees: its window, the sinks and its pages, counted one
behind the other, for the R heads that share the keys. Their tile meets the keys where they lie, and
`lln.kernels.pages.triton_page_read.page_join_kernel` joins the shares.

Dimension legend: see `lln.kernels.pages.triton_page_read`; BS keys in a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.blocks.triton_window import power_of_two, scores
from lln.kernels.keys.triton_keys_read import load_chosen
from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import NEVER
from lln.kernels.pages.triton_page_choice import first_valid, is_near, load_group


@triton.jit
def keys_at(
    p_chosen, p_mask, b_at, end, first, place, window, sinks, page, S,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Keys ``[BS]`` by their number in what a query sees, and which are there and count here."""
    near = window + 1 if CAUSAL else 2 * window + 1
    b_sink, b_page = b_at - near, b_at - near - sinks
    of_page = (b_page >= 0) & (b_at < end)
    b_number = tl.load(p_chosen + b_page // page, mask=of_page, other=0)
    b_key = tl.where(of_page, first + b_number * page + b_page % page, first + b_sink)
    b_key = tl.where(b_sink < 0, place - window + b_at, b_key)
    is_own = is_near(place - b_key, window, CAUSAL) == (b_sink < 0)
    seen = (b_at < end) & (b_key >= 0) & (b_key < S) & (b_number >= 0) & is_own
    seen = seen & ((b_key - first >= sinks) | (b_page < 0))
    if CAUSAL:
        seen = seen & (b_key <= place)
    if HAS_MASK:
        seen = seen & (tl.load(p_mask + b_key, mask=seen, other=0) != 0)
    return b_key, seen


@triton.jit
def page_few_kernel(
    p_q, p_k, p_v, p_part, p_part_norm, p_chosen, p_mask, p_first,
    scale, window, sinks, page, ahead, chunk, slots, keys, share, T, S, HK, P,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One of ``slots`` shares of one query: as `page_read_kernel` leaves entries."""
    wait_for_launch(FOLLOWS)
    slot, rest = tl.program_id(0) % slots, tl.program_id(0) // slots
    query, index = rest % T, (rest // T).to(tl.int64)
    batch, head = index // HK, index % HK
    first = first_valid(p_first, batch, HAS_MASK)
    b_member = tl.arange(0, BT)
    ok = b_member < R
    b_q = load_group(
        p_q, batch, head * R, tl.zeros([BT], tl.int32) + query, b_member, ok,
        stride_qb, stride_qh, stride_qt, stride_qd, D, BD,
    )  # fmt: skip
    k = (p_k + batch * stride_kb + head * stride_kh, stride_kh, stride_kt, stride_kd)
    v = (p_v + batch * stride_vb + head * stride_vh, stride_vh, stride_vt, stride_vd)
    p_chosen += (index * T + query) * P
    b_peak = tl.full([BT], NEVER, tl.float32)
    b_mass = tl.zeros([BT], tl.float32)
    b_o = tl.zeros([BT, BE], tl.float32)
    end = tl.minimum((slot + 1) * share, keys)
    for at in tl.range(slot * share, end, BS, num_stages=STAGES):
        b_key, seen = keys_at(
            p_chosen, p_mask + batch * S, at + tl.arange(0, BS), end, first, ahead + query, window,
            sinks, page, S, CAUSAL, HAS_MASK,
        )  # fmt: skip
        b_s = scores(b_q, load_chosen(k, b_key, seen, BS, D, BD), scale, PRECISION)
        b_s = tl.where(seen[None, :], b_s, NEVER)
        b_new = tl.maximum(b_peak, tl.max(b_s, 1))
        b_shrink = power_of_two(b_peak - b_new)
        b_p = tl.where(seen[None, :], power_of_two(b_s - b_new[:, None]), 0.0)
        b_mass = b_mass * b_shrink + tl.sum(b_p, 1)
        b_v = load_chosen(v, b_key, seen, BS, E, BE)
        b_o = b_o * b_shrink[:, None]
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision=PRECISION)
        b_peak = b_new
    sees = b_mass != 0
    b_o = tl.where(sees[:, None], b_o * (1.0 / b_mass)[:, None], 0.0)
    b_row = (index * R + b_member) * chunk * slots + query * slots + slot
    columns = tl.arange(0, BE)
    p_out = p_part + b_row[:, None] * E + columns[None, :]
    tl.store(p_out, b_o, mask=ok[:, None] & (columns < E)[None, :])
    tl.store(p_part_norm + b_row, tl.where(sees, b_peak + tl.log2(b_mass), NEVER), mask=ok)
