"""The forward pass by chunks: every program computes the outputs of one chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.causal.triton_chunk_states import (
    find_chunk,
    key_weights,
    load_chunk_state,
    load_top,
    mark_lost,
    weigh_chunk,
)
from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import (
    block_softmax,
    exponential,
    load_rows,
    load_scale,
    rows_inside,
    rows_of,
    store_rows,
)
from lln.kernels.summaries.triton_mixing import mix_outputs
from lln.kernels.summaries.triton_summaries import load_partial


@triton.jit
def chunk_fwd_kernel(
    p_q, p_k, p_v, p_o, p_m, p_alpha, p_beta, p_peak, p_mass, p_sum,
    p_chunk_mass, p_chunk_sum, p_chunk_top, p_lost,
    alpha, beta, mix, scale, block_size, program_tokens, segments, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_ob, stride_oh, stride_ot, stride_od,
    stride_mb, stride_mh, stride_mt, stride_md,
    KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr, HAS_STATE: tl.constexpr,
    ONE_BLOCK: tl.constexpr, MIX: tl.constexpr, EVEN: tl.constexpr, EXP: tl.constexpr,
    LOW: tl.constexpr, PRECISION: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One chunk of one (sample, query head): its outputs, and whether any row is lost."""
    wait_for_launch(FOLLOWS)
    chunk, index, batch, head, first, place, part = find_chunk(
        program_tokens, segments, H, BT, True
    )
    q = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, head // KG, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, head // KG, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    o = rows_of(p_o, batch, head, 0, stride_ob, stride_oh, stride_ot, stride_od)
    mixes = rows_of(p_m, batch, head, 0, stride_mb, stride_mh, stride_mt, stride_md)
    alpha_here = load_scale(p_alpha, alpha, index, HAS_ALPHA)
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    inside = rows_inside(first, T, BT, False)
    b_q = load_rows(q, first, inside, BT, D, BD, EVEN)
    b_k = load_rows(k, first, inside, BT, D, BD, EVEN)
    b_v = load_rows(v, first, inside, BT, E, BE, EVEN)
    b_top = load_top(p_chunk_top, place, p_peak, part, BD, HAS_STATE)
    b_peak, b_mass, b_sum = load_chunk_state(
        p_chunk_top, p_chunk_mass, p_chunk_sum, place, chunk, tl.num_programs(0), program_tokens,
        BD, BE, BT, False,
    )  # fmt: skip
    b_shrink = exponential(b_peak - b_top)
    b_mass *= b_shrink
    if HAS_STATE:
        b_far, b_far_mass, b_far_sum = load_partial(
            p_peak, p_mass, p_sum, part, tl.arange(0, BD), BD, BE
        )
        b_far_shrink = exponential(b_far - b_top)
        b_mass += b_far_mass * b_far_shrink
    b_e = key_weights(b_k.to(tl.float32), beta_here, inside, b_top, BD, EVEN)
    b_s, b_w, _, b_norm = weigh_chunk(
        b_q.to(tl.float32), b_e, b_top, b_mass, alpha_here, D, BD, BT, EXP, LOW, PRECISION
    )
    mark_lost(p_lost, part, b_norm, inside, BT)
    b_o = tl.dot((b_w * b_shrink[None, :]).to(LOW), b_sum.to(LOW), input_precision=PRECISION)
    if HAS_STATE:
        b_w = (b_w * b_far_shrink[None, :]).to(LOW)
        b_o = tl.dot(b_w, b_far_sum.to(LOW), b_o, input_precision=PRECISION)
    b_o = tl.dot(b_s.to(LOW), b_v.to(LOW), b_o, input_precision=PRECISION)
    if MIX > 0:
        b_p, b_total = block_softmax(
            b_q, b_k, scale, inside, block_size, BT, EVEN, ONE_BLOCK, True, PRECISION
        )
        b_d = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
        b_o = mix_outputs(
            b_o, b_norm, b_d, b_total, mixes, mix, first, inside, E, BE, BT, MIX, EVEN
        )
    else:
        b_o = b_o / b_norm[:, None]
    store_rows(o, first, b_o, inside, BT, E, BE, EVEN)
