"""The forward walk: outputs of a stretch, and whether any of its rows was lost.

With S, n, m and r of `lln.kernels.triton.causal_walks.tiles`:

    out_i = (Σ_j S_ij v_j + Σ_f e^{x_if + m_f − r_i} sum_f) / n_i
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.causal_walks.states import load_state
from lln.kernels.triton.causal_walks.tiles import (
    any_lost,
    load_tile,
    query_exponents,
    take_tile,
    weigh_rows,
)
from lln.kernels.triton.mixing import row_weights
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
)


@triton.jit(do_not_specialize=["seed"])
def causal_fwd_kernel(
    p_q, p_k, p_v, p_o, p_mix, p_mask, p_alpha, p_beta, p_bounds, p_peak, p_mass, p_sum, p_lost,
    alpha, beta, mix, scale, block_size, seed, dropout_p, tile_tokens, program_tokens, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_ob, stride_oh, stride_ot, stride_od,
    stride_mb, stride_mh, stride_mt, stride_me,
    KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr, HAS_STATE: tl.constexpr,
    QUIET: tl.constexpr, ONE_BLOCK: tl.constexpr, MIX: tl.constexpr, EVEN: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, PACKED: tl.constexpr,
    SHIFTED: tl.constexpr, EXACT: tl.constexpr, EXP: tl.constexpr, LOW: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One stretch of one (sample, query head): its outputs, and whether any row was lost."""
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
    p_o += batch * stride_ob + begin * stride_ot + head * stride_oh
    p_mix += batch * stride_mb + begin * stride_mt + head * stride_mh
    drop_first = (batch * (H // KG) + key_head) * T
    alpha_here = load_scale(p_alpha, alpha, index, HAS_ALPHA)
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    b_peak, b_mass, b_sum = load_state(p_peak, p_mass, p_sum, part, BD, BE, HAS_STATE)
    lost = 0
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
        b_x = query_exponents(b_q, alpha_here, D, BD)
        b_y = key_exponents(b_k, beta_here, ok, BD, EVEN)
        b_s, b_w, _, b_e, b_peak, b_mass, b_sum = weigh_rows(
            b_x, b_y, ok, inside, b_peak, b_mass, b_sum, p_q_tile, p_k_tile, stride_qt, stride_qd,
            stride_kt, stride_kd, alpha_here, beta_here,
            D, BT, EVEN, QUIET, EXACT, EXP, LOW, PRECISION,
        )  # fmt: skip
        b_norm = tl.sum(b_s, 1) + tl.sum(b_w * b_mass[None, :], 1)
        if not EXACT:
            lost = tl.maximum(lost, any_lost(b_norm, b_mass, inside, ok, HAS_MASK))
        if HAS_MASK:
            b_norm = tl.where(b_norm == 0, 1.0, b_norm)
        b_o = tl.dot(b_w.to(LOW), b_sum.to(LOW), input_precision=PRECISION)
        b_o = tl.dot(b_s.to(LOW), b_v.to(LOW), b_o, input_precision=PRECISION)
        b_peak, b_mass, b_sum = take_tile(
            b_peak, b_mass, b_sum, b_e, b_v, ok, EVEN, EXACT, LOW, PRECISION
        )
        if MIX > 0:
            b_p, b_total = block_softmax(
                b_q, b_k, scale, ok, block_size, BT, EVEN, ONE_BLOCK, True, PRECISION
            )
            b_d = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
            if MIX == 3:
                p_m = p_mix + offset * stride_mt
                b_mix = load_rows(p_m, stride_mt, stride_me, inside, BT, E, BE, EVEN)
                b_mix = b_mix.to(tl.float32)
                b_o = b_o * b_mix / b_norm[:, None] + b_d * (1.0 - b_mix) / b_total[:, None]
            else:
                b_row = row_weights(p_mix, mix, offset, stride_mt, inside, BT, MIX)
                b_o = b_o * (b_row / b_norm)[:, None] + b_d * ((1.0 - b_row) / b_total)[:, None]
        else:
            b_o = b_o / b_norm[:, None]
        store_rows(p_o + offset * stride_ot, b_o, stride_ot, stride_od, inside, BT, E, BE, EVEN)
    if not EXACT:
        tl.store(p_lost + part, lost)
