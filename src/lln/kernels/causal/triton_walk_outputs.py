"""The forward walk: outputs of a stretch, and whether any of its rows was lost.

With S, n, m and r of `lln.kernels.causal.triton_walk_tiles`:

    out_i = (Σ_j S_ij v_j + Σ_f e^{x_if + m_f − r_i} sum_f) / n_i
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.causal.triton_walk_states import load_state
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
)
from lln.kernels.summaries.triton_mixing import mix_outputs


@triton.jit(do_not_specialize=["seed"])
def causal_fwd_kernel(
    p_q, p_k, p_v, p_o, p_m, p_mask, p_alpha, p_beta, p_starts, p_peak, p_mass, p_sum, p_lost,
    alpha, beta, mix, scale, block_size, seed, dropout_p, tile_tokens, program_tokens, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_ob, stride_oh, stride_ot, stride_od,
    stride_mb, stride_mh, stride_mt, stride_md,
    KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr, HAS_STATE: tl.constexpr,
    QUIET: tl.constexpr, ONE_BLOCK: tl.constexpr, MIX: tl.constexpr, EVEN: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, PACKED: tl.constexpr,
    SHIFTED: tl.constexpr, EXACT: tl.constexpr, EXP: tl.constexpr, LOW: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One stretch of one (sample, query head): its outputs, and whether any row was lost."""
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
    o = rows_of(p_o, batch, head, begin, stride_ob, stride_oh, stride_ot, stride_od)
    mixes = rows_of(p_m, batch, head, begin, stride_mb, stride_mh, stride_mt, stride_md)
    p_mask += batch * T
    drop_first = (batch * (H // KG) + key_head) * T
    alpha_here = load_scale(p_alpha, alpha, index, HAS_ALPHA)
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    b_peak, b_mass, b_sum = load_state(p_peak, p_mass, p_sum, part, BD, BE, HAS_STATE)
    lost = 0
    for first in tl.range(start, end, tile_tokens, num_stages=STAGES):
        last = tl.minimum(first + tile_tokens, end)
        inside = rows_inside(first, last, BT, HAS_MASK)
        ok = token_ok(p_mask, first, last, BT, HAS_MASK)
        b_q, b_k, b_v, _ = load_tile(
            q, k, v, first, inside, ok, seed, drop_first, dropout_p,
            D, E, BD, BE, BT, EVEN, QUIET, HAS_MASK, HAS_DROPOUT,
        )  # fmt: skip
        b_s, b_w, _, b_norm, b_e, b_peak, b_mass, b_sum = weigh_rows(
            b_q, b_k, ok, inside, b_peak, b_mass, b_sum, q, k, first, alpha_here, beta_here,
            D, BD, BT, EVEN, QUIET, EXACT, EXP, LOW, PRECISION,
        )  # fmt: skip
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
            b_o = mix_outputs(
                b_o, b_norm, b_d, b_total, mixes, mix, first, inside, E, BE, BT, MIX, EVEN
            )
        else:
            b_o = b_o / b_norm[:, None]
        store_rows(o, first, b_o, inside, BT, E, BE, EVEN)
    if not EXACT:
        tl.store(p_lost + part, lost)
