"""The backward pass over the queries by chunks: dq, and what the keys' pass needs of every row.

Z and δ as in the walk (`lln.kernels.causal.triton_walk_queries`); of the diagonal part the
logarithm of a row's normaliser and its δ.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.causal.triton_chunk_states import (
    find_chunk,
    key_weights,
    load_top,
    load_whole_state,
    mark_lost,
    weigh_chunk,
)
from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import (
    block_scores,
    exponential,
    load_rows,
    load_scale,
    rows_inside,
    rows_of,
    store_rows,
)
from lln.kernels.summaries.triton_mixing import load_gradient


@triton.jit
def chunk_query_kernel(
    p_q, p_k, p_v, p_g, p_dq, p_m, p_alpha, p_beta, p_peak, p_mass, p_sum,
    p_chunk_mass, p_chunk_sum, p_chunk_top, p_lost, p_z, p_delta, p_near, p_level,
    alpha, beta, mix, scale, block_size, program_tokens, segments, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd, stride_mb, stride_mh, stride_mt, stride_md,
    KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr, HAS_STATE: tl.constexpr,
    ONE_BLOCK: tl.constexpr, MIX: tl.constexpr, EVEN: tl.constexpr, EXP: tl.constexpr,
    LOW: tl.constexpr, PRECISION: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One chunk of one (sample, query head): dq, Z, δ, and whether any row is lost."""
    wait_for_launch(FOLLOWS)
    chunk, index, batch, head, first, place, part = find_chunk(
        program_tokens, segments, H, BT, False
    )
    q = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, head // KG, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, head // KG, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    gradients = rows_of(p_g, batch, head, 0, stride_gb, stride_gh, stride_gt, stride_gd)
    dq = rows_of(p_dq, batch, head, 0, stride_dqb, stride_dqh, stride_dqt, stride_dqd)
    mixes = rows_of(p_m, batch, head, 0, stride_mb, stride_mh, stride_mt, stride_md)
    alpha_here = load_scale(p_alpha, alpha, index, HAS_ALPHA)
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    rows = tl.arange(0, BT)
    inside = rows_inside(first, T, BT, False)
    row = index * T + first + rows
    b_q = load_rows(q, first, inside, BT, D, BD, EVEN)
    b_k = load_rows(k, first, inside, BT, D, BD, EVEN)
    b_v = load_rows(v, first, inside, BT, E, BE, EVEN)
    _, b_long, b_short, b_row, b_rest = load_gradient(
        gradients, mixes, mix, first, inside, E, BE, BT, MIX, EVEN
    )
    b_top = load_top(p_chunk_top, place, p_peak, part, BD, HAS_STATE)
    b_peak, b_mass, b_sum = load_whole_state(
        p_chunk_top, p_chunk_mass, p_chunk_sum, place, chunk, tl.num_programs(0), program_tokens,
        p_peak, p_mass, p_sum, part, BD, BE, BT, False, HAS_STATE,
    )  # fmt: skip
    b_shrink = exponential(b_peak - b_top)
    b_mass *= b_shrink
    b_e = key_weights(b_k.to(tl.float32), beta_here, inside, b_top, BD, EVEN)
    b_s, b_w, b_max, b_norm = weigh_chunk(
        b_q, b_e, b_top, b_mass, alpha_here, D, BD, BT, EXP, LOW, PRECISION
    )
    mark_lost(p_lost, part, b_norm, inside, BT)
    b_dp = tl.dot(b_long, tl.trans(b_v), input_precision=PRECISION)
    b_da = tl.dot(b_long.to(LOW), tl.trans(b_sum.to(LOW)), input_precision=PRECISION)
    b_da *= b_shrink[None, :]
    b_delta = (tl.sum(b_s * b_dp, 1) + tl.sum(b_w * b_da, 1)) / b_norm
    tl.store(p_delta + row, b_delta, mask=inside)
    tl.store(p_z + row, b_max + tl.log(b_norm).to(EXP), mask=inside)
    b_share = b_row / b_norm
    b_g = (b_dp - b_delta[:, None]) * b_share[:, None]
    b_g = tl.where(rows[:, None] >= rows[None, :], b_g, 0.0)
    b_dx = (b_da - b_delta[:, None] * b_mass[None, :]) * b_share[:, None]
    b_dx = tl.dot(b_g.to(LOW), b_e.to(LOW), b_dx, input_precision=PRECISION)
    b_dq = b_dx * b_w * alpha_here
    if MIX > 0:
        b_scores = block_scores(
            b_q, b_k, scale, inside, block_size, BT, EVEN, ONE_BLOCK, True, PRECISION
        )
        b_most = tl.max(b_scores, 1)
        b_p = exponential(b_scores - b_most[:, None])
        b_total = tl.sum(b_p, 1)
        if MIX == 3:
            b_dp = tl.dot(b_short, tl.trans(b_v), input_precision=PRECISION)
        b_level = tl.sum(b_p * b_dp, 1) / b_total
        b_ds = b_p * (b_rest * scale / b_total)[:, None] * (b_dp - b_level[:, None])
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
        tl.store(p_near + row, b_most + tl.log(b_total), mask=inside)
        tl.store(p_level + row, b_level, mask=inside)
    store_rows(dq, first, b_dq, inside, BT, D, BD, EVEN)
