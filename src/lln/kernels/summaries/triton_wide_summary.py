"""The summary of keys and values of wide heads: a program computes some of the slots.

All slots by all channels of a wide head do not leave room in the registers for a second program
beside the first. Slots do not depend on each other, so here a program has SLOTS of them. The
programs of one stretch lie side by side, so that all but the first find the values in the cache.

Dimension legend: see `lln.kernels.launching.triton_steps`; SH summary heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import (
    NEVER,
    add_tile,
    find_stretch,
    load_rows,
    load_scale,
    load_values,
    rows_inside,
    rows_of,
    token_ok,
    widen_turned,
)
from lln.kernels.summaries.triton_summaries import empty_partial, store_partial, store_summary


@triton.jit
def load_slots(
    k, first, inside, first_slot,
    BT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SLOTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """SLOTS columns of a tile of keys, ``[BT, SLOTS]``; zero outside."""
    p_rows, stride_h, stride_t, stride_d = k
    p_rows += first_slot * stride_d
    if D == BD:
        own = p_rows, stride_h, stride_t, stride_d
        return load_rows(own, first, inside, BT, SLOTS, SLOTS, EVEN)
    columns = tl.arange(0, SLOTS)
    places = (tl.cast(first, tl.int64) + tl.arange(0, BT))[:, None] * stride_t
    exists = inside[:, None] & (first_slot + columns < D)[None, :]
    return tl.load(p_rows + places + columns[None, :] * stride_d, mask=exists, other=0)


@triton.jit(do_not_specialize=["seed"])
def summarise_slots_kernel(
    p_k, p_v, p_mask, p_beta, p_peak, p_mass, p_sum, p_log_mass, p_centroid, p_starts,
    beta, seed, dropout_p, S, SH, program_tokens,
    stride_kb, stride_kh, stride_kt, stride_kd, stride_vb, stride_vh, stride_vt, stride_vd,
    KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    SLOTS: tl.constexpr, BT: tl.constexpr, HAS_BETA: tl.constexpr, EVEN: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """SLOTS slots of one split of one (sample, summary head).

    WHOLE: the split has all keys, so log-mass and centroid are written, else a partial summary.
    """
    wait_for_launch(FOLLOWS)
    SHARES: tl.constexpr = BD // SLOTS
    place, index = tl.program_id(0), tl.program_id(1).to(tl.int64)
    split, first_slot = place // SHARES, place % SHARES * SLOTS
    batch, head, begin, start, end = find_stretch(
        p_starts, split, index, program_tokens, S, SH, PACKED, False
    )
    key_head = head // KG
    k = rows_of(p_k, batch, key_head, begin, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, key_head, begin, stride_vb, stride_vh, stride_vt, stride_vd)
    p_mask += batch * S
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    drop_first = (batch * (SH // KG) + key_head) * S
    b_peak, b_mass, b_sum = empty_partial(SLOTS, BE)
    for first in tl.range(start, end, BT, num_stages=STAGES):
        inside = rows_inside(first, end, BT, HAS_MASK)
        ok = token_ok(p_mask, first, end, BT, HAS_MASK)
        b_k = load_slots(k, first, inside, first_slot, BT, D, BD, SLOTS, EVEN)
        b_v, _ = load_values(
            v, first, inside, ok, seed, drop_first, dropout_p, BT, E, BE, EVEN, HAS_MASK,
            HAS_DROPOUT,
        )  # fmt: skip
        b_x = widen_turned(b_k, SLOTS) * beta_here
        if not EVEN:
            b_x = tl.where(ok[None, :], b_x, NEVER)
        b_peak, b_mass, b_sum = add_tile(b_peak, b_mass, b_sum, b_x, b_v, PRECISION)
    part = index * (tl.num_programs(0) // SHARES) + split
    slots = first_slot + tl.arange(0, SLOTS)
    if WHOLE:
        b_c, b_log_mass = b_sum * (1.0 / b_mass)[:, None], b_peak + tl.log(b_mass)
        store_summary(p_log_mass, p_centroid, index, slots, b_log_mass, b_c, D, E, BE)
    else:
        store_partial(p_peak, p_mass, p_sum, part, slots, b_peak, b_mass, b_sum, BD, BE)
