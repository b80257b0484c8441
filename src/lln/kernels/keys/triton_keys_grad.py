"""Gradients of attention over own block, chosen keys and slots, without atomics.

With P the weights of a row, recomputed from the saved normaliser, and δ = rowsum(dO ∘ O):

    dS = P ∘ (dO vᵀ − δ)          scores of block and chosen keys (times scale), logits of slots

The slots' logits hold the mean key μ as -βμ and as scale · q·μ; its gradient goes to all keys.

1. ``slot`` pass, a stretch of tokens per program: δ, the slots' share of dq, and the sums
   dC = Pᵀ dO and dL = colsum dS over its rows. What all tokens of a slot get is shift = dL − C·dC.
2. ``far`` pass, one group per program: the rest of dq, and for every (group, chosen key) pair its
   share of dk and dv, written to its own place.
3. ``key`` pass, one block of tokens per program: the share of its own block's queries, recomputed;
   the share of the summary, dv += w dC and dk += β w (dC·v + shift) with w = e^{βk − L}; and the
   sum over the pairs that chose its tokens. Pairs come sorted by key, so those of a block lie in a
   row: they are added by products with 0-1 matrices, always in the same order.

A rank of several holds its own tokens and, behind them in the same tensors, the rows that its
groups chose, wherever they came from. Nobody chooses one of its own tokens there, and the gradient
of the summary, which is that of all ranks, goes back to them. So the third pass falls apart: blocks
of tokens get the share of their own queries (ALONE), rows behind them (``rows``) that of the pairs
which chose them.

Dimension legend: see `lln.kernels.keys.triton_keys_read`; BP pairs in a tile, HK key heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.keys.triton_keys_read import (
    group_place,
    load_chosen,
    load_near,
    load_summary,
    score_rows,
    slot_logits,
    tokens_ok,
    weights_of,
)
from lln.kernels.launching.triton_steps import (
    NEVER,
    exponential,
    heads_on,
    load_queries,
    load_rows,
    load_scale,
    rows_of,
    store_rows,
    widen,
)


@triton.jit
def keys_slot_kernel(
    p_q, p_o, p_g, p_dq, p_lse, p_level, p_delta, p_log_mass, p_centroid, p_centre, p_mask, p_gaps,
    p_alpha, p_beta, p_dc_parts, p_dl_parts, p_dm_parts, p_dalpha_parts, p_doffset_parts,
    alpha, beta, scale, T, H, G, splits, stretch,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_ob, stride_oh, stride_ot, stride_od,
    stride_gb, stride_gh, stride_gt, stride_gd, stride_dqb, stride_dqh, stride_dqt, stride_dqd,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
    GROUP: tl.constexpr, SR: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr,
    HAS_MASK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The slots' part for one stretch of tokens of one (sample, query head); also δ."""
    split, index = tl.program_id(0) % splits, (tl.program_id(0) // splits).to(tl.int64)
    batch, head = index // H, index % H
    q = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    o = rows_of(p_o, batch, head, 0, stride_ob, stride_oh, stride_ot, stride_od)
    g = rows_of(p_g, batch, head, 0, stride_gb, stride_gh, stride_gt, stride_gd)
    dq = rows_of(p_dq, batch, head, 0, stride_dqb, stride_dqh, stride_dqt, stride_dqd)
    p_mask += batch * T
    own_alpha = load_scale(p_alpha, alpha, index, HAS_ALPHA)
    slots, columns = tl.arange(0, BD), tl.arange(0, BE)
    slot_ok = (slots < D)[:, None] & (columns < E)[None, :]
    b_slot, b_c, b_centre = load_summary(
        p_log_mass, p_centroid, p_centre, p_beta, beta, index // SR, D, E, BD, BE, HAS_BETA
    )
    b_dc = tl.zeros([BD, BE], tl.float32)
    # Summed over its rows once, at the end.
    b_dl = tl.zeros([BM, BD], tl.float32)
    b_dm = tl.zeros([BD], tl.float32)
    b_dalpha = tl.zeros([BM], tl.float32)
    b_doffset = tl.zeros([BM], tl.float32)
    gap = 0
    if HAS_MASK:
        gap = tl.load(p_gaps + batch)
    end = tl.minimum((split + 1) * stretch, T + gap)
    for at in tl.range(split * stretch, end, BM, num_stages=STAGES):
        first = at - gap
        inside, row_ok = tokens_ok(p_mask, first, BM, T, BM, HAS_MASK)
        b_q = load_queries(q, first, inside, row_ok, BM, D, BD, EVEN, HAS_MASK)
        b_do = load_rows(g, first, inside, BM, E, BE, EVEN)
        b_o = load_rows(o, first, inside, BM, E, BE, EVEN)
        rows = index * T + first + tl.arange(0, BM)
        b_lse = tl.load(p_lse + rows, mask=inside, other=-NEVER)
        groups = index * G + (at + tl.arange(0, BM)) // GROUP
        b_level = tl.load(p_level + groups, mask=inside, other=0.0)
        b_delta = tl.sum(b_do.to(tl.float32) * b_o.to(tl.float32), 1)
        tl.store(p_delta + rows, b_delta, mask=inside)
        b_x, b_wide = slot_logits(b_q, own_alpha, b_slot, b_level, b_centre, scale, D, BD)
        b_p = weights_of(b_x, b_lse, EVEN)
        b_dp = tl.dot(b_do, tl.trans(b_c), input_precision=PRECISION)
        b_ds = b_p * (b_dp - b_delta[:, None])
        if HAS_ALPHA:
            b_dalpha += tl.sum(b_ds * b_wide, 1)
        b_row = tl.sum(b_ds, 1)
        b_doffset += b_row
        b_row *= scale
        b_dm += tl.sum(b_row[:, None] * b_wide, 0)
        b_dl += b_ds
        b_dc = tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do, b_dc, input_precision=PRECISION)
        b_dq = b_ds * own_alpha + b_row[:, None] * b_centre[None, :]
        store_rows(dq, first, b_dq, inside, BM, D, BD, EVEN)
    part = index * splits + split
    tl.store(p_dc_parts + part * D * E + slots[:, None] * E + columns[None, :], b_dc, mask=slot_ok)
    tl.store(p_dl_parts + part * D + slots, tl.sum(b_dl, 0), mask=slots < D)
    tl.store(p_dm_parts + part * D + slots, b_dm, mask=slots < D)
    tl.store(p_dalpha_parts + part, tl.sum(b_dalpha, 0))
    tl.store(p_doffset_parts + part, tl.sum(b_doffset, 0))


@triton.jit
def add_chosen(
    b_dq, b_q, b_do, b_lse, b_delta, b_k, b_v, b_seen, p_pair_dk, p_pair_dv, pair, at, K, scale,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a tile of chosen keys to dq, and write the shares of dk and dv of its pairs."""
    slots, columns, places = tl.arange(0, BD), tl.arange(0, BE), at + tl.arange(0, BK)
    b_p = weights_of(score_rows(b_q, b_k, b_seen, scale, False, PRECISION), b_lse, EVEN)
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    b_ds = (b_p * (b_dp - b_delta[:, None]) * scale).to(b_k.dtype)
    b_dq = tl.dot(b_ds, b_k, b_dq, input_precision=PRECISION)
    rows, ok = (pair + places)[:, None], (places < K)[:, None]
    b_pk = tl.dot(tl.trans(b_ds), b_q, input_precision=PRECISION)
    p_out = p_pair_dk + rows * D + slots[None, :]
    tl.store(p_out, b_pk.to(p_pair_dk.dtype.element_ty), mask=ok & (slots < D)[None, :])
    b_pv = tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do, input_precision=PRECISION)
    p_out = p_pair_dv + rows * E + columns[None, :]
    tl.store(p_out, b_pv.to(p_pair_dv.dtype.element_ty), mask=ok & (columns < E)[None, :])
    return b_dq


@triton.jit
def keys_far_kernel(
    p_q, p_k, p_v, p_g, p_dq, p_lse, p_delta, p_chosen, p_mask, p_gaps, p_pair_dk, p_pair_dv,
    scale, first_head, T, H, G, K,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd,
    W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BW: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, R: tl.constexpr,
    MORE: tl.constexpr, HAS_MASK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The chosen keys' part and the block's share of dq, for one group; adds to dq."""
    group, local = tl.program_id(0) % G, (tl.program_id(0) // G).to(tl.int64)
    index = local + first_head
    batch, head = index // H, index % H
    first, block = group_place(p_gaps, batch, group, W, GROUP, HAS_MASK)
    q = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, head // R, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, head // R, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    g = rows_of(p_g, batch, head, 0, stride_gb, stride_gh, stride_gt, stride_gd)
    dq = rows_of(p_dq, batch, head, 0, stride_dqb, stride_dqh, stride_dqt, stride_dqd)
    p_mask += batch * T
    p_chosen += (index * G + group) * K
    places = tl.arange(0, BK)
    # All loads of the first tiles come before any arithmetic, so that they overlap.
    b_index = tl.load(p_chosen + places, mask=places < K, other=-1)
    b_seen = b_index >= 0
    inside, row_ok = tokens_ok(p_mask, first, GROUP, T, BM, HAS_MASK)
    near_inside, near_ok = tokens_ok(p_mask, block, W, T, BW, HAS_MASK)
    rows = index * T + first + tl.arange(0, BM)
    b_q = load_queries(q, first, inside, row_ok, BM, D, BD, EVEN, HAS_MASK)
    b_do = load_rows(g, first, inside, BM, E, BE, EVEN)
    b_lse = tl.load(p_lse + rows, mask=inside, other=-NEVER)
    b_delta = tl.load(p_delta + rows, mask=inside, other=0.0)
    b_k = load_near(k, block, near_inside, near_ok, BW, D, BD, EVEN)
    b_v = load_near(v, block, near_inside, near_ok, BW, E, BE, EVEN)
    b_far_k = load_chosen(k, b_index, b_seen, BK, D, BD)
    b_far_v = load_chosen(v, b_index, b_seen, BK, E, BE)
    b_of_slots = load_rows(dq, first, inside, BM, D, BD, EVEN)
    b_p = weights_of(score_rows(b_q, b_k, near_ok, scale, EVEN, PRECISION), b_lse, EVEN)
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    b_ds = (b_p * (b_dp - b_delta[:, None]) * scale).to(b_k.dtype)
    b_dq = tl.dot(b_ds, b_k, input_precision=PRECISION)
    pair = (local * G + group) * K
    b_dq = add_chosen(
        b_dq, b_q, b_do, b_lse, b_delta, b_far_k, b_far_v, b_seen, p_pair_dk, p_pair_dv, pair, 0,
        K, scale, D, E, BD, BE, BK, EVEN, PRECISION,
    )  # fmt: skip
    if MORE:
        for at in tl.range(BK, K, BK, num_stages=STAGES):
            b_index = tl.load(p_chosen + at + places, mask=at + places < K, other=-1)
            b_seen = b_index >= 0
            b_far_k = load_chosen(k, b_index, b_seen, BK, D, BD)
            b_far_v = load_chosen(v, b_index, b_seen, BK, E, BE)
            b_dq = add_chosen(
                b_dq, b_q, b_do, b_lse, b_delta, b_far_k, b_far_v, b_seen, p_pair_dk, p_pair_dv,
                pair, at, K, scale, D, E, BD, BE, BK, EVEN, PRECISION,
            )  # fmt: skip
    store_rows(dq, first, b_dq + b_of_slots.to(tl.float32), inside, BM, D, BD, EVEN)


@triton.jit
def pair_blocks_kernel(
    p_chosen, p_gaps, p_block, H, pairs, blocks, last,
    W: tl.constexpr, BP: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """In which block every chosen key of a head lies, counted over all heads; last = nowhere."""
    index = tl.program_id(1).to(tl.int64)
    places = tl.program_id(0) * BP + tl.arange(0, BP)
    there = places < pairs
    b_key = tl.load(p_chosen + index * pairs + places, mask=there, other=-1)
    gap = 0
    if HAS_MASK:
        gap = tl.load(p_gaps + index // H)
    b_block = tl.where(b_key < 0, last, index * blocks + (b_key + gap) // W)
    p_out = p_block + index * pairs + places
    tl.store(p_out, b_block.to(p_block.dtype.element_ty), mask=there)


@triton.jit
def load_pairs(
    p_pair_dk, p_pair_dv, p_order, p_chosen, base, at, end,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Sorted pairs from ``at`` on: their keys ``[BP]``, dk ``[BP, BD]`` and dv ``[BP, BE]``.

    The rows in memory begin with those of pair ``base``.
    """
    slots, columns, places = tl.arange(0, BD), tl.arange(0, BE), at + tl.arange(0, BP)
    ok = places < end
    b_order = tl.load(p_order + places, mask=ok, other=0)
    b_key = tl.load(p_chosen + b_order, mask=ok, other=-1)
    b_order -= base
    p_in = p_pair_dk + b_order[:, None] * D + slots[None, :]
    b_row = tl.load(p_in, mask=ok[:, None] & (slots < D)[None, :], other=0)
    p_in = p_pair_dv + b_order[:, None] * E + columns[None, :]
    b_value_row = tl.load(p_in, mask=ok[:, None] & (columns < E)[None, :], other=0)
    return b_key, b_row, b_value_row


@triton.jit
def add_pairs(
    b_dk, b_dv, b_key, b_row, b_value_row, first, BW: tl.constexpr, PRECISION: tl.constexpr
):
    """Add the rows of pairs to the tokens ``[BW]`` from ``first`` on that they chose."""
    b_one = (first + tl.arange(0, BW)[:, None] == b_key[None, :]).to(b_row.dtype)
    b_dk = tl.dot(b_one, b_row, b_dk, input_precision=PRECISION)
    b_dv = tl.dot(b_one, b_value_row, b_dv, input_precision=PRECISION)
    return b_dk, b_dv


@triton.jit
def add_near(
    b_dk, b_dv, b_q, b_do, b_k, b_v, ok, b_lse, b_delta, scale,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the queries of a block give to its own keys and values."""
    b_p = weights_of(score_rows(b_q, b_k, ok, scale, EVEN, PRECISION), b_lse, EVEN)
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    b_ds = (b_p * (b_dp - b_delta[:, None]) * scale).to(b_q.dtype)
    b_dk = tl.dot(tl.trans(b_ds), b_q, b_dk, input_precision=PRECISION)
    b_dv = tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do, b_dv, input_precision=PRECISION)
    return b_dk, b_dv


@triton.jit
def keys_key_kernel(
    p_q, p_k, p_v, p_g, p_dk, p_dv, p_lse, p_delta, p_log_mass, p_dc, p_shift, p_dcentre, p_mask,
    p_gaps, p_beta, p_dbeta_parts, p_pair_dk, p_pair_dv, p_order, p_chosen, p_starts, beta, scale,
    first_head, T, H, HK, G, K, blocks,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dkb, stride_dkh, stride_dkt, stride_dkd, stride_dvb, stride_dvh, stride_dvt, stride_dvd,
    W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BW: tl.constexpr, BP: tl.constexpr, R: tl.constexpr, SR: tl.constexpr,
    HAS_BETA: tl.constexpr, HAS_MASK: tl.constexpr, EVEN: tl.constexpr, ALONE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of tokens of one (sample, key head), for the R query heads that share it.

    ALONE: what these queries give to their own block, and nothing else.
    """
    number, local = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    index = local + first_head
    batch, key_head = index // HK, index % HK
    first = number * W
    if HAS_MASK:
        first -= tl.load(p_gaps + batch)
    p_mask += batch * T
    inside, ok = tokens_ok(p_mask, first, W, T, BW, HAS_MASK)
    k = rows_of(p_k, batch, key_head, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, key_head, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    q = rows_of(p_q, batch, key_head * R, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    g = rows_of(p_g, batch, key_head * R, 0, stride_gb, stride_gh, stride_gt, stride_gd)
    dk = rows_of(p_dk, batch, key_head, 0, stride_dkb, stride_dkh, stride_dkt, stride_dkd)
    dv = rows_of(p_dv, batch, key_head, 0, stride_dvb, stride_dvh, stride_dvt, stride_dvd)
    b_k = load_near(k, first, inside, ok, BW, D, BD, EVEN)
    b_v = load_near(v, first, inside, ok, BW, E, BE, EVEN)
    slots, columns = tl.arange(0, BD), tl.arange(0, BE)
    slot_ok = (slots < D)[:, None] & (columns < E)[None, :]
    b_dk = tl.zeros([BW, BD], tl.float32)
    b_dv = tl.zeros([BW, BE], tl.float32)

    # The block's own queries, and the pairs that chose its tokens. The first pairs are loaded
    # before any arithmetic, which then overlaps; many blocks have no more.
    base = (index - local) * R * G * K
    for r in tl.static_range(R):
        own = tl.cast(r, tl.int64)
        if not ALONE:
            p_ends = p_starts + (index * R + r) * blocks + number
            start, end = tl.load(p_ends), tl.load(p_ends + 1)
        query_head = batch * H + key_head * R + r
        rows = query_head * T + first + tl.arange(0, BW)
        b_q = load_queries(heads_on(q, own), first, inside, ok, BW, D, BD, EVEN, HAS_MASK)
        b_do = load_rows(heads_on(g, own), first, inside, BW, E, BE, EVEN)
        b_lse = tl.load(p_lse + rows, mask=inside, other=-NEVER)
        b_delta = tl.load(p_delta + rows, mask=inside, other=0.0)
        if not ALONE:
            b_key, b_row, b_value_row = load_pairs(
                p_pair_dk, p_pair_dv, p_order, p_chosen, base, start, end, D, E, BD, BE, BP
            )
        b_dk, b_dv = add_near(
            b_dk, b_dv, b_q, b_do, b_k, b_v, ok, b_lse, b_delta, scale, EVEN, PRECISION
        )
        if not ALONE:
            b_dk, b_dv = add_pairs(b_dk, b_dv, b_key, b_row, b_value_row, first, BW, PRECISION)
            for at in tl.range(start + BP, end, BP, num_stages=STAGES):
                b_key, b_row, b_value_row = load_pairs(
                    p_pair_dk, p_pair_dv, p_order, p_chosen, base, at, end, D, E, BD, BE, BP
                )
                b_dk, b_dv = add_pairs(b_dk, b_dv, b_key, b_row, b_value_row, first, BW, PRECISION)

    # The summaries that these tokens are part of.
    b_wide = widen(b_k, BD)
    for s in tl.static_range(0 if ALONE else R // SR):
        summary = index * (R // SR) + s
        own_beta = load_scale(p_beta, beta, summary, HAS_BETA)
        b_log_mass = tl.load(p_log_mass + summary * D + slots, mask=slots < D, other=-NEVER)
        b_w = exponential(b_wide * own_beta - b_log_mass[None, :])
        b_w = tl.where(ok[:, None] & (slots < D)[None, :], b_w, 0.0)
        p_in = p_dc + summary * D * E + slots[:, None] * E + columns[None, :]
        b_dc = tl.load(p_in, mask=slot_ok, other=0)
        b_shift = tl.load(p_shift + summary * D + slots, mask=slots < D, other=0.0)
        b_dv = tl.dot(b_w.to(b_dc.dtype), b_dc, b_dv, input_precision=PRECISION)
        b_dw = tl.dot(b_v, tl.trans(b_dc), input_precision=PRECISION) + b_shift[None, :]
        b_dx = b_w * b_dw
        # Through the mean key, which centres the slots, all keys get the same.
        b_dcentre = tl.load(p_dcentre + summary * D + slots, mask=slots < D, other=0.0)
        b_dk += b_dx * own_beta + tl.where(ok[:, None], b_dcentre[None, :], 0.0)
        tl.store(p_dbeta_parts + summary * blocks + number, tl.sum(tl.sum(b_dx * b_wide, 1), 0))
    store_rows(dk, first, b_dk, inside, BW, D, BD, EVEN)
    store_rows(dv, first, b_dv, inside, BW, E, BE, EVEN)


@triton.jit
def keys_rows_kernel(
    p_dk, p_dv, p_pair_dk, p_pair_dv, p_order, p_chosen, p_starts, first_head, T, S, HK, G, K,
    parts,
    stride_dkb, stride_dkh, stride_dkt, stride_dkd, stride_dvb, stride_dvh, stride_dvt, stride_dvd,
    W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BW: tl.constexpr, BP: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """W of the S rows behind the tokens of one (sample, key head): the sum over their pairs."""
    part, local = tl.program_id(0) % parts, (tl.program_id(0) // parts).to(tl.int64)
    index = local + first_head
    batch, key_head, first = index // HK, index % HK, T + part * W
    dk = rows_of(p_dk, batch, key_head, 0, stride_dkb, stride_dkh, stride_dkt, stride_dkd)
    dv = rows_of(p_dv, batch, key_head, 0, stride_dvb, stride_dvh, stride_dvt, stride_dvd)
    b_dk = tl.zeros([BW, BD], tl.float32)
    b_dv = tl.zeros([BW, BE], tl.float32)
    base = (index - local) * R * G * K
    for r in tl.static_range(R):
        p_ends = p_starts + (index * R + r) * parts + part
        start, end = tl.load(p_ends), tl.load(p_ends + 1)
        for at in tl.range(start, end, BP, num_stages=STAGES):
            b_key, b_row, b_value_row = load_pairs(
                p_pair_dk, p_pair_dv, p_order, p_chosen, base, at, end, D, E, BD, BE, BP
            )
            b_dk, b_dv = add_pairs(b_dk, b_dv, b_key, b_row, b_value_row, first, BW, PRECISION)
    places = part * W + tl.arange(0, BW)
    inside = (places < S) & (tl.arange(0, BW) < W)
    store_rows(dk, first, b_dk, inside, BW, D, BD, False)
    store_rows(dv, first, b_dv, inside, BW, E, BE, False)
