"""Backward kernels, from q, k, v, the summary (L, C) and dO; nothing else of size N was saved.

With A the softmax over the slots, B the softmax over the tokens and G = dO (docs/method.md):

    dA = G Cᵀ,  g = A∘(dA − rowsum(A∘dA)),  dq = α g,  dL = Σ_i g_i,  dC = Aᵀ G
    dv = Bᵀ dC,  dk = β B∘(v dCᵀ − C·dC + dL)

*Short*: one program a (sample, head) runs over the queries, keeps dC and dL on the chip, then runs
over the keys. *Long*: a pass over the queries leaves partial dC, dL, which are summed once, and a
second pass goes over the keys. With the diagonal part the first pass only gathers dC and dL, and
the second reads q, k, v, dO of a tile together and writes all three gradients.

Dimension legend: see `lln.kernels.steps`; SH summary heads, R query heads a summary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.steps import (
    LOG2E,
    NEVER,
    block_softmax,
    drop_factor,
    hide_rows,
    load_rows,
    load_scale,
    slot_softmax,
    store_rows,
    token_ok,
)


@triton.jit
def weigh_gradient(
    b_do, p_mix, mix, offset, stride_mt, stride_me, inside,
    BT: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    HAS_DIAG: tl.constexpr, HAS_MIX: tl.constexpr,
):  # fmt: skip
    """The parts of dO that go to LLN and to the diagonal, and the mix."""
    b_mix = mix
    if HAS_MIX:
        p_m = p_mix + offset * stride_mt
        b_mix = load_rows(p_m, stride_mt, stride_me, inside, BT, E, BE).to(tl.float32)
    if HAS_DIAG:
        b_wide = b_do.to(tl.float32)
        b_long = (b_wide * b_mix).to(b_do.dtype)
        b_short = (b_wide * (1.0 - b_mix)).to(b_do.dtype)
    else:
        b_long, b_short = b_do, b_do
    return b_long, b_short, b_mix


@triton.jit
def query_grad_range(
    p_q, p_do, p_dq, p_mix, start, end, alpha, b_log2_mass, b_c, b_dc, b_dl, b_dalpha, mix,
    stride_qt, stride_qd, stride_gt, stride_gd, stride_dqt, stride_dqd, stride_mt, stride_me,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
    HAS_DIAG: tl.constexpr, HAS_MIX: tl.constexpr, ALPHA_GRAD: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add the queries ``start … end − 1`` to dC, dL and dα; write dq unless the diagonal will."""
    for first in tl.range(start, end, BT, num_stages=STAGES):
        inside = first + tl.arange(0, BT) < end
        offset = tl.cast(first, tl.int64)
        b_q = load_rows(p_q + offset * stride_qt, stride_qt, stride_qd, inside, BT, D, BD)
        b_do = load_rows(p_do + offset * stride_gt, stride_gt, stride_gd, inside, BT, E, BE)
        b_long, _, _ = weigh_gradient(
            b_do, p_mix, mix, offset, stride_mt, stride_me, inside, BT, E, BE, HAS_DIAG, HAS_MIX
        )
        b_e, b_norm = slot_softmax(b_q, alpha, b_log2_mass, D, BD)
        b_a = b_e / b_norm[:, None]
        b_da = tl.dot(b_long, tl.trans(b_c), input_precision=PRECISION)
        b_g = b_a * (b_da - tl.sum(b_a * b_da, 1)[:, None])
        b_dc += tl.dot(tl.trans(b_a.to(b_long.dtype)), b_long, input_precision=PRECISION)
        b_dl += tl.sum(b_g, 0)
        if ALPHA_GRAD:
            b_dalpha += tl.sum(b_g * b_q.to(tl.float32))
        if not HAS_DIAG:
            p_out = p_dq + offset * stride_dqt
            store_rows(p_out, b_g * alpha, stride_dqt, stride_dqd, inside, BT, D, BD)
    return b_dc, b_dl, b_dalpha


@triton.jit
def token_weights(b_k, beta, b_log2_mass, ok):
    """Rows of Bᵀ ``[BT, BD]``: how much of every slot a token is."""
    b_x = tl.where(ok[:, None], b_k.to(tl.float32) * (beta * LOG2E), NEVER)
    b_b = tl.exp2(b_x - b_log2_mass[None, :])
    return tl.where(ok[:, None], b_b, 0.0)


@triton.jit
def key_grad_range(
    p_k, p_v, p_dk, p_dv, p_mask, start, end, beta, b_log2_mass, b_dc, b_shift, b_dbeta,
    stride_kt, stride_kd, stride_vt, stride_vd, stride_dkt, stride_dkd, stride_dvt, stride_dvd,
    seed, drop_first, dropout_p,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, BETA_GRAD: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of the tokens ``start … end − 1`` and add to dβ."""
    for first in tl.range(start, end, BT, num_stages=STAGES):
        inside = first + tl.arange(0, BT) < end
        ok = token_ok(p_mask, first, end, BT, HAS_MASK)
        offset = tl.cast(first, tl.int64)
        b_k = load_rows(p_k + offset * stride_kt, stride_kt, stride_kd, inside, BT, D, BD)
        b_v = load_rows(p_v + offset * stride_vt, stride_vt, stride_vd, inside, BT, E, BE)
        if HAS_MASK:
            b_k, b_v = hide_rows(b_k, ok), hide_rows(b_v, ok)
        b_b = token_weights(b_k, beta, b_log2_mass, ok)
        b_dv = tl.dot(b_b.to(b_v.dtype), b_dc, input_precision=PRECISION)
        if HAS_DROPOUT:
            b_factor = drop_factor(seed, drop_first + first, dropout_p, BT)[:, None]
            b_v = (b_v.to(tl.float32) * b_factor).to(b_v.dtype)
            b_dv *= b_factor
        b_db = tl.dot(b_v, tl.trans(b_dc), input_precision=PRECISION)
        b_g = b_b * (b_db + b_shift[None, :])
        if BETA_GRAD:
            b_dbeta += tl.sum(b_g * b_k.to(tl.float32))
        p_out = p_dk + offset * stride_dkt
        store_rows(p_out, b_g * beta, stride_dkt, stride_dkd, inside, BT, D, BD)
        p_out = p_dv + offset * stride_dvt
        store_rows(p_out, b_dv, stride_dvt, stride_dvd, inside, BT, E, BE)
    return b_dbeta


@triton.jit
def joint_grad_range(
    p_q, p_k, p_v, p_do, p_dq, p_dk, p_dv, p_mix, p_dmix, p_mask, p_alpha, start, end, alpha, beta,
    b_log2_mass, b_c, b_dc, b_shift, b_dbeta, b_dmix, query_index, mix, scale, block_size,
    stride_qh, stride_qt, stride_qd, stride_kt, stride_kd, stride_vt, stride_vd,
    stride_gh, stride_gt, stride_gd, stride_dqh, stride_dqt, stride_dqd,
    stride_dkt, stride_dkd, stride_dvt, stride_dvd, stride_mh, stride_mt, stride_me,
    seed, drop_first, dropout_p, tile_tokens, T,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_MIX: tl.constexpr, MIX_GRAD: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, CAUSAL: tl.constexpr,
    BETA_GRAD: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All gradients of the tokens ``start … end − 1`` of LLN + diagonal, for R query heads.

    MIX_GRAD: 0 none, 1 a value a token, 2 a value a token and channel, 3 a value a channel (R = 1).
    """
    for first in tl.range(start, end, tile_tokens, num_stages=STAGES):
        last = tl.minimum(first + tile_tokens, end)
        inside = first + tl.arange(0, BT) < last
        ok = token_ok(p_mask, first, last, BT, HAS_MASK)
        offset = tl.cast(first, tl.int64)
        b_k = load_rows(p_k + offset * stride_kt, stride_kt, stride_kd, inside, BT, D, BD)
        b_v = load_rows(p_v + offset * stride_vt, stride_vt, stride_vd, inside, BT, E, BE)
        if HAS_MASK:
            b_k, b_v = hide_rows(b_k, ok), hide_rows(b_v, ok)
        b_b = token_weights(b_k, beta, b_log2_mass, ok)
        b_dv = tl.dot(b_b.to(b_v.dtype), b_dc, input_precision=PRECISION)
        if HAS_DROPOUT:
            b_factor = drop_factor(seed, drop_first + first, dropout_p, BT)[:, None]
            b_v = (b_v.to(tl.float32) * b_factor).to(b_v.dtype)
        b_db = tl.dot(b_v, tl.trans(b_dc), input_precision=PRECISION)
        b_g = b_b * (b_db + b_shift[None, :])
        if BETA_GRAD:
            b_dbeta += tl.sum(b_g * b_k.to(tl.float32))
        b_dk = b_g * beta
        for r in tl.static_range(R):
            p_row = p_q + r * stride_qh + offset * stride_qt
            b_q = load_rows(p_row, stride_qt, stride_qd, inside, BT, D, BD)
            p_row = p_do + r * stride_gh + offset * stride_gt
            b_do = load_rows(p_row, stride_gt, stride_gd, inside, BT, E, BE)
            b_long, b_short, b_mix = weigh_gradient(
                b_do, p_mix + r * stride_mh, mix, offset, stride_mt, stride_me, inside,
                BT, E, BE, True, HAS_MIX,
            )  # fmt: skip
            alpha_here = load_scale(p_alpha, alpha, query_index + r, HAS_ALPHA)
            b_e, b_norm = slot_softmax(b_q, alpha_here, b_log2_mass, D, BD)
            b_a = b_e / b_norm[:, None]
            b_da = tl.dot(b_long, tl.trans(b_c), input_precision=PRECISION)
            b_dq = alpha_here * (b_a * (b_da - tl.sum(b_a * b_da, 1)[:, None]))
            b_p, b_sum = block_softmax(
                b_q, b_k, scale, first, ok, block_size, BT, CAUSAL, PRECISION
            )
            b_p = b_p / b_sum[:, None]
            b_dp = tl.dot(b_short, tl.trans(b_v), input_precision=PRECISION)
            b_ds = b_p * (b_dp - tl.sum(b_p * b_dp, 1)[:, None]) * scale
            b_ds_low = b_ds.to(b_q.dtype)
            b_dq += tl.dot(b_ds_low, b_k, input_precision=PRECISION)
            b_dk += tl.dot(tl.trans(b_ds_low), b_q, input_precision=PRECISION)
            b_dv += tl.dot(tl.trans(b_p.to(b_short.dtype)), b_short, input_precision=PRECISION)
            if MIX_GRAD > 0:
                b_long_out = tl.dot(b_a.to(b_c.dtype), b_c, input_precision=PRECISION)
                b_short_out = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
                b_dm = b_do.to(tl.float32) * (b_long_out - b_short_out)
                if MIX_GRAD == 1:
                    rows = first + tl.arange(0, BT)
                    tl.store(p_dmix + r * T + rows, tl.sum(b_dm, 1), mask=inside)
                elif MIX_GRAD == 2:
                    p_out = p_dmix + (tl.cast(r, tl.int64) * T + offset) * E
                    store_rows(p_out, b_dm, E, 1, inside, BT, E, BE)
                else:
                    b_dmix += tl.sum(b_dm, 0)
            p_out = p_dq + r * stride_dqh + offset * stride_dqt
            store_rows(p_out, b_dq, stride_dqt, stride_dqd, inside, BT, D, BD)
        if HAS_MASK:
            b_dk, b_dv = hide_rows(b_dk, ok), hide_rows(b_dv, ok)
        if HAS_DROPOUT:
            b_dv *= b_factor
        p_out = p_dk + offset * stride_dkt
        store_rows(p_out, b_dk, stride_dkt, stride_dkd, inside, BT, D, BD)
        p_out = p_dv + offset * stride_dvt
        store_rows(p_out, b_dv, stride_dvt, stride_dvd, inside, BT, E, BE)
    return b_dbeta, b_dmix


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
    """Log-mass in base 2 ``[BD]`` and centroids ``[BD, BE]``."""
    slots = tl.arange(0, BD)
    # Padding slots get a huge mass, so that no token weighs anything in them.
    b_log2_mass = tl.load(p_log_mass + index * D + slots, mask=slots < D, other=1e30) * LOG2E
    return b_log2_mass, load_rows(p_centroid + index * D * E, E, 1, slots < D, BD, E, BE)


@triton.jit
def short_bwd_kernel(
    p_q, p_k, p_v, p_do, p_dq, p_dk, p_dv, p_mix, p_dmix, p_mask, p_alpha, p_beta,
    p_dalpha, p_dbeta, p_log_mass, p_centroid,
    alpha, beta, mix, scale, block_size, seed, dropout_p, tile_tokens, T, S, SH,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd, stride_dkb, stride_dkh, stride_dkt, stride_dkd,
    stride_dvb, stride_dvh, stride_dvt, stride_dvd, stride_mb, stride_mh, stride_mt, stride_me,
    R: tl.constexpr, KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr, BJ: tl.constexpr,
    HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr, ALPHA_GRAD: tl.constexpr,
    BETA_GRAD: tl.constexpr, HAS_DIAG: tl.constexpr, HAS_MIX: tl.constexpr,
    MIX_GRAD: tl.constexpr, HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One (sample, summary head): over the queries for dC and dL, then over the keys."""
    index = tl.program_id(0).to(tl.int64)
    batch, head = index // SH, index % SH
    key_head = head // KG
    first_query = head * R
    p_q += batch * stride_qb + first_query * stride_qh
    p_do += batch * stride_gb + first_query * stride_gh
    p_dq += batch * stride_dqb + first_query * stride_dqh
    p_mix += batch * stride_mb + first_query * stride_mh
    b_log2_mass, b_c = load_summary(p_log_mass, p_centroid, index, D, E, BD, BE)
    b_dc = tl.zeros([BD, BE], tl.float32)
    b_dl = tl.zeros([BD], tl.float32)
    for r in range(R):
        b_dc, b_dl, b_dalpha = query_grad_range(
            p_q + r * stride_qh, p_do + r * stride_gh, p_dq + r * stride_dqh, p_mix + r * stride_mh,
            0, T, load_scale(p_alpha, alpha, index * R + r, HAS_ALPHA), b_log2_mass, b_c,
            b_dc, b_dl, 0.0, mix, stride_qt, stride_qd, stride_gt, stride_gd,
            stride_dqt, stride_dqd, stride_mt, stride_me,
            D, E, BD, BE, BQ, HAS_DIAG, HAS_MIX, ALPHA_GRAD, PRECISION, STAGES,
        )  # fmt: skip
        if ALPHA_GRAD:
            tl.store(p_dalpha + index * R + r, b_dalpha)
    b_dc_low = b_dc.to(b_c.dtype)
    # From the rounded dC, as the keys will see it, so that the rounding cancels in dk.
    b_shift = b_dl - tl.sum(b_c.to(tl.float32) * b_dc_low.to(tl.float32), 1)
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    p_k += batch * stride_kb + key_head * stride_kh
    p_v += batch * stride_vb + key_head * stride_vh
    p_dk += batch * stride_dkb + head * stride_dkh
    p_dv += batch * stride_dvb + head * stride_dvh
    p_mask += batch * S
    drop_first = (batch * (SH // KG) + key_head) * S
    if HAS_DIAG:
        b_dbeta, b_dmix = joint_grad_range(
            p_q, p_k, p_v, p_do, p_dq, p_dk, p_dv, p_mix,
            p_dmix + index * R * T * (E if MIX_GRAD == 2 else 1),
            p_mask, p_alpha, 0, S, alpha, beta_here, b_log2_mass, b_c, b_dc_low, b_shift, 0.0,
            tl.zeros([BE], tl.float32), index * R, mix, scale, block_size,
            stride_qh, stride_qt, stride_qd, stride_kt, stride_kd, stride_vt, stride_vd,
            stride_gh, stride_gt, stride_gd, stride_dqh, stride_dqt, stride_dqd,
            stride_dkt, stride_dkd, stride_dvt, stride_dvd, stride_mh, stride_mt, stride_me,
            seed, drop_first, dropout_p, tile_tokens, T,
            R, D, E, BD, BE, BJ, HAS_ALPHA, HAS_MIX, MIX_GRAD, HAS_MASK, HAS_DROPOUT, CAUSAL,
            BETA_GRAD, PRECISION, STAGES,
        )  # fmt: skip
        if MIX_GRAD == 3:
            columns = tl.arange(0, BE)
            tl.store(p_dmix + index * E + columns, b_dmix, mask=columns < E)
    else:
        b_dbeta = key_grad_range(
            p_k, p_v, p_dk, p_dv, p_mask, 0, S, beta_here, b_log2_mass, b_dc_low, b_shift, 0.0,
            stride_kt, stride_kd, stride_vt, stride_vd, stride_dkt, stride_dkd,
            stride_dvt, stride_dvd, seed, drop_first, dropout_p,
            D, E, BD, BE, BK, HAS_MASK, HAS_DROPOUT, BETA_GRAD, PRECISION, STAGES,
        )  # fmt: skip
    if BETA_GRAD:
        tl.store(p_dbeta + index, b_dbeta)


@triton.jit
def query_bwd_kernel(
    p_q, p_do, p_dq, p_mix, p_alpha, p_dalpha, p_log_mass, p_centroid, p_dl, p_dc,
    alpha, mix, program_tokens, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd, stride_mb, stride_mh, stride_mt, stride_me,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_ALPHA: tl.constexpr, ALPHA_GRAD: tl.constexpr, HAS_DIAG: tl.constexpr,
    HAS_MIX: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One stretch of queries of one (sample, head): dq, and partial dC and dL in float32."""
    split, splits = tl.program_id(0), tl.num_programs(0)
    index = tl.program_id(1).to(tl.int64)
    batch, head = index // H, index % H
    b_log2_mass, b_c = load_summary(p_log_mass, p_centroid, index // R, D, E, BD, BE)
    start = split * program_tokens
    b_dc, b_dl, b_dalpha = query_grad_range(
        p_q + batch * stride_qb + head * stride_qh, p_do + batch * stride_gb + head * stride_gh,
        p_dq + batch * stride_dqb + head * stride_dqh, p_mix + batch * stride_mb + head * stride_mh,
        start, tl.minimum(start + program_tokens, T),
        load_scale(p_alpha, alpha, index, HAS_ALPHA), b_log2_mass, b_c,
        tl.zeros([BD, BE], tl.float32), tl.zeros([BD], tl.float32), 0.0, mix,
        stride_qt, stride_qd, stride_gt, stride_gd, stride_dqt, stride_dqd, stride_mt, stride_me,
        D, E, BD, BE, BT, HAS_DIAG, HAS_MIX, ALPHA_GRAD, PRECISION, STAGES,
    )  # fmt: skip
    part = index * splits + split
    slots = tl.arange(0, BD)
    tl.store(p_dl + part * BD + slots, b_dl)
    tl.store(p_dc + part * BD * BE + slots[:, None] * BE + tl.arange(0, BE)[None, :], b_dc)
    if ALPHA_GRAD:
        tl.store(p_dalpha + part, b_dalpha)


@triton.jit
def gather_kernel(
    p_dl_parts, p_dc_parts, p_centroid, p_shift, p_dc, parts,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum the partial dC and dL of ROWS slots in a fixed order; write dC and dL − C·dC."""
    index = tl.program_id(1).to(tl.int64)
    slots = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BE)
    b_dl = tl.zeros([ROWS], tl.float32)
    b_dc = tl.zeros([ROWS, BE], tl.float32)
    for part in range(parts):
        place = index * parts + part
        b_dl += tl.load(p_dl_parts + place * BD + slots)
        b_dc += tl.load(p_dc_parts + place * BD * BE + slots[:, None] * BE + columns[None, :])
    ok = (slots < D)[:, None] & (columns < E)[None, :]
    inner = slots[:, None] * E + columns[None, :]
    b_c = tl.load(p_centroid + index * D * E + inner, mask=ok, other=0.0)
    b_dc_low = b_dc.to(b_c.dtype)
    b_shift = b_dl - tl.sum(b_c.to(tl.float32) * b_dc_low.to(tl.float32), 1)
    tl.store(p_shift + index * D + slots, b_shift, mask=slots < D)
    tl.store(p_dc + index * D * E + inner, b_dc_low, mask=ok)


@triton.jit
def key_bwd_kernel(
    p_q, p_k, p_v, p_do, p_dq, p_dk, p_dv, p_mix, p_dmix, p_mask, p_alpha, p_beta, p_dbeta,
    p_log_mass, p_centroid, p_shift, p_dc,
    alpha, beta, mix, scale, block_size, seed, dropout_p, tile_tokens, program_tokens, T, S, SH,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd, stride_dkb, stride_dkh, stride_dkt, stride_dkd,
    stride_dvb, stride_dvh, stride_dvt, stride_dvd, stride_mb, stride_mh, stride_mt, stride_me,
    R: tl.constexpr, KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BT: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr,
    BETA_GRAD: tl.constexpr, HAS_DIAG: tl.constexpr, HAS_MIX: tl.constexpr,
    MIX_GRAD: tl.constexpr, HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One stretch of keys of one (sample, summary head): dk, dv, and with the diagonal dq."""
    split, splits = tl.program_id(0), tl.num_programs(0)
    index = tl.program_id(1).to(tl.int64)
    batch, head = index // SH, index % SH
    key_head = head // KG
    first_query = head * R
    slots = tl.arange(0, BD)
    b_log2_mass, b_c = load_summary(p_log_mass, p_centroid, index, D, E, BD, BE)
    b_dc = load_rows(p_dc + index * D * E, E, 1, slots < D, BD, E, BE)
    b_shift = tl.load(p_shift + index * D + slots, mask=slots < D, other=0.0)
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    start = split * program_tokens
    end = tl.minimum(start + program_tokens, S)
    p_k += batch * stride_kb + key_head * stride_kh
    p_v += batch * stride_vb + key_head * stride_vh
    p_dk += batch * stride_dkb + head * stride_dkh
    p_dv += batch * stride_dvb + head * stride_dvh
    p_mask += batch * S
    drop_first = (batch * (SH // KG) + key_head) * S
    if HAS_DIAG:
        b_dbeta, b_dmix = joint_grad_range(
            p_q + batch * stride_qb + first_query * stride_qh, p_k, p_v,
            p_do + batch * stride_gb + first_query * stride_gh,
            p_dq + batch * stride_dqb + first_query * stride_dqh, p_dk, p_dv,
            p_mix + batch * stride_mb + first_query * stride_mh,
            p_dmix + index * R * T * (E if MIX_GRAD == 2 else 1),
            p_mask, p_alpha, start, end, alpha, beta_here, b_log2_mass, b_c, b_dc, b_shift, 0.0,
            tl.zeros([BE], tl.float32), index * R, mix, scale, block_size,
            stride_qh, stride_qt, stride_qd, stride_kt, stride_kd, stride_vt, stride_vd,
            stride_gh, stride_gt, stride_gd, stride_dqh, stride_dqt, stride_dqd,
            stride_dkt, stride_dkd, stride_dvt, stride_dvd, stride_mh, stride_mt, stride_me,
            seed, drop_first, dropout_p, tile_tokens, T,
            R, D, E, BD, BE, BT, HAS_ALPHA, HAS_MIX, MIX_GRAD, HAS_MASK, HAS_DROPOUT, CAUSAL,
            BETA_GRAD, PRECISION, STAGES,
        )  # fmt: skip
        if MIX_GRAD == 3:
            columns = tl.arange(0, BE)
            tl.store(p_dmix + (index * splits + split) * E + columns, b_dmix, mask=columns < E)
    else:
        b_dbeta = key_grad_range(
            p_k, p_v, p_dk, p_dv, p_mask, start, end, beta_here, b_log2_mass, b_dc, b_shift, 0.0,
            stride_kt, stride_kd, stride_vt, stride_vd, stride_dkt, stride_dkd,
            stride_dvt, stride_dvd, seed, drop_first, dropout_p,
            D, E, BD, BE, BT, HAS_MASK, HAS_DROPOUT, BETA_GRAD, PRECISION, STAGES,
        )  # fmt: skip
    if BETA_GRAD:
        tl.store(p_dbeta + index * splits + split, b_dbeta)
