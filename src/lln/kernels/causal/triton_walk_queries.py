"""The backward walk over the queries, forward over the tiles: dq.

With dP_ij = dO_i·v_j, it stores two numbers per row for the walk over the keys (n and r are those
of `lln.kernels.causal.triton_walk_tiles`):

    Z_i = r_i + log n_i,  δ_i = dO_i·out_i
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.causal.triton_walk_exact import exact_products
from lln.kernels.causal.triton_walk_states import ALWAYS, load_state
from lln.kernels.causal.triton_walk_tiles import any_lost, load_tile, take_tile, weigh_rows
from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import (
    block_softmax,
    find_program,
    find_stretch,
    load_scale,
    rows_inside,
    rows_of,
    store_rows,
    token_ok,
    widen,
)
from lln.kernels.summaries.triton_mixing import load_gradient, mix_rows


@triton.jit(do_not_specialize=["seed"])
def causal_query_kernel(
    p_q, p_k, p_v, p_g, p_dq, p_m, p_dmix, p_mask, p_alpha, p_beta, p_dalpha, p_starts,
    p_peak, p_mass, p_sum, p_lost, p_z, p_delta,
    alpha, beta, mix, scale, block_size, seed, dropout_p, tile_tokens, program_tokens, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd, stride_mb, stride_mh, stride_mt, stride_md,
    KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr, HAS_STATE: tl.constexpr,
    ALPHA_GRAD: tl.constexpr, MIX_GRAD: tl.constexpr, QUIET: tl.constexpr,
    ONE_BLOCK: tl.constexpr, MIX: tl.constexpr, EVEN: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PACKED: tl.constexpr, SHIFTED: tl.constexpr, EXACT: tl.constexpr,
    EXP: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One stretch of one (sample, query head), from its first tile: dq, Z, δ, parts of dα, dmix."""
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
    dq = rows_of(p_dq, batch, head, begin, stride_dqb, stride_dqh, stride_dqt, stride_dqd)
    mixes = rows_of(p_m, batch, head, begin, stride_mb, stride_mh, stride_mt, stride_md)
    p_mask += batch * T
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
        b_q, b_k, b_v, _ = load_tile(
            q, k, v, first, inside, ok, seed, drop_first, dropout_p,
            D, E, BD, BE, BT, EVEN, QUIET, HAS_MASK, HAS_DROPOUT,
        )  # fmt: skip
        b_do, b_long, b_short, b_row, b_rest = load_gradient(
            gradients, mixes, mix, first, inside, E, BE, BT, MIX, EVEN
        )
        b_s, b_w, b_top, b_norm, b_e, b_peak, b_mass, b_sum = weigh_rows(
            b_q, b_k, ok, inside, b_peak, b_mass, b_sum, q, k, first, alpha_here, beta_here,
            D, BD, BT, EVEN, QUIET, EXACT, EXP, LOW, PRECISION,
        )  # fmt: skip
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
                b_g, b_top, q, k, first, alpha_here, beta_here, inside, ok, 1,
                D, BD, BT, QUIET, EXP,
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
                    out = p_dmix + place * E, 0, E, 1
                    store_rows(out, first, b_dm, inside, BT, E, BE, EVEN)
                else:
                    b_dmix += tl.sum(tl.where(inside[:, None], b_dm, 0.0), 0)
        store_rows(dq, first, b_dq, inside, BT, D, BD, EVEN)
    if ALPHA_GRAD:
        tl.store(p_dalpha + part, dalpha)
    if MIX_GRAD == 3:
        columns = tl.arange(0, BE)
        tl.store(p_dmix + part * E + columns, b_dmix, mask=columns < E)
    if not EXACT:
        tl.store(p_lost + part, lost)
