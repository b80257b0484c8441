"""Softmax attention inside blocks that are longer than a tile (section 4.2), forward and backward.

Rows are completed tile by tile, as in FlashAttention (arXiv:2205.14135). Nothing is saved for the
backward. Its pass over the queries first goes over the keys to find every row's log-normaliser
ℓ = log Σ exp(s) and level δ = Σ P∘dP, which the passes over the keys need as well. With
s = scale · q kᵀ, P = exp(s − ℓ) and dP = dO vᵀ:

    o = P v;   dv = Pᵀ dO;   dS = scale · P∘(dP − δ);   dq = dS k;   dk = dSᵀ q

ADDS: tensors hold what LLN attention has written, and get mix · (that) + (1 − mix) · (this).

Dimension legend: see `lln.kernels.launching.triton_steps`; B samples, H query heads, HK key heads,
R = H / HK, T tokens, BS tokens in a tile of the other side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import (
    NEVER,
    exponential,
    heads_on,
    load_rows,
    rows_of,
    store_rows,
)


@triton.jit
def find_tile(block_size, tiles, programs, heads, T, BT: tl.constexpr):
    """The tile of a program: sample, head, first token, bounds of its block, rows inside of it.

    Args:
        block_size: Tokens in a block.
        tiles: Tiles per block.
        programs: Tiles per head.
        heads: Heads per sample.
        T: Tokens of a sample.
        BT: Tokens in a tile.
    """
    program = tl.program_id(0)
    tile, index = program % programs, (program // programs).to(tl.int64)
    begin = tile // tiles * block_size
    first = begin + tile % tiles * BT
    end = tl.minimum(begin + block_size, T)
    return index // heads, index % heads, first, begin, end, first + tl.arange(0, BT) < end


@triton.jit
def scores(b_left, b_right, scale, PRECISION: tl.constexpr):
    """Scores ``[left, right]`` of two tiles."""
    return tl.dot(b_left, tl.trans(b_right), input_precision=PRECISION) * scale


@triton.jit
def hide_keys(b_s, rows, keys, end, EVEN: tl.constexpr, CAUSAL: tl.constexpr):
    """Scores ``[queries, keys]``, ``NEVER`` beyond the block and after a causal row's own token."""
    if not EVEN:
        b_s = tl.where((keys < end)[None, :], b_s, NEVER)
    if CAUSAL:
        b_s = tl.where(rows[:, None] >= keys[None, :], b_s, NEVER)
    return b_s


@triton.jit
def first_row(first, begin, BS: tl.constexpr, CAUSAL: tl.constexpr):
    """Where the queries begin that see the keys from ``first`` on: earlier causal ones do not."""
    return begin + (first - begin) // BS * BS if CAUSAL else begin


@triton.jit
def weights_turned(
    b_k, b_q, p_norm, scale, keys, rows, end,
    EVEN: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pᵀ ``[keys, queries]``: the left operand of later products straight from the registers."""
    b_norm = tl.load(p_norm + rows, mask=rows < end, other=0.0)
    b_p = exponential(scores(b_k, b_q, scale, PRECISION) - b_norm[None, :])
    if not EVEN:
        b_p = tl.where((rows < end)[None, :], b_p, 0.0)
    if CAUSAL:
        b_p = tl.where(rows[None, :] >= keys[:, None], b_p, 0.0)
    return b_p


@triton.jit
def add_to(
    rows, first, b_tile, inside, mix,
    BT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Write a tile, or with ``ADDS`` what is there mixed with it."""
    if ADDS:
        b_tile = b_tile * (1.0 - mix) + load_rows(rows, first, inside, BT, D, BD, EVEN) * mix
    store_rows(rows, first, b_tile, inside, BT, D, BD, EVEN)


@triton.jit
def tiled_fwd_kernel(
    p_q, p_k, p_v, p_o, mix, scale, block_size, tiles, programs, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_ob, stride_oh, stride_ot, stride_od,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    ADDS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one (sample, head)."""
    batch, head, first, begin, end, inside = find_tile(block_size, tiles, programs, H, T, BT)
    q = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, head // R, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, head // R, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    o = rows_of(p_o, batch, head, 0, stride_ob, stride_oh, stride_ot, stride_od)
    rows = first + tl.arange(0, BT)
    b_q = load_rows(q, first, inside, BT, D, BD, EVEN)
    b_peak = tl.full([BT], NEVER, tl.float32)
    b_mass = tl.zeros([BT], tl.float32)
    b_o = tl.zeros([BT, BE], tl.float32)
    last = tl.minimum(first + BT, end) if CAUSAL else end
    for start in tl.range(begin, last, BS, num_stages=STAGES):
        keys = start + tl.arange(0, BS)
        b_k = load_rows(k, start, keys < end, BS, D, BD, EVEN)
        b_s = scores(b_q, b_k, scale, PRECISION)
        b_s = hide_keys(b_s, rows, keys, end, EVEN, CAUSAL)
        b_new = tl.maximum(b_peak, tl.max(b_s, 1))
        b_shrink = exponential(b_peak - b_new)
        b_p = exponential(b_s - b_new[:, None])
        b_mass = b_mass * b_shrink + tl.sum(b_p, 1)
        b_v = load_rows(v, start, keys < end, BS, E, BE, EVEN)
        b_o = b_o * b_shrink[:, None]
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision=PRECISION)
        b_peak = b_new
    b_o = b_o * (1.0 / b_mass)[:, None]
    add_to(o, first, b_o, inside, mix, BT, E, BE, EVEN, ADDS)


@triton.jit
def tiled_query_kernel(
    p_q, p_k, p_v, p_g, p_dq, p_norm, p_level, mix, scale, block_size, tiles, programs, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    ADDS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient dq of one tile of queries; ℓ and δ of its rows go to ``[B, H, T]``."""
    batch, head, first, begin, end, inside = find_tile(block_size, tiles, programs, H, T, BT)
    q = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, head // R, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, head // R, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    g = rows_of(p_g, batch, head, 0, stride_gb, stride_gh, stride_gt, stride_gd)
    dq = rows_of(p_dq, batch, head, 0, stride_dqb, stride_dqh, stride_dqt, stride_dqd)
    rows = first + tl.arange(0, BT)
    b_q = load_rows(q, first, inside, BT, D, BD, EVEN)
    b_do = load_rows(g, first, inside, BT, E, BE, EVEN)
    b_peak = tl.full([BT], NEVER, tl.float32)
    b_mass = tl.zeros([BT], tl.float32)
    b_level = tl.zeros([BT], tl.float32)
    last = tl.minimum(first + BT, end) if CAUSAL else end
    for start in tl.range(begin, last, BS, num_stages=STAGES):
        keys = start + tl.arange(0, BS)
        b_k = load_rows(k, start, keys < end, BS, D, BD, EVEN)
        b_s = scores(b_q, b_k, scale, PRECISION)
        b_s = hide_keys(b_s, rows, keys, end, EVEN, CAUSAL)
        b_v = load_rows(v, start, keys < end, BS, E, BE, EVEN)
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        b_new = tl.maximum(b_peak, tl.max(b_s, 1))
        b_shrink = exponential(b_peak - b_new)
        b_p = exponential(b_s - b_new[:, None])
        b_mass = b_mass * b_shrink + tl.sum(b_p, 1)
        b_level = b_level * b_shrink + tl.sum(b_p * b_dp, 1)
        b_peak = b_new
    b_norm, b_level = b_peak + tl.log(b_mass), b_level / b_mass
    at = (batch * H + head) * T + rows
    tl.store(p_norm + at, b_norm, mask=inside)
    tl.store(p_level + at, b_level, mask=inside)
    b_dq = tl.zeros([BT, BD], tl.float32)
    for start in tl.range(begin, last, BS, num_stages=STAGES):
        keys = start + tl.arange(0, BS)
        b_k = load_rows(k, start, keys < end, BS, D, BD, EVEN)
        b_s = scores(b_q, b_k, scale, PRECISION)
        b_s = hide_keys(b_s, rows, keys, end, EVEN, CAUSAL)
        b_v = load_rows(v, start, keys < end, BS, E, BE, EVEN)
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        b_ds = exponential(b_s - b_norm[:, None]) * (b_dp - b_level[:, None])
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    add_to(dq, first, b_dq * scale, inside, mix, BT, D, BD, EVEN, ADDS)


@triton.jit
def tiled_value_kernel(
    p_q, p_k, p_g, p_dv, p_norm, mix, scale, block_size, tiles, programs, T, HK,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_gb, stride_gh, stride_gt, stride_gd, stride_dvb, stride_dvh, stride_dvt, stride_dvd,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    ADDS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """The gradient dv of one tile of keys, from the R query heads that share it."""
    wait_for_launch(FOLLOWS)
    batch, key_head, first, begin, end, inside = find_tile(block_size, tiles, programs, HK, T, BT)
    q = rows_of(p_q, batch, key_head * R, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, key_head, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    g = rows_of(p_g, batch, key_head * R, 0, stride_gb, stride_gh, stride_gt, stride_gd)
    dv = rows_of(p_dv, batch, key_head, 0, stride_dvb, stride_dvh, stride_dvt, stride_dvd)
    keys = first + tl.arange(0, BT)
    b_k = load_rows(k, first, inside, BT, D, BD, EVEN)
    b_dv = tl.zeros([BT, BE], tl.float32)
    start = first_row(first, begin, BS, CAUSAL)
    for r in range(R):
        own = tl.cast(r, tl.int64)
        p_row = p_norm + (batch * HK * R + key_head * R + r) * T
        for place in tl.range(start, end, BS, num_stages=STAGES):
            rows = place + tl.arange(0, BS)
            b_q = load_rows(heads_on(q, own), place, rows < end, BS, D, BD, EVEN)
            b_p = weights_turned(b_k, b_q, p_row, scale, keys, rows, end, EVEN, CAUSAL, PRECISION)
            b_do = load_rows(heads_on(g, own), place, rows < end, BS, E, BE, EVEN)
            b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
    add_to(dv, first, b_dv, inside, mix, BT, E, BE, EVEN, ADDS)


@triton.jit
def tiled_key_kernel(
    p_q, p_k, p_v, p_g, p_dk, p_norm, p_level, mix, scale, block_size, tiles, programs, T, HK,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dkb, stride_dkh, stride_dkt, stride_dkd,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, EVEN: tl.constexpr, CAUSAL: tl.constexpr,
    ADDS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """The gradient dk of one tile of keys, from the R query heads that share it.

    Together with dv it would leave registers for tiles of 64 keys only, which share warps.
    """
    wait_for_launch(FOLLOWS)
    batch, key_head, first, begin, end, inside = find_tile(block_size, tiles, programs, HK, T, BT)
    q = rows_of(p_q, batch, key_head * R, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, key_head, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, key_head, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    g = rows_of(p_g, batch, key_head * R, 0, stride_gb, stride_gh, stride_gt, stride_gd)
    dk = rows_of(p_dk, batch, key_head, 0, stride_dkb, stride_dkh, stride_dkt, stride_dkd)
    keys = first + tl.arange(0, BT)
    b_k = load_rows(k, first, inside, BT, D, BD, EVEN)
    b_v = load_rows(v, first, inside, BT, E, BE, EVEN)
    b_dk = tl.zeros([BT, BD], tl.float32)
    start = first_row(first, begin, BS, CAUSAL)
    for r in range(R):
        own, at = tl.cast(r, tl.int64), (batch * HK * R + key_head * R + r) * T
        for place in tl.range(start, end, BS, num_stages=STAGES):
            rows = place + tl.arange(0, BS)
            b_q = load_rows(heads_on(q, own), place, rows < end, BS, D, BD, EVEN)
            b_do = load_rows(heads_on(g, own), place, rows < end, BS, E, BE, EVEN)
            b_p = weights_turned(
                b_k, b_q, p_norm + at, scale, keys, rows, end, EVEN, CAUSAL, PRECISION
            )
            b_level = tl.load(p_level + at + rows, mask=rows < end, other=0.0)
            b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
            b_ds = b_p * (b_dp - b_level[None, :])
            b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    add_to(dk, first, b_dk * scale, inside, mix, BT, D, BD, EVEN, ADDS)
