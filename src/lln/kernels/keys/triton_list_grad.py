"""Gradients of attention to the lists of features, without atomics.

The slots' pass and the pass over keys are those of `triton_keys_grad`. Between them:

1. ``run_lists``: the list of every run, once for each, as the pass over keys takes them: it adds
   up pairs (run, key of its list) in the order of the keys' blocks.
2. ``list_grad``: a program takes one run of up to C entries. For every tile of them it forms their
   rows again and writes their share of dq to the entry's own place; dk and dv of its list it sums
   up on the chip and writes once.
3. ``list_near``: a program takes one block: dq from its own block, from the slots (which is there
   already) and from both entries of a row.

Dimension legend: see `lln.kernels.keys.triton_list_read`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.keys.triton_keys_read import (
    load_chosen,
    load_near,
    score_rows,
    tokens_ok,
    weights_of,
)
from lln.kernels.keys.triton_list_read import (
    find_run,
    load_entries,
    load_list,
    load_rows_at,
    score_list,
    visible,
)
from lln.kernels.launching.triton_steps import NEVER, load_queries, load_rows, rows_of, store_rows


@triton.jit
def run_lists_kernel(
    p_lists, p_starts, p_out, L, runs,
    F: tl.constexpr, BF: tl.constexpr, BL: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The list of one run; -1 if there is no such run."""
    number, index = tl.program_id(0) % runs, (tl.program_id(0) // runs).to(tl.int64)
    feature, first, end = find_run(p_starts + index * (F + 1), number, F, BF, C)
    places = tl.arange(0, BL)
    p_in = p_lists + (index // R * F + feature) * L + places
    b_key = tl.load(p_in, mask=(places < L) & (first < end), other=-1)
    tl.store(p_out + (index * runs + number) * L + places, b_key, mask=places < L)


@triton.jit
def list_grad_kernel(
    p_q, p_k, p_v, p_g, p_lse, p_delta, p_part, p_pair_dk, p_pair_dv, p_lists, p_features, p_order,
    p_starts, p_members, p_mask, p_gaps, scale, first_head, T, H, L, runs, words, table,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    TABLES: tl.constexpr, MORE: tl.constexpr, HAS_MASK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One run of one (sample, query head)."""
    number, local = tl.program_id(0) % runs, (tl.program_id(0) // runs).to(tl.int64)
    index = local + first_head
    feature, first, end = find_run(p_starts + index * (2 * D + 1), number, 2 * D, BF, C)
    if first >= end:
        return
    batch, head = index // H, index % H
    key_index = index // R
    q = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, head // R, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, head // R, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    g = rows_of(p_g, batch, head, 0, stride_gb, stride_gh, stride_gt, stride_gd)
    p_mask += batch * T
    p_members += key_index * T * words
    p_list = p_lists + (key_index * 2 * D + feature) * L
    p_order += index * 2 * T
    p_features += index * 2 * T
    gap = 0
    if HAS_MASK:
        gap = tl.load(p_gaps + batch)
    slots, columns = tl.arange(0, BD), tl.arange(0, BE)
    for at in range(0, L, BK):
        b_index, b_known, b_known_later = load_list(p_list, table, at, L, BK, TABLES)
        b_k = load_chosen(k, b_index, b_known, BK, D, BD)
        b_v = load_chosen(v, b_index, b_known, BK, E, BE)
        b_dk = tl.zeros([BK, BD], tl.float32)
        b_dv = tl.zeros([BK, BE], tl.float32)
        for start in tl.range(first, end, BM, num_stages=STAGES):
            b_entry, b_there, b_token, b_later, b_first = load_entries(
                p_order, p_features, start, end, T, BM
            )
            b_q = load_rows_at(q, b_token, b_there, p_mask, BM, D, BD, HAS_MASK)
            b_do = load_chosen(g, b_token, b_there, BM, E, BE)
            b_lse = tl.load(p_lse + index * T + b_token, mask=b_there, other=-NEVER)
            b_delta = tl.load(p_delta + index * T + b_token, mask=b_there, other=0.0)
            b_seen = visible(
                b_index, b_known, b_known_later, b_there, b_token, b_later, b_first, p_members,
                gap, words, W,
            )  # fmt: skip
            b_s = score_list(b_q, b_k, b_seen, scale, PRECISION)
            b_p = weights_of(b_s, b_lse, EVEN)
            b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
            b_ds = (b_p * (b_dp - b_delta[:, None]) * scale).to(b_k.dtype)
            b_dk = tl.dot(tl.trans(b_ds), b_q, b_dk, input_precision=PRECISION)
            b_dv = tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do, b_dv, input_precision=PRECISION)
            b_dq = tl.dot(b_ds, b_k, input_precision=PRECISION)
            rows = local * 2 * T + b_entry
            p_out = p_part + rows[:, None] * D + slots[None, :]
            ok = b_there[:, None] & (slots < D)[None, :]
            if MORE:
                b_dq += tl.load(p_out, mask=ok & (at > 0), other=0).to(tl.float32)
            tl.store(p_out, b_dq.to(p_part.dtype.element_ty), mask=ok)
        places = at + tl.arange(0, BK)
        rows = ((local * runs + number) * L + places)[:, None]
        p_out = p_pair_dk + rows * D + slots[None, :]
        ok = (places < L)[:, None]
        b_row = b_dk.to(p_pair_dk.dtype.element_ty)
        tl.store(p_out, b_row, mask=ok & (slots < D)[None, :])
        p_out = p_pair_dv + rows * E + columns[None, :]
        b_row = b_dv.to(p_pair_dv.dtype.element_ty)
        tl.store(p_out, b_row, mask=ok & (columns < E)[None, :])
        if MORE:
            # The next tile of keys adds to what other threads have written of dq.
            tl.debug_barrier()


@triton.jit
def list_near_kernel(
    p_q, p_k, p_v, p_g, p_dq, p_lse, p_delta, p_part, p_mask, p_gaps, scale, first_head, T, H,
    blocks,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd,
    W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BW: tl.constexpr, R: tl.constexpr, HAS_MASK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The block's share of dq and that of the lists, for one block; adds to dq."""
    block, local = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    index = local + first_head
    batch, head = index // H, index % H
    first = block * W
    if HAS_MASK:
        first -= tl.load(p_gaps + batch)
    q = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, head // R, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, head // R, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    g = rows_of(p_g, batch, head, 0, stride_gb, stride_gh, stride_gt, stride_gd)
    dq = rows_of(p_dq, batch, head, 0, stride_dqb, stride_dqh, stride_dqt, stride_dqd)
    inside, ok = tokens_ok(p_mask + batch * T, first, W, T, BW, HAS_MASK)
    rows = index * T + first + tl.arange(0, BW)
    b_q = load_queries(q, first, inside, ok, BW, D, BD, EVEN, HAS_MASK)
    b_do = load_rows(g, first, inside, BW, E, BE, EVEN)
    b_lse = tl.load(p_lse + rows, mask=inside, other=-NEVER)
    b_delta = tl.load(p_delta + rows, mask=inside, other=0.0)
    b_k = load_near(k, first, inside, ok, BW, D, BD, EVEN)
    b_v = load_near(v, first, inside, ok, BW, E, BE, EVEN)
    b_p = weights_of(score_rows(b_q, b_k, ok, scale, EVEN, PRECISION), b_lse, EVEN)
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    b_ds = (b_p * (b_dp - b_delta[:, None]) * scale).to(b_k.dtype)
    b_dq = tl.dot(b_ds, b_k, input_precision=PRECISION)
    b_dq += load_rows(dq, first, inside, BW, D, BD, EVEN).to(tl.float32)
    slots = tl.arange(0, BD)
    rows = local * 2 * T + first + tl.arange(0, BW)
    there = inside[:, None] & (slots < D)[None, :]
    p_in = p_part + rows[:, None] * D + slots[None, :]
    b_dq += tl.load(p_in, mask=there, other=0).to(tl.float32)
    # Not p_in + T · D, which may have more than 31 bits.
    p_in = p_part + (rows + T)[:, None] * D + slots[None, :]
    b_dq += tl.load(p_in, mask=there, other=0).to(tl.float32)
    store_rows(dq, first, b_dq, inside, BW, D, BD, EVEN)
