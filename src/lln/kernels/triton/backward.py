"""Backward kernels, from q, k, v, the summary (L, C) and dO; nothing else of size N was saved.

`lln.kernels.triton.backward_ranges` has the equations and what a range of tokens adds to them;
here is which program takes which range.

*Short*: one program a (sample, head) runs over the queries, keeps dC and the shift on the chip,
then runs over the keys. *Long*: a pass over the queries leaves partial dC and shift, which are
summed once, and a second pass goes over the keys.

Dimension legend: see `lln.kernels.triton.steps`; SH summary heads, R query heads a summary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.backward_ranges import (
    joint_grad_range,
    key_grad_range,
    query_grad_range,
    store_beta_grad,
)
from lln.kernels.triton.mixing import mix_rows
from lln.kernels.triton.steps import gap_before, load_rows, load_scale, locate


@triton.jit
def load_summary(
    p_log_mass,
    p_centroid,
    index,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
):
    """Log-mass ``[BD]`` and centroids ``[BD, BE]``."""
    slots = tl.arange(0, BD)
    # Padding slots get a huge mass, so that no token weighs anything in them.
    b_log_mass = tl.load(p_log_mass + index * D + slots, mask=slots < D, other=1e30)
    p_c = p_centroid + index * D * E
    return b_log_mass, load_rows(p_c, E, 1, slots < D, BD, E, BE, D == BD)


@triton.jit(do_not_specialize=["seed"])
def short_bwd_kernel(
    p_q, p_k, p_v, p_do, p_dq, p_dk, p_dv, p_mix, p_dmix, p_mask, p_alpha, p_beta,
    p_dalpha, p_dbeta, p_log_mass, p_centroid, p_bounds,
    alpha, beta, mix, scale, block_size, seed, dropout_p, tile_tokens, T, S, SH,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd, stride_dkb, stride_dkh, stride_dkt, stride_dkd,
    stride_dvb, stride_dvh, stride_dvt, stride_dvd, stride_mb, stride_mh, stride_mt, stride_me,
    R: tl.constexpr, KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr, BJ: tl.constexpr,
    HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr, ALPHA_GRAD: tl.constexpr,
    BETA_GRAD: tl.constexpr, EVEN: tl.constexpr, QUIET: tl.constexpr, ONE_BLOCK: tl.constexpr,
    MIX: tl.constexpr,
    MIX_GRAD: tl.constexpr, HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One (sample, summary head): over the queries for dC and dL, then over the keys."""
    index = tl.program_id(0).to(tl.int64)
    batch, head = index // SH, index % SH
    key_head = head // KG
    first_query = head * R
    begin, keys = locate(p_bounds, batch, S, PACKED)
    queries = keys if PACKED else T
    p_q += batch * stride_qb + begin * stride_qt + first_query * stride_qh
    p_do += batch * stride_gb + begin * stride_gt + first_query * stride_gh
    p_dq += batch * stride_dqb + begin * stride_dqt + first_query * stride_dqh
    p_mix += batch * stride_mb + begin * stride_mt + first_query * stride_mh
    b_log_mass, b_c = load_summary(p_log_mass, p_centroid, index, D, E, BD, BE)
    b_dc = tl.zeros([BE, BD], tl.float32)
    b_gather = tl.zeros([BQ, BD], tl.float32)
    for r in range(R):
        own = tl.cast(r, tl.int64)
        b_dc, b_gather, b_dalpha = query_grad_range(
            p_q + own * stride_qh, p_do + own * stride_gh, p_dq + own * stride_dqh,
            p_mix + own * stride_mh,
            p_mask + batch * S, 0, queries, load_scale(p_alpha, alpha, index * R + r, HAS_ALPHA),
            b_log_mass, b_c,
            b_dc, b_gather, mix, stride_qt, stride_qd, stride_gt, stride_gd,
            stride_dqt, stride_dqd, stride_mt, stride_me,
            D, E, BD, BE, BQ, EVEN, QUIET, MIX, False, ALPHA_GRAD, PRECISION, STAGES,
        )  # fmt: skip
        if ALPHA_GRAD:
            tl.store(p_dalpha + index * R + r, b_dalpha)
    b_dc_low = b_dc.to(b_c.dtype)
    b_shift = tl.sum(b_gather, 0)
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    p_k += batch * stride_kb + begin * stride_kt + key_head * stride_kh
    p_v += batch * stride_vb + begin * stride_vt + key_head * stride_vh
    p_dk += batch * stride_dkb + begin * stride_dkt + head * stride_dkh
    p_dv += batch * stride_dvb + begin * stride_dvt + head * stride_dvh
    p_mask += batch * S
    drop_first = (batch * (SH // KG) + key_head) * S
    MIX_STEP: tl.constexpr = E if MIX_GRAD == 2 else 1
    if MIX > 0:
        gap = gap_before(p_bounds, batch, HAS_MASK)
        b_dbeta, b_residue, b_centre, b_dmix = joint_grad_range(
            p_q, p_k, p_v, p_do, p_dq, p_dk, p_dv, p_mix,
            p_dmix + mix_rows(index, first_query, begin, T, R, PACKED) * MIX_STEP,
            p_mask, p_alpha, -gap, keys, alpha, beta_here, b_log_mass, b_c, b_dc_low, b_shift,
            tl.zeros([BE], tl.float32), index * R, mix, scale, block_size,
            stride_qh, stride_qt, stride_qd, stride_kt, stride_kd, stride_vt, stride_vd,
            stride_gh, stride_gt, stride_gd, stride_dqh, stride_dqt, stride_dqd,
            stride_dkt, stride_dkd, stride_dvt, stride_dvd, stride_mh, stride_mt, stride_me,
            seed, drop_first, dropout_p, tile_tokens, T,
            R, D, E, BD, BE, BJ, EVEN, QUIET, ONE_BLOCK, HAS_ALPHA, MIX, MIX_GRAD, False,
            HAS_MASK, HAS_DROPOUT, CAUSAL, BETA_GRAD, PRECISION, STAGES,
        )  # fmt: skip
        if MIX_GRAD == 3:
            columns = tl.arange(0, BE)
            tl.store(p_dmix + index * E + columns, b_dmix, mask=columns < E)
    else:
        b_dbeta, b_residue, b_centre = key_grad_range(
            p_k, p_v, p_dk, p_dv, p_mask, 0, keys, beta_here, b_log_mass, b_dc_low, b_shift,
            stride_kt, stride_kd, stride_vt, stride_vd, stride_dkt, stride_dkd,
            stride_dvt, stride_dvd, seed, drop_first, dropout_p,
            D, E, BD, BE, BK, EVEN, HAS_MASK, HAS_DROPOUT, BETA_GRAD, PRECISION, STAGES,
        )  # fmt: skip
    if BETA_GRAD:
        store_beta_grad(p_dbeta, index, b_dbeta, b_residue, b_centre)


@triton.jit
def query_bwd_kernel(
    p_q, p_do, p_dq, p_mix, p_mask, p_alpha, p_dalpha, p_log_mass, p_centroid, p_shift, p_dc,
    p_bounds, alpha, mix, program_tokens, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd, stride_mb, stride_mh, stride_mt, stride_me,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_ALPHA: tl.constexpr, ALPHA_GRAD: tl.constexpr, EVEN: tl.constexpr,
    QUIET: tl.constexpr, MIX: tl.constexpr, SPLIT: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One stretch of queries of one (sample, head): dq, and partial dCᵀ and shift in float32."""
    split, splits = tl.program_id(0), tl.num_programs(0)
    index = tl.program_id(1).to(tl.int64)
    batch, head = index // H, index % H
    b_log_mass, b_c = load_summary(p_log_mass, p_centroid, index // R, D, E, BD, BE)
    begin, queries = locate(p_bounds, batch, T, PACKED)
    start = split * program_tokens
    b_dc, b_gather, b_dalpha = query_grad_range(
        p_q + batch * stride_qb + begin * stride_qt + head * stride_qh,
        p_do + batch * stride_gb + begin * stride_gt + head * stride_gh,
        p_dq + batch * stride_dqb + begin * stride_dqt + head * stride_dqh,
        p_mix + batch * stride_mb + begin * stride_mt + head * stride_mh,
        p_mask + batch * T, start, tl.minimum(start + program_tokens, queries),
        load_scale(p_alpha, alpha, index, HAS_ALPHA), b_log_mass, b_c,
        tl.zeros([BE, BD], tl.float32), tl.zeros([BT, BD], tl.float32), mix,
        stride_qt, stride_qd, stride_gt, stride_gd, stride_dqt, stride_dqd, stride_mt, stride_me,
        D, E, BD, BE, BT, EVEN, QUIET, MIX, SPLIT, ALPHA_GRAD, PRECISION, STAGES,
    )  # fmt: skip
    part = index * splits + split
    slots = tl.arange(0, BD)
    tl.store(p_shift + part * BD + slots, tl.sum(b_gather, 0))
    tl.store(p_dc + part * BD * BE + tl.arange(0, BE)[:, None] * BD + slots[None, :], b_dc)
    if ALPHA_GRAD:
        tl.store(p_dalpha + part, b_dalpha)


@triton.jit
def gather_kernel(
    p_shift_parts, p_dc_parts, p_shift, p_dc, parts,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum ROWS channels of the partial dCᵀ, and the partial shifts, in a fixed order."""
    index = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slots = tl.arange(0, BD)
    b_shift = tl.zeros([BD], tl.float32)
    b_dc = tl.zeros([ROWS, BD], tl.float32)
    for part in range(parts):
        place = index * parts + part
        b_shift += tl.load(p_shift_parts + place * BD + slots)
        b_dc += tl.load(p_dc_parts + place * BD * BE + rows[:, None] * BD + slots[None, :])
    if tl.program_id(0) == 0:
        tl.store(p_shift + index * D + slots, b_shift, mask=slots < D)
    ok = (rows < E)[:, None] & (slots < D)[None, :]
    p_out = p_dc + index * D * E + rows[:, None] * D + slots[None, :]
    tl.store(p_out, b_dc.to(p_dc.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["seed"])
def key_bwd_kernel(
    p_q, p_k, p_v, p_do, p_dq, p_dk, p_dv, p_mix, p_dmix, p_mask, p_alpha, p_beta, p_dbeta,
    p_log_mass, p_centroid, p_shift, p_dc, p_bounds,
    alpha, beta, mix, scale, block_size, seed, dropout_p, tile_tokens, program_tokens, T, S, SH,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd, stride_dkb, stride_dkh, stride_dkt, stride_dkd,
    stride_dvb, stride_dvh, stride_dvt, stride_dvd, stride_mb, stride_mh, stride_mt, stride_me,
    R: tl.constexpr, KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BT: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr,
    BETA_GRAD: tl.constexpr, EVEN: tl.constexpr, QUIET: tl.constexpr, ONE_BLOCK: tl.constexpr,
    MIX: tl.constexpr, SPLIT: tl.constexpr,
    MIX_GRAD: tl.constexpr, HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One stretch of keys of one (sample, summary head): dk, dv, and with the diagonal dq."""
    split, splits = tl.program_id(0), tl.num_programs(0)
    index = tl.program_id(1).to(tl.int64)
    batch, head = index // SH, index % SH
    key_head = head // KG
    first_query = head * R
    slots = tl.arange(0, BD)
    b_log_mass, b_c = load_summary(p_log_mass, p_centroid, index, D, E, BD, BE)
    value_ok = tl.arange(0, BE) < E
    b_dc = load_rows(p_dc + index * D * E, D, 1, value_ok, BE, D, BD, E == BE)
    b_shift = tl.load(p_shift + index * D + slots, mask=slots < D, other=0.0)
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    begin, keys = locate(p_bounds, batch, S, PACKED)
    p_mask += batch * S
    start = split * program_tokens - gap_before(p_bounds, batch, HAS_MASK and MIX > 0)
    end = tl.minimum(start + program_tokens, keys)
    p_k += batch * stride_kb + begin * stride_kt + key_head * stride_kh
    p_v += batch * stride_vb + begin * stride_vt + key_head * stride_vh
    p_dk += batch * stride_dkb + begin * stride_dkt + head * stride_dkh
    p_dv += batch * stride_dvb + begin * stride_dvt + head * stride_dvh
    drop_first = (batch * (SH // KG) + key_head) * S
    MIX_STEP: tl.constexpr = E if MIX_GRAD == 2 else 1
    if MIX > 0:
        b_dbeta, b_residue, b_centre, b_dmix = joint_grad_range(
            p_q + batch * stride_qb + begin * stride_qt + first_query * stride_qh, p_k, p_v,
            p_do + batch * stride_gb + begin * stride_gt + first_query * stride_gh,
            p_dq + batch * stride_dqb + begin * stride_dqt + first_query * stride_dqh, p_dk, p_dv,
            p_mix + batch * stride_mb + begin * stride_mt + first_query * stride_mh,
            p_dmix + mix_rows(index, first_query, begin, T, R, PACKED) * MIX_STEP,
            p_mask, p_alpha, start, end, alpha, beta_here, b_log_mass, b_c, b_dc, b_shift,
            tl.zeros([BE], tl.float32), index * R, mix, scale, block_size,
            stride_qh, stride_qt, stride_qd, stride_kt, stride_kd, stride_vt, stride_vd,
            stride_gh, stride_gt, stride_gd, stride_dqh, stride_dqt, stride_dqd,
            stride_dkt, stride_dkd, stride_dvt, stride_dvd, stride_mh, stride_mt, stride_me,
            seed, drop_first, dropout_p, tile_tokens, T,
            R, D, E, BD, BE, BT, EVEN, QUIET, ONE_BLOCK, HAS_ALPHA, MIX, MIX_GRAD, SPLIT,
            HAS_MASK, HAS_DROPOUT, CAUSAL, BETA_GRAD, PRECISION, STAGES,
        )  # fmt: skip
        if MIX_GRAD == 3:
            columns = tl.arange(0, BE)
            tl.store(p_dmix + (index * splits + split) * E + columns, b_dmix, mask=columns < E)
    else:
        b_dbeta, b_residue, b_centre = key_grad_range(
            p_k, p_v, p_dk, p_dv, p_mask, start, end, beta_here, b_log_mass, b_dc, b_shift,
            stride_kt, stride_kd, stride_vt, stride_vd, stride_dkt, stride_dkd,
            stride_dvt, stride_dvd, seed, drop_first, dropout_p,
            D, E, BD, BE, BT, EVEN, HAS_MASK, HAS_DROPOUT, BETA_GRAD, PRECISION, STAGES,
        )  # fmt: skip
    if BETA_GRAD and not SPLIT:
        store_beta_grad(p_dbeta, index * splits + split, b_dbeta, b_residue, b_centre)
