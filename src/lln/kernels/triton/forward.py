"""Forward kernels: queries against the summary of keys and values.

*Short*: one program a (sample, head) summarises and reads, and the summary never leaves the chip
unless the backward pass will need it. *Long*: the sequence is split over programs, their partial
summaries are merged once (`lln.kernels.triton.summaries`), and a second pass reads them.

With ``HAS_DIAG`` the pass over the queries adds the block-diagonal softmax of the same tokens.

Dimension legend: see `lln.kernels.triton.steps`; SH summary heads, R query heads a summary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.steps import (
    block_softmax,
    drop_factor,
    gap_before,
    hide_rows,
    load_rows,
    load_scale,
    locate,
    quiet_rows,
    rows_inside,
    slot_softmax,
    store_rows,
    token_ok,
)
from lln.kernels.triton.summaries import summarise_range


@triton.jit
def read_range(
    p_q,
    p_k,
    p_v,
    p_o,
    p_mix,
    p_mask,
    start,
    end,
    alpha,
    b_log_mass,
    b_c,
    mix,
    scale,
    block_size,
    stride_qt,
    stride_qd,
    stride_kt,
    stride_kd,
    stride_vt,
    stride_vd,
    stride_ot,
    stride_od,
    stride_mt,
    stride_me,
    seed,
    drop_first,
    dropout_p,
    tile_tokens,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BT: tl.constexpr,
    QUIET: tl.constexpr,
    HAS_DIAG: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    MIX: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Queries ``start … end − 1`` of one head read a summary; writes their outputs."""
    for first in tl.range(start, end, tile_tokens, num_stages=STAGES):
        last = tl.minimum(first + tile_tokens, end)
        inside = rows_inside(first, last, BT, HAS_MASK)
        offset = tl.cast(first, tl.int64)
        b_q = load_rows(p_q + offset * stride_qt, stride_qt, stride_qd, inside, BT, D, BD, EVEN)
        if QUIET:
            b_q = quiet_rows(b_q, token_ok(p_mask, first, last, BT, True))
        b_e, b_norm = slot_softmax(b_q, alpha, b_log_mass, D, BD)
        b_o = tl.dot(b_e.to(b_c.dtype), b_c, input_precision=PRECISION)
        if HAS_DIAG:
            ok = token_ok(p_mask, first, last, BT, HAS_MASK)
            b_k = load_rows(p_k + offset * stride_kt, stride_kt, stride_kd, inside, BT, D, BD, EVEN)
            b_v = load_rows(p_v + offset * stride_vt, stride_vt, stride_vd, inside, BT, E, BE, EVEN)
            if HAS_MASK:
                b_k, b_v = hide_rows(b_k, ok), hide_rows(b_v, ok)
            if HAS_DROPOUT:
                b_factor = drop_factor(seed, drop_first + first, dropout_p, BT)
                b_v = (b_v.to(tl.float32) * b_factor[:, None]).to(b_v.dtype)
            b_p, b_sum = block_softmax(
                b_q, b_k, scale, ok, block_size, BT, EVEN, ONE_BLOCK, CAUSAL, PRECISION
            )
            b_d = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
            if MIX == 2:
                tokens = tl.arange(0, BT)
                b_row = tl.load(p_mix + (offset + tokens) * stride_mt, mask=inside, other=0.0)
                b_row = b_row.to(tl.float32)
                b_o = b_o * (b_row / b_norm)[:, None] + b_d * ((1.0 - b_row) / b_sum)[:, None]
            elif MIX == 3:
                p_m = p_mix + offset * stride_mt
                b_mix = load_rows(p_m, stride_mt, stride_me, inside, BT, E, BE, EVEN)
                b_mix = b_mix.to(tl.float32)
                b_o = b_o * b_mix / b_norm[:, None] + b_d * (1.0 - b_mix) / b_sum[:, None]
            else:
                b_o = b_o * (mix / b_norm)[:, None] + b_d * ((1.0 - mix) / b_sum)[:, None]
        else:
            b_o = b_o * (1.0 / b_norm)[:, None]
        store_rows(p_o + offset * stride_ot, b_o, stride_ot, stride_od, inside, BT, E, BE, EVEN)


@triton.jit(do_not_specialize=["seed"])
def short_fwd_kernel(
    p_q,
    p_k,
    p_v,
    p_o,
    p_mix,
    p_mask,
    p_alpha,
    p_beta,
    p_log_mass,
    p_centroid,
    p_bounds,
    alpha,
    beta,
    mix,
    scale,
    block_size,
    seed,
    dropout_p,
    tile_tokens,
    T,
    S,
    SH,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_vd,
    stride_ob,
    stride_oh,
    stride_ot,
    stride_od,
    stride_mb,
    stride_mh,
    stride_mt,
    stride_me,
    R: tl.constexpr,
    KG: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
    BQ: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
    HAS_BETA: tl.constexpr,
    QUIET: tl.constexpr,
    HAS_DIAG: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    MIX: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr,
    SAVE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One (sample, summary head): summarise all keys, then read with its R query heads."""
    index = tl.program_id(0).to(tl.int64)
    batch, head = index // SH, index % SH
    key_head = head // KG
    begin, keys = locate(p_bounds, batch, S, PACKED)
    queries = keys if PACKED else T
    p_k += batch * stride_kb + begin * stride_kt + key_head * stride_kh
    p_v += batch * stride_vb + begin * stride_vt + key_head * stride_vh
    p_q += batch * stride_qb + begin * stride_qt
    p_o += batch * stride_ob + begin * stride_ot
    p_mix += batch * stride_mb + begin * stride_mt
    p_mask += batch * S
    drop_first = (batch * (SH // KG) + key_head) * S
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    b_peak, b_mass, b_sum = summarise_range(
        p_k, p_v, p_mask, 0, keys, beta_here, stride_kt, stride_kd, stride_vt, stride_vd,
        seed, drop_first, dropout_p,
        D, E, BD, BE, BK, EVEN, HAS_MASK, HAS_DROPOUT, PRECISION, STAGES,
    )  # fmt: skip
    b_log_mass = b_peak + tl.log(b_mass)
    b_c = (b_sum * (1.0 / b_mass)[:, None]).to(p_centroid.dtype.element_ty)
    if SAVE:
        slots = tl.arange(0, BD)
        tl.store(p_log_mass + index * D + slots, b_log_mass, mask=slots < D)
        store_rows(p_centroid + index * D * E, b_c, E, 1, slots < D, BD, E, BE, D == BD)
    gap = gap_before(p_bounds, batch, HAS_MASK and HAS_DIAG)
    for r in range(R):
        query_head = head * R + r
        alpha_here = load_scale(p_alpha, alpha, index * R + r, HAS_ALPHA)
        read_range(
            p_q + query_head * stride_qh, p_k, p_v, p_o + query_head * stride_oh,
            p_mix + query_head * stride_mh, p_mask, -gap, queries, alpha_here, b_log_mass, b_c,
            mix, scale, block_size,
            stride_qt, stride_qd, stride_kt, stride_kd, stride_vt, stride_vd,
            stride_ot, stride_od, stride_mt, stride_me, seed, drop_first, dropout_p, tile_tokens,
            D, E, BD, BE, BQ, QUIET, HAS_DIAG, ONE_BLOCK, MIX, EVEN, HAS_MASK, HAS_DROPOUT,
            CAUSAL, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["seed"])
def read_kernel(
    p_q,
    p_k,
    p_v,
    p_o,
    p_mix,
    p_mask,
    p_alpha,
    p_log_mass,
    p_centroid,
    p_bounds,
    alpha,
    mix,
    scale,
    block_size,
    seed,
    dropout_p,
    tile_tokens,
    program_tokens,
    T,
    S,
    H,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_vd,
    stride_ob,
    stride_oh,
    stride_ot,
    stride_od,
    stride_mb,
    stride_mh,
    stride_mt,
    stride_me,
    R: tl.constexpr,
    KG: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BT: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
    QUIET: tl.constexpr,
    HAS_DIAG: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    MIX: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One stretch of queries of one (sample, head) reads its summary."""
    index = tl.program_id(1).to(tl.int64)
    batch, head = index // H, index % H
    summary, key_head = index // R, head // (R * KG)
    key_heads = H // (R * KG)
    slots = tl.arange(0, BD)
    b_log_mass = tl.load(p_log_mass + summary * D + slots, mask=slots < D, other=0.0)
    p_c = p_centroid + summary * D * E
    b_c = load_rows(p_c, E, 1, slots < D, BD, E, BE, D == BD)
    begin, queries = locate(p_bounds, batch, T, PACKED)
    p_mask += batch * S
    start = tl.program_id(0) * program_tokens
    start -= gap_before(p_bounds, batch, HAS_MASK and HAS_DIAG)
    read_range(
        p_q + batch * stride_qb + begin * stride_qt + head * stride_qh,
        p_k + batch * stride_kb + begin * stride_kt + key_head * stride_kh,
        p_v + batch * stride_vb + begin * stride_vt + key_head * stride_vh,
        p_o + batch * stride_ob + begin * stride_ot + head * stride_oh,
        p_mix + batch * stride_mb + begin * stride_mt + head * stride_mh,
        p_mask, start, tl.minimum(start + program_tokens, queries),
        load_scale(p_alpha, alpha, index, HAS_ALPHA), b_log_mass, b_c, mix, scale, block_size,
        stride_qt, stride_qd, stride_kt, stride_kd, stride_vt, stride_vd,
        stride_ot, stride_od, stride_mt, stride_me,
        seed, (batch * key_heads + key_head) * S, dropout_p, tile_tokens,
        D, E, BD, BE, BT, QUIET, HAS_DIAG, ONE_BLOCK, MIX, EVEN, HAS_MASK, HAS_DROPOUT, CAUSAL,
        PRECISION, STAGES,
    )  # fmt: skip
