"""The backward walk over the queries, forward over the tiles: dq.

With dP_ij = dO_i·v_j, it leaves for the walk over the keys what belongs to a row (S, n and r are
those of `lln.kernels.triton.causal_walks.tiles`):

    Z_i = r_i + log n_i,  δ_i = dO_i·out_i
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.causal_walks.exact import exact_products
from lln.kernels.triton.causal_walks.states import load_state
from lln.kernels.triton.causal_walks.tiles import (
    any_lost,
    load_tile,
    query_exponents,
    take_tile,
    weigh_rows,
)
from lln.kernels.triton.mixing import mix_rows, row_weights
from lln.kernels.triton.steps import (
    block_softmax,
    gap_before,
    key_exponents,
    load_rows,
    load_scale,
    locate,
    rows_inside,
    store_rows,
    token_ok,
    widen,
)

# Z of a row that no gradient passes through: every weight e^{x − Z} is then zero.
ALWAYS = tl.constexpr(1e30)


@triton.jit(do_not_specialize=["seed"])
def causal_query_kernel(
    p_q, p_k, p_v, p_do, p_dq, p_mix, p_dmix, p_mask, p_alpha, p_beta, p_dalpha, p_bounds,
    p_peak, p_mass, p_sum, p_lost, p_z, p_delta,
    alpha, beta, mix, scale, block_size, seed, dropout_p, tile_tokens, program_tokens, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd, stride_mb, stride_mh, stride_mt, stride_me,
    KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr, HAS_STATE: tl.constexpr,
    ALPHA_GRAD: tl.constexpr, MIX_GRAD: tl.constexpr, QUIET: tl.constexpr,
    ONE_BLOCK: tl.constexpr, MIX: tl.constexpr, EVEN: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PACKED: tl.constexpr, SHIFTED: tl.constexpr, EXACT: tl.constexpr,
    EXP: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One stretch of one (sample, query head), forward: dq, Z, δ, and parts of dα and dmix."""
    segment, segments = tl.program_id(0), tl.num_programs(0)
    index = tl.program_id(1).to(tl.int64)
    part = index * segments + segment
    if EXACT:  # noqa: SIM102 (EXACT is known when compiling)
        if tl.load(p_lost + part) == 0:
            return
    batch, head = index // H, index % H
    key_head = head // KG
    begin, tokens = locate(p_bounds, batch, T, PACKED)
    p_mask += batch * T
    start = segment * program_tokens - gap_before(p_bounds, batch, SHIFTED)
    end = tl.minimum(start + program_tokens, tokens)
    p_q += batch * stride_qb + begin * stride_qt + head * stride_qh
    p_k += batch * stride_kb + begin * stride_kt + key_head * stride_kh
    p_v += batch * stride_vb + begin * stride_vt + key_head * stride_vh
    p_do += batch * stride_gb + begin * stride_gt + head * stride_gh
    p_dq += batch * stride_dqb + begin * stride_dqt + head * stride_dqh
    p_mix += batch * stride_mb + begin * stride_mt + head * stride_mh
    place = mix_rows(index, head, begin, T, 1, PACKED)
    drop_first = (batch * (H // KG) + key_head) * T
    alpha_here = load_scale(p_alpha, alpha, index, HAS_ALPHA)
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    b_peak, b_mass, b_sum = load_state(p_peak, p_mass, p_sum, part, BD, BE, HAS_STATE)
    rows = tl.arange(0, BT)
    lost, dalpha = 0, 0.0
    b_dmix = tl.zeros([BE], tl.float32)
    for first in tl.range(start, end, tile_tokens, num_stages=STAGES):
        last = tl.minimum(first + tile_tokens, end)
        inside = rows_inside(first, last, BT, HAS_MASK)
        ok = token_ok(p_mask, first, last, BT, HAS_MASK)
        offset = tl.cast(first, tl.int64)
        p_q_tile, p_k_tile = p_q + offset * stride_qt, p_k + offset * stride_kt
        b_q, b_k, b_v, _ = load_tile(
            p_q_tile, p_k_tile, p_v + offset * stride_vt, stride_qt, stride_qd, stride_kt,
            stride_kd, stride_vt, stride_vd, inside, ok, seed, drop_first + first, dropout_p,
            D, E, BD, BE, BT, EVEN, QUIET, HAS_MASK, HAS_DROPOUT,
        )  # fmt: skip
        b_do = load_rows(p_do + offset * stride_gt, stride_gt, stride_gd, inside, BT, E, BE, EVEN)
        b_row = row_weights(p_mix, mix, offset, stride_mt, inside, BT, MIX)
        b_long, b_short, b_rest = b_do, b_do, 1.0 - b_row
        if MIX == 3:
            p_m = p_mix + offset * stride_mt
            b_mix = load_rows(p_m, stride_mt, stride_me, inside, BT, E, BE, EVEN).to(tl.float32)
            b_long = (b_do.to(tl.float32) * b_mix).to(b_do.dtype)
            b_short = (b_do.to(tl.float32) * (1.0 - b_mix)).to(b_do.dtype)
            b_rest = b_row
        b_x = query_exponents(b_q, alpha_here, D, BD)
        b_y = key_exponents(b_k, beta_here, ok, BD, EVEN)
        b_s, b_w, b_top, b_e, b_peak, b_mass, b_sum = weigh_rows(
            b_x, b_y, ok, inside, b_peak, b_mass, b_sum, p_q_tile, p_k_tile, stride_qt, stride_qd,
            stride_kt, stride_kd, alpha_here, beta_here,
            D, BT, EVEN, QUIET, EXACT, EXP, LOW, PRECISION,
        )  # fmt: skip
        b_norm = tl.sum(b_s, 1) + tl.sum(b_w * b_mass[None, :], 1)
        if not EXACT:
            lost = tl.maximum(lost, any_lost(b_norm, b_mass, inside, ok, HAS_MASK))
        blind = b_norm == 0
        b_norm = tl.where(blind, 1.0, b_norm)
        b_dp = tl.dot(b_long, tl.trans(b_v), input_precision=PRECISION)
        b_da = tl.dot(b_long.to(LOW), tl.trans(b_sum.to(LOW)), input_precision=PRECISION)
        b_delta = (tl.sum(b_s * b_dp, 1) + tl.sum(b_w * b_da, 1)) / b_norm
        tl.store(p_delta + place + first + rows, b_delta, mask=inside)
        b_z = tl.where(blind, ALWAYS, b_top + tl.log(b_norm).to(EXP))
        tl.store(p_z + place + first + rows, b_z, mask=inside)
        if MIX_GRAD > 1:
            b_far = tl.dot(b_s.to(LOW), b_v.to(LOW), input_precision=PRECISION)
            b_far = tl.dot(b_w.to(LOW), b_sum.to(LOW), b_far, input_precision=PRECISION)
            b_far = b_far / b_norm[:, None]
        b_share = b_row / b_norm
        b_g = (b_dp - b_delta[:, None]) * b_share[:, None]
        b_g = tl.where((rows[:, None] >= rows[None, :]) & ok[None, :], b_g, 0.0)
        b_dx = b_w * (b_da - b_delta[:, None] * b_mass[None, :]) * b_share[:, None]
        if EXACT:
            b_dx += exact_products(
                b_g, b_top, p_q_tile, p_k_tile, stride_qt, stride_qd, stride_kt, stride_kd,
                alpha_here, beta_here, inside, ok, 1, D, BD, BT, QUIET, EXP,
            )  # fmt: skip
        else:
            b_dx += b_w * tl.dot(b_g.to(LOW), b_e.to(LOW), input_precision=PRECISION)
        b_peak, b_mass, b_sum = take_tile(
            b_peak, b_mass, b_sum, b_e, b_v, ok, EVEN, EXACT, LOW, PRECISION
        )
        if ALPHA_GRAD:
            dalpha += tl.sum(tl.where(inside[:, None], b_dx * widen(b_q, BD), 0.0))
        b_dq = b_dx * alpha_here
        if MIX > 0:
            b_p, b_total = block_softmax(
                b_q, b_k, scale, ok, block_size, BT, EVEN, ONE_BLOCK, True, PRECISION
            )
            if MIX == 3:
                b_dp = tl.dot(b_short, tl.trans(b_v), input_precision=PRECISION)
            b_level = tl.sum(b_p * b_dp, 1) / b_total
            b_ds = b_p * (b_rest / b_total)[:, None] * (b_dp - b_level[:, None]) * scale
            b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
            if MIX_GRAD == 1:
                tl.store(p_dmix + place + first + rows, b_delta - b_level, mask=inside)
            elif MIX_GRAD > 1:
                b_near = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
                b_dm = (b_far - b_near / b_total[:, None]) * b_do.to(tl.float32)
                if MIX_GRAD == 2:
                    p_out = p_dmix + (place + offset) * E
                    store_rows(p_out, b_dm, E, 1, inside, BT, E, BE, EVEN)
                else:
                    b_dmix += tl.sum(tl.where(inside[:, None], b_dm, 0.0), 0)
        p_out = p_dq + offset * stride_dqt
        store_rows(p_out, b_dq, stride_dqt, stride_dqd, inside, BT, D, BD, EVEN)
    if ALPHA_GRAD:
        tl.store(p_dalpha + part, dalpha)
    if MIX_GRAD == 3:
        columns = tl.arange(0, BE)
        tl.store(p_dmix + part * E + columns, b_dmix, mask=columns < E)
    if not EXACT:
        tl.store(p_lost + part, lost)
