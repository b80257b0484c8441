"""The statistics of moment matching, and α and β from them, in one pass over q and k.

A program writes the mean of every feature over its stretch of keys, and the sum of squared
distances from it; two stretches merge exactly (Chan, Golub, LeVeque), so that a mean far from zero
costs no digits. The second kernel merges and evaluates the fitted curve, Eq. (10), for every head.

Dimension legend: see `triton_steps`; B samples or packed sequences, H query heads,
Hk key heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import (
    find_stretch,
    load_rows,
    rows_of,
    token_ok,
    widen_turned,
)


@triton.jit
def measure_kernel(
    p_q, p_k, p_mask, p_starts, p_squares, p_counts, p_means, p_spreads, B, T, S, H, HK,
    program_tokens,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, HAS_MASK: tl.constexpr,
    QUERY_MASK: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """A stretch of queries (first B·H rows of the grid) or of keys (the rest)."""
    wait_for_launch(FOLLOWS)
    split, splits = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    if row < B * H:
        batch, head, begin, start, end = find_stretch(
            p_starts, split, row, program_tokens, T, H, PACKED, False
        )
        q = rows_of(p_q, batch, head, begin, stride_qb, stride_qh, stride_qt, stride_qd)
        b_square = tl.zeros([BT, BD], tl.float32)
        for first in tl.range(start, end, BT, num_stages=STAGES):
            inside = token_ok(p_mask + batch * S, first, end, BT, QUERY_MASK)
            b_x = load_rows(q, first, inside, BT, D, BD, False).to(tl.float32)
            b_square += b_x * b_x
        tl.store(p_squares + row * splits + split, tl.sum(b_square))
    else:
        row -= B * H
        batch, head, begin, start, end = find_stretch(
            p_starts, split, row, program_tokens, S, HK, PACKED, False
        )
        k = rows_of(p_k, batch, head, begin, stride_kb, stride_kh, stride_kt, stride_kd)
        count = 0.0
        b_mean = tl.zeros([BD], tl.float32)
        b_spread = tl.zeros([BD], tl.float32)
        for first in tl.range(start, end, BT, num_stages=STAGES):
            ok = token_ok(p_mask + batch * S, first, end, BT, HAS_MASK)
            # One row per feature: sums over tokens then stay within four threads.
            b_x = widen_turned(load_rows(k, first, ok, BT, D, BD, False), BD)
            more = tl.sum(ok.to(tl.float32))
            some = tl.maximum(more, 1.0)
            b_near = tl.sum(b_x, 1) / some
            b_far = tl.where(ok[None, :], b_x - b_near[:, None], 0.0)
            whole = tl.maximum(count + more, 1.0)
            b_step = b_near - b_mean
            b_spread += tl.sum(b_far * b_far, 1) + b_step * b_step * (count * more / whole)
            b_mean += b_step * (more / whole)
            count += more
        part = row * splits + split
        slots = tl.arange(0, BD)
        tl.store(p_counts + part, count)
        tl.store(p_means + part * BD + slots, b_mean)
        tl.store(p_spreads + part * BD + slots, b_spread)


@triton.jit
def temperature_kernel(
    p_squares, p_counts, p_means, p_spreads, p_results, heads_in_all, splits, T,
    c0, c1, c2, c3, c4, x0, x1, x2, x3, least_p, most_p, least_n, most_n, floor,
    R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ALL_QUERIES: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One head: merge its stretches, then Eq. (10)."""
    wait_for_launch(FOLLOWS)
    index = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, BD)
    squares, count = 0.0, 0.0
    b_mean = tl.zeros([BD], tl.float32)
    b_spread = tl.zeros([BD], tl.float32)
    for split in range(splits):
        squares += tl.load(p_squares + index * splits + split)
        part = (index // R) * splits + split
        more = tl.load(p_counts + part)
        whole = tl.maximum(count + more, 1.0)
        b_step = tl.load(p_means + part * BD + slots) - b_mean
        b_spread += tl.load(p_spreads + part * BD + slots)
        b_spread += b_step * b_step * (count * more / whole)
        b_mean += b_step * (more / whole)
        count += more
    queries = count
    if ALL_QUERIES:
        queries = tl.cast(T, tl.float32)
    query_variance = squares / tl.maximum(queries * D, 1.0)
    key_variance = tl.sum(b_spread) / tl.maximum(count * D, 1.0)
    key_size = key_variance + tl.sum(b_mean * b_mean) / D
    # NaN and infinity count as healthy, so that they show in the result: hence <, not <=.
    flat = query_variance < floor * tl.maximum(query_variance, 1.0)
    flat = flat | (key_variance < floor * tl.maximum(key_size, 1.0))
    one_q = tl.where(flat, 1.0, query_variance)
    one_k = tl.where(flat, 1.0, key_variance)
    p = one_q * one_k
    clamped = tl.minimum(tl.maximum(p, least_p), most_p)
    u = tl.log(clamped)
    x = tl.log(tl.minimum(tl.maximum(count, least_n), most_n) / 1024.0)
    exponent = (c3 + x * x3) + u * c4
    exponent = (c2 + x * x2) + u * exponent
    exponent = (c1 + x * x1) + u * exponent
    exponent = (c0 + x * x0) + u * exponent
    spread = tl.exp(exponent) * tl.sqrt(p / clamped)
    tl.store(p_results + index, tl.where(flat, 1.0, spread / tl.sqrt(one_q)))
    tl.store(p_results + heads_in_all + index, tl.where(flat, 1.0, spread / tl.sqrt(one_k)))
    tl.store(p_results + 2 * heads_in_all + index, query_variance)
    tl.store(p_results + 3 * heads_in_all + index, key_variance)
    tl.store(p_results + 4 * heads_in_all + index, flat.to(tl.float32))
