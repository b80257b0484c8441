"""Keys and values into the summary: of a range of tokens, of a split, of all splits merged.

Dimension legend: see `lln.kernels.triton.steps`; SH summary heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.steps import (
    NEVER,
    add_tile,
    drop_factor,
    exponential,
    gap_before,
    hide_rows,
    load_rows,
    load_scale,
    locate,
    rows_inside,
    token_ok,
    widen_turned,
)


@triton.jit
def summarise_range(
    p_k,
    p_v,
    p_mask,
    start,
    end,
    beta,
    stride_kt,
    stride_kd,
    stride_vt,
    stride_vd,
    seed,
    drop_first,
    dropout_p,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BT: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The summary of tokens ``start … end − 1`` of one head: peak, mass and weighted sum."""
    b_peak = tl.full([BD], NEVER, tl.float32)
    b_mass = tl.zeros([BD], tl.float32)
    b_sum = tl.zeros([BD, BE], tl.float32)
    for first in tl.range(start, end, BT, num_stages=STAGES):
        inside = rows_inside(first, end, BT, HAS_MASK)
        ok = token_ok(p_mask, first, end, BT, HAS_MASK)
        offset = tl.cast(first, tl.int64)
        b_k = load_rows(p_k + offset * stride_kt, stride_kt, stride_kd, inside, BT, D, BD, EVEN)
        b_v = load_rows(p_v + offset * stride_vt, stride_vt, stride_vd, inside, BT, E, BE, EVEN)
        b_x = widen_turned(b_k, BD) * beta
        if not EVEN:
            b_x = tl.where(ok[None, :], b_x, NEVER)
        if HAS_MASK:
            b_v = hide_rows(b_v, ok)
        if HAS_DROPOUT:
            b_factor = drop_factor(seed, drop_first + first, dropout_p, BT)
            b_v = (b_v.to(tl.float32) * b_factor[:, None]).to(b_v.dtype)
        b_peak, b_mass, b_sum = add_tile(b_peak, b_mass, b_sum, b_x, b_v, PRECISION)
    return b_peak, b_mass, b_sum


@triton.jit(do_not_specialize=["seed"])
def summarise_kernel(
    p_k,
    p_v,
    p_mask,
    p_beta,
    p_peak,
    p_mass,
    p_sum,
    p_bounds,
    beta,
    seed,
    dropout_p,
    S,
    SH,
    split_tokens,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_vd,
    KG: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BT: tl.constexpr,
    HAS_BETA: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    PACKED: tl.constexpr,
    SHIFTED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One split of one (sample, summary head) → a partial summary in float32.

    SHIFTED: splits begin where the blocks of a causal walk do.
    """
    split, splits = tl.program_id(0), tl.num_programs(0)
    index = tl.program_id(1).to(tl.int64)
    batch, head = index // SH, index % SH
    key_head = head // KG
    begin, keys = locate(p_bounds, batch, S, PACKED)
    p_mask += batch * S
    start = split * split_tokens - gap_before(p_bounds, batch, SHIFTED)
    b_peak, b_mass, b_sum = summarise_range(
        p_k + batch * stride_kb + begin * stride_kt + key_head * stride_kh,
        p_v + batch * stride_vb + begin * stride_vt + key_head * stride_vh,
        p_mask, start, tl.minimum(start + split_tokens, keys),
        load_scale(p_beta, beta, index, HAS_BETA), stride_kt, stride_kd, stride_vt, stride_vd,
        seed, (batch * (SH // KG) + key_head) * S, dropout_p,
        D, E, BD, BE, BT, EVEN, HAS_MASK, HAS_DROPOUT, PRECISION, STAGES,
    )  # fmt: skip
    part = index * splits + split
    slots = tl.arange(0, BD)
    tl.store(p_peak + part * BD + slots, b_peak)
    tl.store(p_mass + part * BD + slots, b_mass)
    p_out = p_sum + part * BD * BE + slots[:, None] * BE + tl.arange(0, BE)[None, :]
    tl.store(p_out, b_sum)


@triton.jit
def merge_kernel(
    p_peak,
    p_mass,
    p_sum,
    p_log_mass,
    p_centroid,
    splits,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge ROWS slots of the partial summaries, always in the same order."""
    index = tl.program_id(1).to(tl.int64)
    slots = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BE)
    b_peak = tl.full([ROWS], NEVER, tl.float32)
    b_mass = tl.zeros([ROWS], tl.float32)
    b_sum = tl.zeros([ROWS, BE], tl.float32)
    for split in range(splits):
        part = index * splits + split
        b_other = tl.load(p_peak + part * BD + slots)
        b_new = tl.maximum(b_peak, b_other)
        b_old, b_add = exponential(b_peak - b_new), exponential(b_other - b_new)
        b_mass = b_mass * b_old + tl.load(p_mass + part * BD + slots) * b_add
        b_more = tl.load(p_sum + part * BD * BE + slots[:, None] * BE + columns[None, :])
        b_sum = b_sum * b_old[:, None] + b_more * b_add[:, None]
        b_peak = b_new
    tl.store(p_log_mass + index * D + slots, b_peak + tl.log(b_mass), mask=slots < D)
    p_out = p_centroid + index * D * E + slots[:, None] * E + columns[None, :]
    ok = (slots < D)[:, None] & (columns < E)[None, :]
    tl.store(p_out, (b_sum / b_mass[:, None]).to(p_centroid.dtype.element_ty), mask=ok)
