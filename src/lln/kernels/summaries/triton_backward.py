"""Backward kernels, from q, k, v, the summary (L, C) and dO; nothing else of size N was saved.

`triton_backward_ranges` has the equations and computes one range of tokens; this module
decides which program takes which range (its *stretch*).

*Short*: one program per (sample, head) runs over the queries, keeps dC and the shift on the chip,
then runs over the keys. *Long*: a pass over the queries leaves partial dC and shift, which are
summed once, and a second pass goes over the keys.

Dimension legend: see `triton_steps`; SH summary heads, R query heads per summary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import (
    find_program,
    find_stretch,
    gap_before,
    heads_on,
    load_rows,
    load_scale,
    locate,
    rows_of,
)
from lln.kernels.summaries.triton_backward_ranges import (
    joint_grad_range,
    key_grad_range,
    query_grad_range,
    store_beta_grad,
)
from lln.kernels.summaries.triton_mixing import mix_rows


@triton.jit
def load_summary(
    p_log_mass, p_centroid, index,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Log-mass ``[BD]`` and centroids ``[BD, BE]``."""
    slots = tl.arange(0, BD)
    # Padding slots get a huge mass, so that every token has weight 0 in them.
    b_log_mass = tl.load(p_log_mass + index * D + slots, mask=slots < D, other=1e30)
    centroids = p_centroid + index * D * E, 0, E, 1
    return b_log_mass, load_rows(centroids, 0, slots < D, BD, E, BE, D == BD)


@triton.jit(do_not_specialize=["seed"])
def short_bwd_kernel(
    p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_m, p_dmix, p_mask, p_alpha, p_beta,
    p_dalpha, p_dbeta, p_log_mass, p_centroid, p_starts,
    alpha, beta, mix, scale, block_size, seed, dropout_p, tile_tokens, T, S, SH,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd, stride_dkb, stride_dkh, stride_dkt, stride_dkd,
    stride_dvb, stride_dvh, stride_dvt, stride_dvd, stride_mb, stride_mh, stride_mt, stride_md,
    R: tl.constexpr, KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr, BJ: tl.constexpr,
    HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr, ALPHA_GRAD: tl.constexpr,
    BETA_GRAD: tl.constexpr, EVEN: tl.constexpr, QUIET: tl.constexpr, ONE_BLOCK: tl.constexpr,
    MIX: tl.constexpr, MIX_GRAD: tl.constexpr, HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, SHIFTED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One (sample, summary head): over the queries for dC and dL, then over the keys."""
    index = tl.program_id(0).to(tl.int64)
    batch, head = index // SH, index % SH
    key_head = head // KG
    first_query = head * R
    begin, keys = locate(p_starts, batch, S, PACKED)
    queries = keys if PACKED else T
    q = rows_of(p_q, batch, first_query, begin, stride_qb, stride_qh, stride_qt, stride_qd)
    gradients = rows_of(p_g, batch, first_query, begin, stride_gb, stride_gh, stride_gt, stride_gd)
    dq = rows_of(p_dq, batch, first_query, begin, stride_dqb, stride_dqh, stride_dqt, stride_dqd)
    mixes = rows_of(p_m, batch, first_query, begin, stride_mb, stride_mh, stride_mt, stride_md)
    p_mask += batch * S
    b_log_mass, b_c = load_summary(p_log_mass, p_centroid, index, D, E, BD, BE)
    b_dc = tl.zeros([BE, BD], tl.float32)
    b_gather = tl.zeros([BQ, BD], tl.float32)
    for r in range(R):
        own = tl.cast(r, tl.int64)
        b_dc, b_gather, b_dalpha = query_grad_range(
            heads_on(q, own), heads_on(gradients, own), heads_on(dq, own), heads_on(mixes, own),
            p_mask, 0, queries, load_scale(p_alpha, alpha, index * R + r, HAS_ALPHA),
            b_log_mass, b_c, b_dc, b_gather, mix,
            D, E, BD, BE, BQ, EVEN, QUIET, MIX, False, ALPHA_GRAD, PRECISION, STAGES,
        )  # fmt: skip
        if ALPHA_GRAD:
            tl.store(p_dalpha + index * R + r, b_dalpha)
    b_dc_low = b_dc.to(b_c.dtype)
    b_shift = tl.sum(b_gather, 0)
    k = rows_of(p_k, batch, key_head, begin, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, key_head, begin, stride_vb, stride_vh, stride_vt, stride_vd)
    dk = rows_of(p_dk, batch, head, begin, stride_dkb, stride_dkh, stride_dkt, stride_dkd)
    dv = rows_of(p_dv, batch, head, begin, stride_dvb, stride_dvh, stride_dvt, stride_dvd)
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    drop_first = (batch * (SH // KG) + key_head) * S
    MIX_STEP: tl.constexpr = E if MIX_GRAD == 2 else 1
    if MIX > 0:
        gap = gap_before(p_starts, batch, SHIFTED)
        b_dbeta, b_residue, b_centre, b_dmix = joint_grad_range(
            q, k, v, gradients, dq, dk, dv, mixes,
            p_dmix + mix_rows(index, first_query, begin, T, R, PACKED) * MIX_STEP,
            p_mask, p_alpha, -gap, keys, alpha, beta_here, b_log_mass, b_c, b_dc_low, b_shift,
            tl.zeros([BE], tl.float32), index * R, mix, scale, block_size,
            seed, drop_first, dropout_p, tile_tokens, T,
            R, D, E, BD, BE, BJ, EVEN, QUIET, ONE_BLOCK, HAS_ALPHA, MIX, MIX_GRAD, False,
            HAS_MASK, HAS_DROPOUT, BETA_GRAD, PRECISION, STAGES,
        )  # fmt: skip
        if MIX_GRAD == 3:
            columns = tl.arange(0, BE)
            tl.store(p_dmix + index * E + columns, b_dmix, mask=columns < E)
    else:
        b_dbeta, b_residue, b_centre = key_grad_range(
            k, v, dk, dv, p_mask, 0, keys, beta_here, b_log_mass, b_dc_low, b_shift,
            seed, drop_first, dropout_p,
            D, E, BD, BE, BK, EVEN, HAS_MASK, HAS_DROPOUT, BETA_GRAD, PRECISION, STAGES,
        )  # fmt: skip
    if BETA_GRAD:
        store_beta_grad(p_dbeta, index, b_dbeta, b_residue, b_centre)


@triton.jit
def query_bwd_kernel(
    p_q, p_g, p_dq, p_m, p_mask, p_alpha, p_dalpha, p_log_mass, p_centroid,
    p_shift_parts, p_dc_parts, p_starts, alpha, mix, program_tokens, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd, stride_mb, stride_mh, stride_mt, stride_md,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_ALPHA: tl.constexpr, ALPHA_GRAD: tl.constexpr, EVEN: tl.constexpr,
    QUIET: tl.constexpr, MIX: tl.constexpr, SPLIT: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One stretch of queries of one (sample, head): dq, and partial dCᵀ and shift in float32."""
    wait_for_launch(FOLLOWS)
    split, index, part = find_program()
    batch, head, begin, start, end = find_stretch(
        p_starts, split, index, program_tokens, T, H, PACKED, False
    )
    b_log_mass, b_c = load_summary(p_log_mass, p_centroid, index // R, D, E, BD, BE)
    b_dc, b_gather, b_dalpha = query_grad_range(
        rows_of(p_q, batch, head, begin, stride_qb, stride_qh, stride_qt, stride_qd),
        rows_of(p_g, batch, head, begin, stride_gb, stride_gh, stride_gt, stride_gd),
        rows_of(p_dq, batch, head, begin, stride_dqb, stride_dqh, stride_dqt, stride_dqd),
        rows_of(p_m, batch, head, begin, stride_mb, stride_mh, stride_mt, stride_md),
        p_mask + batch * T, start, end, load_scale(p_alpha, alpha, index, HAS_ALPHA),
        b_log_mass, b_c, tl.zeros([BE, BD], tl.float32), tl.zeros([BT, BD], tl.float32), mix,
        D, E, BD, BE, BT, EVEN, QUIET, MIX, SPLIT, ALPHA_GRAD, PRECISION, STAGES,
    )  # fmt: skip
    slots = tl.arange(0, BD)
    tl.store(p_shift_parts + part * BD + slots, tl.sum(b_gather, 0))
    p_out = p_dc_parts + part * BD * BE + tl.arange(0, BE)[:, None] * BD + slots[None, :]
    tl.store(p_out, b_dc)
    if ALPHA_GRAD:
        tl.store(p_dalpha + part, b_dalpha)


@triton.jit
def gather_parts(
    p_shift_parts, p_dc_parts, index, parts, rows, BD: tl.constexpr, BE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Shift ``[BD]`` and some channels of dCᵀ ``[ROWS, BD]``, their parts in a fixed order."""
    slots = tl.arange(0, BD)
    b_shift = tl.zeros([BD], tl.float32)
    b_dc = tl.zeros([ROWS, BD], tl.float32)
    for part in range(parts):
        place = index * parts + part
        b_shift += tl.load(p_shift_parts + place * BD + slots)
        b_dc += tl.load(p_dc_parts + place * BD * BE + rows[:, None] * BD + slots[None, :])
    return b_shift, b_dc


@triton.jit
def gather_kernel(
    p_shift_parts, p_dc_parts, p_shift, p_dc, parts,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    """Sum ROWS channels of the partial dCᵀ, and the partial shifts."""
    wait_for_launch(FOLLOWS)
    index = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slots = tl.arange(0, BD)
    b_shift, b_dc = gather_parts(p_shift_parts, p_dc_parts, index, parts, rows, BD, BE, ROWS)
    if tl.program_id(0) == 0:
        tl.store(p_shift + index * D + slots, b_shift, mask=slots < D)
    ok = (rows < E)[:, None] & (slots < D)[None, :]
    p_out = p_dc + index * D * E + rows[:, None] * D + slots[None, :]
    tl.store(p_out, b_dc.to(p_dc.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["seed"])
def key_bwd_kernel(
    p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_m, p_dmix, p_mask, p_alpha, p_beta, p_dbeta,
    p_log_mass, p_centroid, p_shift, p_dc, p_shift_parts, p_dc_parts, p_starts,
    alpha, beta, mix, scale, block_size, seed, dropout_p, tile_tokens, program_tokens, parts,
    T, S, SH,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd, stride_dkb, stride_dkh, stride_dkt, stride_dkd,
    stride_dvb, stride_dvh, stride_dvt, stride_dvd, stride_mb, stride_mh, stride_mt, stride_md,
    R: tl.constexpr, KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BT: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr,
    BETA_GRAD: tl.constexpr, EVEN: tl.constexpr, QUIET: tl.constexpr, ONE_BLOCK: tl.constexpr,
    MIX: tl.constexpr, MIX_GRAD: tl.constexpr, SPLIT: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PACKED: tl.constexpr, SHIFTED: tl.constexpr, FOLDS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One stretch of keys of one (sample, summary head): dk, dv, and with the diagonal dq.

    FOLDS: shift and dC come in parts, which every program sums up.
    """
    wait_for_launch(FOLLOWS)
    split, index, part = find_program()
    batch, head, begin, start, end = find_stretch(
        p_starts, split, index, program_tokens, S, SH, PACKED, SHIFTED
    )
    key_head, first_query = head // KG, head * R
    slots = tl.arange(0, BD)
    b_log_mass, b_c = load_summary(p_log_mass, p_centroid, index, D, E, BD, BE)
    channels = tl.arange(0, BE)
    if FOLDS:
        b_shift, b_wide = gather_parts(
            p_shift_parts, p_dc_parts, index, parts, channels, BD, BE, BE
        )
        b_dc = b_wide.to(p_dc.dtype.element_ty)
    else:
        b_dc = load_rows((p_dc + index * D * E, 0, D, 1), 0, channels < E, BE, D, BD, E == BE)
        b_shift = tl.load(p_shift + index * D + slots, mask=slots < D, other=0.0)
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    q = rows_of(p_q, batch, first_query, begin, stride_qb, stride_qh, stride_qt, stride_qd)
    gradients = rows_of(p_g, batch, first_query, begin, stride_gb, stride_gh, stride_gt, stride_gd)
    dq = rows_of(p_dq, batch, first_query, begin, stride_dqb, stride_dqh, stride_dqt, stride_dqd)
    mixes = rows_of(p_m, batch, first_query, begin, stride_mb, stride_mh, stride_mt, stride_md)
    k = rows_of(p_k, batch, key_head, begin, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, key_head, begin, stride_vb, stride_vh, stride_vt, stride_vd)
    dk = rows_of(p_dk, batch, head, begin, stride_dkb, stride_dkh, stride_dkt, stride_dkd)
    dv = rows_of(p_dv, batch, head, begin, stride_dvb, stride_dvh, stride_dvt, stride_dvd)
    p_mask += batch * S
    drop_first = (batch * (SH // KG) + key_head) * S
    MIX_STEP: tl.constexpr = E if MIX_GRAD == 2 else 1
    if MIX > 0:
        b_dbeta, b_residue, b_centre, b_dmix = joint_grad_range(
            q, k, v, gradients, dq, dk, dv, mixes,
            p_dmix + mix_rows(index, first_query, begin, T, R, PACKED) * MIX_STEP,
            p_mask, p_alpha, start, end, alpha, beta_here, b_log_mass, b_c, b_dc, b_shift,
            tl.zeros([BE], tl.float32), index * R, mix, scale, block_size,
            seed, drop_first, dropout_p, tile_tokens, T,
            R, D, E, BD, BE, BT, EVEN, QUIET, ONE_BLOCK, HAS_ALPHA, MIX, MIX_GRAD, SPLIT,
            HAS_MASK, HAS_DROPOUT, BETA_GRAD, PRECISION, STAGES,
        )  # fmt: skip
        if MIX_GRAD == 3:
            columns = tl.arange(0, BE)
            tl.store(p_dmix + part * E + columns, b_dmix, mask=columns < E)
    else:
        b_dbeta, b_residue, b_centre = key_grad_range(
            k, v, dk, dv, p_mask, start, end, beta_here, b_log_mass, b_dc, b_shift,
            seed, drop_first, dropout_p,
            D, E, BD, BE, BT, EVEN, HAS_MASK, HAS_DROPOUT, BETA_GRAD, PRECISION, STAGES,
        )  # fmt: skip
    if BETA_GRAD and not SPLIT:
        store_beta_grad(p_dbeta, part, b_dbeta, b_residue, b_centre)
