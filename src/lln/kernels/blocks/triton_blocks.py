"""Block-diagonal softmax attention alone (section 4.2), forward and backward in one pass each.

A tile holds whole blocks, so its softmax rows are complete: nothing is saved for the backward,
which recomputes them. Per block of b tokens, with P = softmax(scale · q kᵀ):

    o = P v;   dv = Pᵀ dO;   dS = P ∘ (dO vᵀ − rowsum(P ∘ dO vᵀ));   dq = scale · dS k
    dk = scale · dSᵀ q

Under a mask blocks are counted from the first token of a sample that is not masked, so the first
block that a kernel visits may begin before token 0. The kernel then starts at that negative place,
and its tiles hold whole blocks as always. The places are found by a separate launch (``gap``): a
search inside the kernels would take registers that they need.

Dimension legend: see `lln.kernels.launching.triton_steps`; B samples, H query heads, HK key heads,
R = H / HK, T tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_steps import (
    block_softmax,
    find_stretch,
    heads_on,
    load_queries,
    load_rows,
    load_unmasked,
    rows_inside,
    rows_of,
    store_rows,
    token_ok,
)


@triton.jit
def blocks_fwd_kernel(
    p_q, p_k, p_v, p_o, p_mask, p_starts,
    scale, block_size, tile_tokens, program_tokens, splits, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_ob, stride_oh, stride_ot, stride_od,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, EVEN: tl.constexpr, ONE_BLOCK: tl.constexpr, HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One stretch (a program's share of the tokens) of one (sample, query head)."""
    program = tl.program_id(0)
    split, index = program % splits, (program // splits).to(tl.int64)
    batch, head, _, start, end = find_stretch(
        p_starts, split, index, program_tokens, T, H, False, HAS_MASK
    )
    key_head = head // R
    q = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, key_head, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, key_head, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    o = rows_of(p_o, batch, head, 0, stride_ob, stride_oh, stride_ot, stride_od)
    p_mask += batch * T
    for first in tl.range(start, end, tile_tokens, num_stages=STAGES):
        last = tl.minimum(first + tile_tokens, end)
        inside = rows_inside(first, last, BT, HAS_MASK)
        ok = token_ok(p_mask, first, last, BT, HAS_MASK)
        b_q = load_queries(q, first, inside, ok, BT, D, BD, EVEN, HAS_MASK)
        b_k = load_unmasked(k, first, inside, ok, BT, D, BD, EVEN, HAS_MASK)
        b_v = load_unmasked(v, first, inside, ok, BT, E, BE, EVEN, HAS_MASK)
        b_p, b_sum = block_softmax(
            b_q, b_k, scale, ok, block_size, BT, EVEN, ONE_BLOCK, CAUSAL, PRECISION
        )
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
        b_o = b_o * (1.0 / b_sum)[:, None]
        store_rows(o, first, b_o, inside, BT, E, BE, EVEN)


@triton.jit
def blocks_bwd_kernel(
    p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_starts,
    scale, block_size, tile_tokens, program_tokens, splits, T, HK,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd, stride_dkb, stride_dkh, stride_dkt, stride_dkd,
    stride_dvb, stride_dvh, stride_dvt, stride_dvd,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, EVEN: tl.constexpr, ONE_BLOCK: tl.constexpr, HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One stretch of tokens of one (sample, key head), for the R query heads that share it."""
    program = tl.program_id(0)
    split, index = program % splits, (program // splits).to(tl.int64)
    batch, key_head, _, start, end = find_stretch(
        p_starts, split, index, program_tokens, T, HK, False, HAS_MASK
    )
    head = key_head * R
    q = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, key_head, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, key_head, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    g = rows_of(p_g, batch, head, 0, stride_gb, stride_gh, stride_gt, stride_gd)
    dq = rows_of(p_dq, batch, head, 0, stride_dqb, stride_dqh, stride_dqt, stride_dqd)
    dk = rows_of(p_dk, batch, key_head, 0, stride_dkb, stride_dkh, stride_dkt, stride_dkd)
    dv = rows_of(p_dv, batch, key_head, 0, stride_dvb, stride_dvh, stride_dvt, stride_dvd)
    p_mask += batch * T
    for first in tl.range(start, end, tile_tokens, num_stages=STAGES):
        last = tl.minimum(first + tile_tokens, end)
        inside = rows_inside(first, last, BT, HAS_MASK)
        ok = token_ok(p_mask, first, last, BT, HAS_MASK)
        b_k = load_unmasked(k, first, inside, ok, BT, D, BD, EVEN, HAS_MASK)
        b_v = load_unmasked(v, first, inside, ok, BT, E, BE, EVEN, HAS_MASK)
        b_dk = tl.zeros([BT, BD], tl.float32)
        b_dv = tl.zeros([BT, BE], tl.float32)
        for r in tl.static_range(R):
            own = tl.cast(r, tl.int64)
            b_q = load_queries(heads_on(q, own), first, inside, ok, BT, D, BD, EVEN, HAS_MASK)
            b_do = load_rows(heads_on(g, own), first, inside, BT, E, BE, EVEN)
            b_p, b_sum = block_softmax(
                b_q, b_k, scale, ok, block_size, BT, EVEN, ONE_BLOCK, CAUSAL, PRECISION
            )
            b_p = b_p * (1.0 / b_sum)[:, None]
            b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
            b_level = tl.sum(b_p * b_dp, 1)
            b_ds = (b_p * (b_dp - b_level[:, None]) * scale).to(b_q.dtype)
            b_p_low = b_p.to(b_do.dtype)
            b_dq = tl.dot(b_ds, b_k, input_precision=PRECISION)
            store_rows(heads_on(dq, own), first, b_dq, inside, BT, D, BD, EVEN)
            b_dk = tl.dot(tl.trans(b_ds), b_q, b_dk, input_precision=PRECISION)
            b_dv = tl.dot(tl.trans(b_p_low), b_do, b_dv, input_precision=PRECISION)
        store_rows(dk, first, b_dk, inside, BT, D, BD, EVEN)
        store_rows(dv, first, b_dv, inside, BT, E, BE, EVEN)


# Tokens of a mask that are read at a time.
LOOK = 1024


@triton.jit
def gap_kernel(p_mask, p_starts, tokens, block_size, LOOK: tl.constexpr):
    """How far before token 0 of a sample its first block begins."""
    batch = tl.program_id(0).to(tl.int64)
    p_mask += batch * tokens
    first, place = tl.cast(tokens, tl.int32), tl.cast(0, tl.int32)
    while place < first:
        at = place + tl.arange(0, LOOK)
        seen = tl.load(p_mask + at, mask=at < tokens, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(seen, at, tokens)))
        place += LOOK
    tl.store(p_starts + batch, (block_size - first % block_size) % block_size)
