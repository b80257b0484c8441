"""The backward walk over the keys, backward over the tiles: dk and dv.

It updates the *gathered* state U, V of `gathering` on the way, and takes Z and δ from the walk over
the queries. With dP_ij = dO_i·v_j:

    dy_jf = Σ_i e^{x_if + y_jf − Z_i} (dP_ij − δ_i) + e^{y_jf} (v_j·U_f − V_f)

The exponents y_jf + x_if − Z_i are never positive. They are small differences of possibly large
numbers: float32 calls compute them in float64 (``EXP``), so that rounding Z costs no digits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.causal.triton_walk_exact import exact_products, exact_scores, exact_weights
from lln.kernels.causal.triton_walk_states import gather_tile, load_levels, load_state
from lln.kernels.causal.triton_walk_tiles import load_tile, query_exponents
from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import (
    block_softmax,
    exponential,
    find_program,
    find_stretch,
    hide_rows,
    key_exponents,
    load_scale,
    rows_inside,
    rows_of,
    store_rows,
    token_ok,
    widen,
)
from lln.kernels.summaries.triton_mixing import load_gradient, mix_rows


@triton.jit(do_not_specialize=["seed"])
def causal_key_kernel(
    p_q, p_k, p_v, p_g, p_dk, p_dv, p_m, p_mask, p_alpha, p_beta, p_dbeta, p_starts,
    p_peak, p_mass, p_sum, p_lost, p_z, p_delta,
    alpha, beta, mix, scale, block_size, seed, dropout_p, tile_tokens, program_tokens, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dkb, stride_dkh, stride_dkt, stride_dkd, stride_dvb, stride_dvh, stride_dvt, stride_dvd,
    stride_mb, stride_mh, stride_mt, stride_md,
    KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr, HAS_STATE: tl.constexpr,
    BETA_GRAD: tl.constexpr, QUIET: tl.constexpr, ONE_BLOCK: tl.constexpr, MIX: tl.constexpr,
    EVEN: tl.constexpr, HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, PACKED: tl.constexpr,
    SHIFTED: tl.constexpr, EXACT: tl.constexpr, EXP: tl.constexpr, LOW: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One stretch of one (sample, query head), backward over its tiles: dk, dv, part of dβ."""
    wait_for_launch(FOLLOWS)
    split, index, part = find_program()
    if EXACT:  # noqa: SIM102 (EXACT is known when compiling)
        if tl.load(p_lost + part) == 0:
            return
    batch, head, begin, start, end = find_stretch(
        p_starts, split, index, program_tokens, T, H, PACKED, SHIFTED
    )
    key_head = head // KG
    q = rows_of(p_q, batch, head, begin, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, key_head, begin, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, key_head, begin, stride_vb, stride_vh, stride_vt, stride_vd)
    gradients = rows_of(p_g, batch, head, begin, stride_gb, stride_gh, stride_gt, stride_gd)
    dk = rows_of(p_dk, batch, head, begin, stride_dkb, stride_dkh, stride_dkt, stride_dkd)
    dv = rows_of(p_dv, batch, head, begin, stride_dvb, stride_dvh, stride_dvt, stride_dvd)
    mixes = rows_of(p_m, batch, head, begin, stride_mb, stride_mh, stride_mt, stride_md)
    p_mask += batch * T
    place = mix_rows(index, head, begin, T, 1, PACKED)
    drop_first = (batch * (H // KG) + key_head) * T
    alpha_here = load_scale(p_alpha, alpha, index, HAS_ALPHA)
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    b_peak, b_level, b_sum = load_state(p_peak, p_mass, p_sum, part, BD, BE, HAS_STATE)
    rows = tl.arange(0, BT)
    dbeta = 0.0
    tiles = tl.cdiv(tl.maximum(end - start, 0), tile_tokens)
    for step in tl.range(0, tiles, num_stages=STAGES):
        first = start + (tiles - 1 - step) * tile_tokens
        last = tl.minimum(first + tile_tokens, end)
        inside = rows_inside(first, last, BT, HAS_MASK)
        ok = token_ok(p_mask, first, last, BT, HAS_MASK)
        seen = rows[:, None] >= rows[None, :]
        if not EVEN:
            seen = seen & ok[None, :]
        b_q, b_k, b_v, b_factor = load_tile(
            q, k, v, first, inside, ok, seed, drop_first, dropout_p,
            D, E, BD, BE, BT, EVEN, QUIET, HAS_MASK, HAS_DROPOUT,
        )  # fmt: skip
        _, b_do, b_short, b_row, b_rest = load_gradient(
            gradients, mixes, mix, first, inside, E, BE, BT, MIX, EVEN
        )
        b_z, b_delta = load_levels(p_z + place, p_delta + place, first, inside, BT)
        b_h = query_exponents(b_q, alpha_here, D, BD).to(EXP) - b_z[:, None]
        b_y = key_exponents(b_k, beta_here, ok, BD, EVEN)
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        b_g = tl.where(seen, (b_dp - b_delta[:, None]) * b_row[:, None], 0.0)
        if EXACT:
            b_log = exact_scores(q, k, first, alpha_here, beta_here, inside, ok, D, BT, QUIET, EXP)
            b_s = exact_weights(b_log, b_z)
            b_dy = exact_products(
                b_g, b_z, q, k, first, alpha_here, beta_here, inside, ok, 0, D, BD, BT, QUIET, EXP
            )
        else:
            # No exponent of a row exceeds −log n_i, which the guard bounds.
            b_top = tl.max(b_y, 0)
            b_f = exponential((b_h + b_top[None, :].to(EXP)).to(tl.float32))
            b_e = exponential(b_y - b_top[None, :])
            b_s = tl.dot(b_f.to(LOW), tl.trans(b_e.to(LOW)), input_precision=PRECISION)
            b_s = tl.where(seen, b_s, 0.0)
            b_dy = tl.dot(tl.trans(b_g.to(LOW)), b_f.to(LOW), input_precision=PRECISION) * b_e
        b_s = (b_s * b_row[:, None]).to(LOW)
        b_dv = tl.dot(tl.trans(b_s), b_do.to(LOW), input_precision=PRECISION)
        b_w = exponential(b_y + b_peak[None, :])
        if not EVEN:
            b_w = tl.where(ok[:, None], b_w, 0.0)
        b_dv = tl.dot(b_w.to(LOW), b_sum.to(LOW), b_dv, input_precision=PRECISION)
        b_db = tl.dot(b_v.to(LOW), tl.trans(b_sum.to(LOW)), input_precision=PRECISION)
        b_dy += b_w * (b_db - b_level[None, :])
        if BETA_GRAD:
            dbeta += tl.sum(tl.where(ok[:, None], b_dy * widen(b_k, BD), 0.0))
        b_dk = b_dy * beta_here
        b_peak, b_level, b_sum = gather_tile(
            b_peak, b_level, b_sum, b_h, b_do, b_delta, b_row, EXP, LOW, PRECISION
        )
        if MIX > 0:
            b_p, b_total = block_softmax(
                b_q, b_k, scale, ok, block_size, BT, EVEN, ONE_BLOCK, True, PRECISION
            )
            if MIX == 3:
                b_dp = tl.dot(b_short, tl.trans(b_v), input_precision=PRECISION)
            b_near = tl.sum(b_p * b_dp, 1) / b_total
            b_p = b_p * (b_rest / b_total)[:, None]
            if not EVEN:
                b_p = tl.where(inside[:, None], b_p, 0.0)
            b_ds = (b_p * (b_dp - b_near[:, None]) * scale).to(b_q.dtype)
            b_dk = tl.dot(tl.trans(b_ds), b_q, b_dk, input_precision=PRECISION)
            b_p_low = b_p.to(b_short.dtype)
            b_dv = tl.dot(tl.trans(b_p_low), b_short, b_dv, input_precision=PRECISION)
        if HAS_MASK:
            b_dk, b_dv = hide_rows(b_dk, ok), hide_rows(b_dv, ok)
        if HAS_DROPOUT:
            b_dv *= b_factor[:, None]
        store_rows(dk, first, b_dk, inside, BT, D, BD, EVEN)
        store_rows(dv, first, b_dv, inside, BT, E, BE, EVEN)
    if BETA_GRAD:
        tl.store(p_dbeta + part, dbeta)
