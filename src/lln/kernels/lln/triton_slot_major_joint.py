"""Gradients of wide heads with a diagonal part: the blocks' and the keys' share of LLN in one pass.

The pass over the queries has written LLN's dq (`triton_slot_major_grads`). Here a tile of
q, k, v and dO is read once: the blocks' part is added to dq, and dk and dv are complete. Gradients
of keys and values are turned, ``[BD, BT]`` and ``[BE, BT]``; the blocks' matrices are ``[BT, BT]``.

Dimension legend: see `triton_steps`; SH summary heads, R query heads per summary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import (
    block_softmax,
    find_program,
    find_stretch,
    heads_on,
    load_queries,
    load_rows,
    load_scale,
    load_unmasked,
    load_values,
    rows_inside,
    rows_of,
    store_rows,
    token_ok,
)
from lln.kernels.summaries.triton_backward_ranges import store_beta_grad
from lln.kernels.summaries.triton_mixing import load_gradient
from lln.kernels.summaries.triton_slot_major_grads import load_key_side, weights_turned


@triton.jit(do_not_specialize=["seed"])
def joint_slot_major_kernel(
    p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_m, p_mask, p_beta, p_dbeta,
    p_log_mass, p_shift, p_dc, p_starts,
    beta, mix, scale, block_size, seed, dropout_p, tile_tokens, program_tokens, S, SH,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd, stride_dkb, stride_dkh, stride_dkt, stride_dkd,
    stride_dvb, stride_dvh, stride_dvt, stride_dvd, stride_mb, stride_mh, stride_mt, stride_md,
    R: tl.constexpr, KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BT: tl.constexpr, HAS_BETA: tl.constexpr, BETA_GRAD: tl.constexpr,
    EVEN: tl.constexpr, QUIET: tl.constexpr, ONE_BLOCK: tl.constexpr, MIX: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, PACKED: tl.constexpr,
    SHIFTED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One stretch of tokens of one (sample, summary head): dk, dv, and the blocks' part of dq."""
    wait_for_launch(FOLLOWS)
    split, index, part = find_program()
    batch, head, begin, start, end = find_stretch(
        p_starts, split, index, program_tokens, S, SH, PACKED, SHIFTED
    )
    key_head, first_query = head // KG, head * R
    b_log_mass, b_shift, b_dc = load_key_side(p_log_mass, p_shift, p_dc, index, D, E, BD, BE)
    q = rows_of(p_q, batch, first_query, begin, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, key_head, begin, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, key_head, begin, stride_vb, stride_vh, stride_vt, stride_vd)
    gradients = rows_of(p_g, batch, first_query, begin, stride_gb, stride_gh, stride_gt, stride_gd)
    dq = rows_of(p_dq, batch, first_query, begin, stride_dqb, stride_dqh, stride_dqt, stride_dqd)
    dk = rows_of(p_dk, batch, head, begin, stride_dkb, stride_dkh, stride_dkt, stride_dkd)
    dv = rows_of(p_dv, batch, head, begin, stride_dvb, stride_dvh, stride_dvt, stride_dvd)
    mixes = rows_of(p_m, batch, first_query, begin, stride_mb, stride_mh, stride_mt, stride_md)
    p_mask += batch * S
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    drop_first = (batch * (SH // KG) + key_head) * S
    b_dbeta, b_residue, b_centre = 0.0, 0.0, 0.0
    for first in tl.range(start, end, tile_tokens, num_stages=STAGES):
        last = tl.minimum(first + tile_tokens, end)
        inside = rows_inside(first, last, BT, HAS_MASK)
        ok = token_ok(p_mask, first, last, BT, HAS_MASK)
        b_k = load_unmasked(k, first, inside, ok, BT, D, BD, EVEN, HAS_MASK)
        b_v, b_factor = load_values(
            v, first, inside, ok, seed, drop_first, dropout_p, BT, E, BE, EVEN, HAS_MASK,
            HAS_DROPOUT,
        )  # fmt: skip
        b_dk, b_dv = tl.zeros([BD, BT], tl.float32), tl.zeros([BE, BT], tl.float32)
        for r in tl.static_range(R):
            own = tl.cast(r, tl.int64)
            b_q = load_queries(heads_on(q, own), first, inside, ok, BT, D, BD, EVEN, QUIET)
            _, _, b_do, _, b_rest = load_gradient(
                heads_on(gradients, own), heads_on(mixes, own), mix, first, inside,
                E, BE, BT, MIX, EVEN,
            )  # fmt: skip
            b_p, b_sum = block_softmax(
                b_q, b_k, scale, ok, block_size, BT, EVEN, ONE_BLOCK, False, PRECISION
            )
            b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
            b_level = tl.sum(b_p * b_dp, 1) / b_sum
            b_p = b_p * (b_rest / b_sum)[:, None]
            b_ds = (b_p * (b_dp - b_level[:, None]) * scale).to(b_q.dtype)
            b_dv = tl.dot(tl.trans(b_do), b_p.to(b_do.dtype), b_dv, input_precision=PRECISION)
            b_dk = tl.dot(tl.trans(b_q), b_ds, b_dk, input_precision=PRECISION)
            dq_own = heads_on(dq, own)
            b_dq = tl.dot(b_ds, b_k, input_precision=PRECISION)
            b_dq += load_rows(dq_own, first, inside, BT, D, BD, EVEN)
            store_rows(dq_own, first, b_dq, inside, BT, D, BD, EVEN)
        # Without a product: the identity would take the room of a second stage.
        b_wide = tl.trans(b_k).to(tl.float32)
        b_b = weights_turned(b_wide, beta_here, b_log_mass, ok, EVEN)
        b_dv = tl.dot(b_dc, b_b.to(b_v.dtype), b_dv, input_precision=PRECISION)
        if HAS_MASK:
            b_dv = tl.where(ok[None, :], b_dv, 0.0)
        if HAS_DROPOUT:
            b_dv *= b_factor[None, :]
        store_rows(dv, first, tl.trans(b_dv), inside, BT, E, BE, EVEN)
        b_db = tl.dot(tl.trans(b_dc), tl.trans(b_v), input_precision=PRECISION)
        b_g = b_b * (b_db + b_shift[:, None])
        if BETA_GRAD:
            b_dbeta += tl.sum(b_g * b_wide)
            b_residue += tl.sum(b_g)
            b_centre += tl.sum(b_b * b_wide)
        b_dk += b_g * beta_here
        if HAS_MASK:
            b_dk = tl.where(ok[None, :], b_dk, 0.0)
        store_rows(dk, first, tl.trans(b_dk), inside, BT, D, BD, EVEN)
    if BETA_GRAD:
        store_beta_grad(p_dbeta, part, b_dbeta, b_residue, b_centre)
