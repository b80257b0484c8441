"""The backward pass over the keys by chunks: dk and dv, with keys as rows of every product.

The equations are those of the walk (`lln.kernels.causal.triton_walk_keys`). The exponents of a
chunk are relative to the peaks of its stretch up to its end, which are no larger than those that
the outputs were relative to, so that none exceeds −log n_i.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.causal.triton_chunk_states import (
    find_chunk,
    key_weights,
    load_top,
    load_whole_state,
)
from lln.kernels.causal.triton_walk_states import load_levels
from lln.kernels.causal.triton_walk_tiles import query_exponents
from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import (
    exponential,
    load_rows,
    load_scale,
    rows_inside,
    rows_of,
    store_rows,
)
from lln.kernels.summaries.triton_mixing import load_gradient


@triton.jit
def chunk_key_kernel(
    p_q, p_k, p_v, p_g, p_dk, p_dv, p_m, p_alpha, p_beta, p_peak, p_mass, p_sum,
    p_chunk_peak, p_chunk_mass, p_chunk_sum, p_chunk_top, p_z, p_delta, p_near, p_level,
    alpha, beta, mix, scale, block_size, program_tokens, segments, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dkb, stride_dkh, stride_dkt, stride_dkd, stride_dvb, stride_dvh, stride_dvt, stride_dvd,
    stride_mb, stride_mh, stride_mt, stride_md,
    KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr, HAS_STATE: tl.constexpr,
    ONE_BLOCK: tl.constexpr, MIX: tl.constexpr, EVEN: tl.constexpr, EXP: tl.constexpr,
    LOW: tl.constexpr, PRECISION: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One chunk of one (sample, query head): dk and dv."""
    wait_for_launch(FOLLOWS)
    chunk, index, batch, head, first, place, part = find_chunk(
        program_tokens, segments, H, BT, True
    )
    q = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, head // KG, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, head // KG, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    gradients = rows_of(p_g, batch, head, 0, stride_gb, stride_gh, stride_gt, stride_gd)
    dk = rows_of(p_dk, batch, head, 0, stride_dkb, stride_dkh, stride_dkt, stride_dkd)
    dv = rows_of(p_dv, batch, head, 0, stride_dvb, stride_dvh, stride_dvt, stride_dvd)
    mixes = rows_of(p_m, batch, head, 0, stride_mb, stride_mh, stride_mt, stride_md)
    alpha_here = load_scale(p_alpha, alpha, index, HAS_ALPHA)
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    rows = tl.arange(0, BT)
    inside = rows_inside(first, T, BT, False)
    b_q = load_rows(q, first, inside, BT, D, BD, EVEN)
    b_k = load_rows(k, first, inside, BT, D, BD, EVEN)
    b_v = load_rows(v, first, inside, BT, E, BE, EVEN)
    _, b_do, b_short, b_row, b_rest = load_gradient(
        gradients, mixes, mix, first, inside, E, BE, BT, MIX, EVEN
    )
    b_z, b_delta = load_levels(p_z + index * T, p_delta + index * T, first, inside, BT)
    b_top = load_top(p_chunk_top, place, p_peak, part, BD, False)
    b_h = query_exponents(b_q.to(tl.float32), alpha_here, D, BD).to(EXP) - b_z[:, None]
    b_f = exponential((b_h + b_top[None, :].to(EXP)).to(tl.float32)).to(LOW)
    b_e = key_weights(b_k, beta_here, inside, b_top, BD, EVEN)
    # Row j, column i: what row i has of key j.
    seen = rows[:, None] <= rows[None, :]
    b_s = tl.dot(b_e.to(LOW), tl.trans(b_f), input_precision=PRECISION) * b_row[None, :]
    b_s = tl.where(seen, b_s, 0.0)
    b_dv = tl.dot(b_s.to(LOW), b_do.to(LOW), input_precision=PRECISION)
    b_peak, b_level, b_sum = load_whole_state(
        p_chunk_peak, p_chunk_mass, p_chunk_sum, place, chunk, tl.num_programs(0), program_tokens,
        p_peak, p_mass, p_sum, part, BD, BE, BT, True, HAS_STATE,
    )  # fmt: skip
    # e^{y + u} = e^{y − m} e^{m + u}; the guard bounds the second factor as it bounds 1 / n.
    b_grow = exponential(b_top + b_peak)
    b_w = (b_e * b_grow[None, :]).to(LOW)
    b_dv = tl.dot(b_w, b_sum.to(LOW), b_dv, input_precision=PRECISION)
    b_db = tl.dot(b_v.to(LOW), tl.trans(b_sum.to(LOW)), input_precision=PRECISION)
    b_db = (b_db - b_level[None, :]) * b_grow[None, :]
    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
    b_g = tl.where(seen, (b_dp - b_delta[None, :]) * b_row[None, :], 0.0)
    b_db = tl.dot(b_g.to(LOW), b_f, b_db, input_precision=PRECISION)
    b_dk = b_db * b_e * beta_here
    if MIX > 0:
        row = index * T + first + rows
        b_near = tl.load(p_near + row, mask=inside, other=0.0)
        b_own = tl.load(p_level + row, mask=inside, other=0.0)
        b_scores = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * scale
        b_p = exponential(b_scores - b_near[None, :])
        if not ONE_BLOCK:
            seen = seen & ((rows // block_size)[:, None] == (rows // block_size)[None, :])
        if not EVEN:
            seen = seen & inside[None, :]
        b_p = tl.where(seen, b_p * b_rest[None, :], 0.0)
        if MIX == 3:
            b_dp = tl.dot(b_v, tl.trans(b_short), input_precision=PRECISION)
        b_dv = tl.dot(b_p.to(b_short.dtype), b_short, b_dv, input_precision=PRECISION)
        b_ds = b_p * (b_dp - b_own[None, :]) * scale
        b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    store_rows(dk, first, b_dk, inside, BT, D, BD, EVEN)
    store_rows(dv, first, b_dv, inside, BT, E, BE, EVEN)
