"""Choosing exact keys by query: features of queries, lists of keys, and queries sorted by feature.

A head has 2D features, [q, -q] and [k, -k]. Every feature has a *list*, the L keys where it is
largest. Every query has an *entry* for each of its two strongest features: entry t is token t by
its strongest one, entry T + t by its second. Sorted by feature, entries that read the same list
lie in a row, and attention to lists becomes dense tiles (`lln.kernels.keys.triton_list_read`).

1. ``features`` finds the two features of every query, and counts them tile by tile of tokens.
2. ``order`` sorts the entries of a head by feature: with the counts summed up, every entry knows
   its place. Nothing is compared beyond a tile, and results repeat.
3. ``largest`` finds the lists by rounds: of every segment of the keys the L largest, exactly, then
   of segments of those, until one segment is left. Of equal keys the first win.
4. ``members`` notes for every key, as bits, in which lists it is. Its atomic operations set bits,
   which gives the same in any order.

Dimension legend: see `triton_steps`; F = 2D features, BF ≥ F, L keys in a list, BL ≥ L,
BC features and S keys of a program of ``largest``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.keys.triton_keys_select import ordered
from lln.kernels.launching.triton_steps import load_rows, rows_of

# Stands for a key that is not there; below all others.
NOTHING = tl.constexpr(-2147483648)


@triton.jit
def strongest(b_q, D: tl.constexpr, BD: tl.constexpr, FLIP: tl.constexpr):
    """The two strongest features ``[BT]`` of the rows ``[BT, BD]``; of equal ones the first."""
    columns = tl.arange(0, BD)[None, :]
    b_x = b_q.to(tl.float32)
    if FLIP:
        b_x = -b_x
    b_x = tl.where(b_x == b_x, b_x, 0.0)
    # Of q and -q only the positive one can be among the two strongest, unless D is 1.
    b_feature = tl.where(b_x >= 0, columns, columns + D)
    b_size = tl.where(columns < D, tl.abs(b_x), -1.0)
    b_first = tl.min(tl.where(b_size == tl.max(b_size, 1)[:, None], b_feature, 2 * BD), 1)
    if D == 1:
        return b_first, 1 - b_first
    b_size = tl.where(b_feature == b_first[:, None], -1.0, b_size)
    b_second = tl.min(tl.where(b_size == tl.max(b_size, 1)[:, None], b_feature, 2 * BD), 1)
    return b_first, b_second


@triton.jit
def features_kernel(
    p_q, p_mask, p_features, p_counts, T, H, tiles,
    stride_qb, stride_qh, stride_qt, stride_qd,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, FLIP: tl.constexpr,
    HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Features ``[B·H, 2, T]`` of one tile of tokens, and their counts ``[B·H, F, tiles]``.

    Masked queries have those of a query of zeros, so that padding cannot change the order.
    """
    tile, index = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    first = tile * BT
    tokens = first + tl.arange(0, BT)
    there = tokens < T
    rows = rows_of(p_q, index // H, index % H, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    known = there
    if HAS_MASK:
        known = tl.load(p_mask + index // H * T + tokens, mask=there, other=0) != 0
    b_first, b_second = strongest(load_rows(rows, first, known, BT, D, BD, False), D, BD, FLIP)
    p_out = p_features + index * 2 * T + tokens
    tl.store(p_out, b_first.to(tl.int16), mask=there)
    tl.store(p_out + T, b_second.to(tl.int16), mask=there)
    features = tl.arange(0, BF)[None, :]
    b_hits = (b_first[:, None] == features).to(tl.int32)
    b_hits += (b_second[:, None] == features).to(tl.int32)
    b_count = tl.sum(tl.where(there[:, None], b_hits, 0), 0)
    features = tl.arange(0, BF)
    p_out = p_counts + (index * 2 * D + features) * tiles + tile
    tl.store(p_out, b_count, mask=features < 2 * D)


@triton.jit
def earlier(b_feature, b_other, there, BT: tl.constexpr, ALL: tl.constexpr):
    """How many rows of a tile before each, or in ALL of it, have its feature: ``[BT]``."""
    rows = tl.arange(0, BT)
    b_same = (b_feature[:, None] == b_other[None, :]) & there[None, :]
    if not ALL:
        b_same = b_same & (rows[None, :] < rows[:, None])
    return tl.sum(b_same.to(tl.int32), 1)


@triton.jit
def order_kernel(
    p_features, p_counts, p_ends, p_order, T, tiles, F: tl.constexpr, BT: tl.constexpr
):
    """Write the entries of one tile of tokens to their places in the order ``[B·H, 2T]``.

    ``p_ends`` holds the running sums of the counts of a head, feature by feature.
    """
    tile, index = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    tokens = tile * BT + tl.arange(0, BT)
    there = tokens < T
    p_in = p_features + index * 2 * T + tokens
    b_first = tl.load(p_in, mask=there, other=0).to(tl.int32)
    b_second = tl.load(p_in + T, mask=there, other=0).to(tl.int32)
    p_order += index * 2 * T
    at = (index * F + b_first) * tiles + tile
    b_base = tl.load(p_ends + at, mask=there, other=0) - tl.load(p_counts + at, mask=there, other=0)
    b_rank = earlier(b_first, b_first, there, BT, False)
    tl.store(p_order + b_base + b_rank, tokens, mask=there)
    at = (index * F + b_second) * tiles + tile
    b_base = tl.load(p_ends + at, mask=there, other=0) - tl.load(p_counts + at, mask=there, other=0)
    b_rank = earlier(b_second, b_first, there, BT, True)
    b_rank += earlier(b_second, b_second, there, BT, False)
    tl.store(p_order + b_base + b_rank, tokens + T, mask=there)


@triton.jit
def load_candidates(
    p_k, p_tokens, p_mask, places, features, count, stride_kt, stride_kd,
    D: tl.constexpr, IS_FIRST: tl.constexpr, HAS_MASK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Values of features as ordered integers ``[S, BC]``, and the tokens that have them.

    The tokens are those of the places, or in later rounds what the one before left.
    """
    ok = (places < count)[:, None] & (features < 2 * D)[None, :]
    if IS_FIRST:
        if HAS_MASK:
            ok = ok & (tl.load(p_mask + places, mask=places < count, other=0) != 0)[:, None]
        b_token = tl.broadcast_to(places[:, None], ok.shape)
        p_in = p_k + places.to(tl.int64)[:, None] * stride_kt + (features % D)[None, :] * stride_kd
    else:
        p_in = p_tokens + features[None, :] * count + places[:, None]
        b_token = tl.load(p_in, mask=ok, other=-1)
        ok = b_token >= 0
        p_in = p_k + b_token.to(tl.int64) * stride_kt + (features % D)[None, :] * stride_kd
    b_x = tl.load(p_in, mask=ok, other=0).to(tl.float32)
    b_x = tl.where((features < D)[None, :], b_x, -b_x)
    # The two zeros are equal.
    b_value = ordered(tl.where(b_x == 0, 0.0, b_x)) >> SHIFT
    return tl.where(ok, b_value, NOTHING), b_token


@triton.jit
def largest_kernel(
    p_k, p_tokens, p_mask, p_new_tokens, p_second, count, T, HK, L, groups, segments,
    stride_kb, stride_kh, stride_kt, stride_kd,
    D: tl.constexpr, BC: tl.constexpr, S: tl.constexpr, BL: tl.constexpr, IS_FIRST: tl.constexpr,
    HAS_SECOND: tl.constexpr, HAS_MASK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The L largest of S candidates of BC features, in the order of positions; -1 for none.

    SHIFT: how many low bits all values of the type have in common. HAS_SECOND: lists of L - 1 keys
    are wanted too, the same without the weakest.
    """
    segment, rest = tl.program_id(0) % segments, tl.program_id(0) // segments
    index = (rest // groups).to(tl.int64)
    features = rest % groups * BC + tl.arange(0, BC)
    batch, head = index // HK, index % HK
    b_value, b_token = load_candidates(
        p_k + batch * stride_kb + head * stride_kh, p_tokens + index * 2 * D * count,
        p_mask + batch * T, segment * S + tl.arange(0, S), features, count, stride_kt, stride_kd,
        D, IS_FIRST, HAS_MASK, SHIFT,
    )  # fmt: skip
    real = b_value != NOTHING
    # The L-th largest value, bit by bit.
    one = tl.full([BC], 1, tl.int32)
    b_low = tl.full([BC], NOTHING, tl.int32) >> SHIFT
    for step in range(32 - SHIFT):
        b_try = b_low + (one << (31 - SHIFT - step))
        b_reach = tl.sum(((b_value >= b_try[None, :]) & real).to(tl.int32), 0)
        b_low = tl.where(b_reach >= L, b_try, b_low)
    b_above = (b_value > b_low[None, :]) & real
    b_equal = (b_value == b_low[None, :]) & real
    b_wanted = L - tl.sum(b_above.to(tl.int32), 0)
    # Both counts in one running sum.
    b_upto = tl.cumsum(tl.where(b_above, 1 << 16, b_equal.to(tl.int32)), 0)
    b_rank = b_upto & 0xFFFF
    known = features < 2 * D
    b_taken = (b_above | (b_equal & (b_rank <= b_wanted[None, :]))) & known[None, :]
    # Offsets within a head have 32 bits, which saves registers.
    lists = (features * segments + segment) * L
    at = lists[None, :] + (b_upto >> 16) + tl.minimum(b_rank, b_wanted[None, :]) - 1
    p_new_tokens += index * 2 * D * segments * L
    tl.store(p_new_tokens + at, b_token, mask=b_taken)
    places = tl.arange(0, BL)[:, None]
    empty = (places >= tl.sum(b_taken.to(tl.int32), 0)[None, :]) & (places < L) & known[None, :]
    nobody = tl.full([BL, BC], -1, tl.int32)
    tl.store(p_new_tokens + lists[None, :] + places, nobody, mask=empty)
    if HAS_SECOND:
        is_weakest = b_equal & (b_rank == b_wanted[None, :])
        p_second += index * 2 * D * segments * L
        tl.store(p_second + at, tl.where(is_weakest, -1, b_token), mask=b_taken)
        tl.store(p_second + lists[None, :] + places, nobody, mask=empty)


@triton.jit
def members_kernel(
    p_lists, p_members, T, L, words,
    F: tl.constexpr, BF: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Set the bit of every feature for the keys in its list: ``[B·Hk, T, words]``, zero before."""
    groups = (F + BF - 1) // BF
    index = (tl.program_id(0) // groups).to(tl.int64)
    features = tl.program_id(0) % groups * BF + tl.arange(0, BF)
    places = tl.arange(0, BL)
    ok = (features < F)[:, None] & (places < L)[None, :]
    b_key = tl.load(
        p_lists + (index * F + features)[:, None] * L + places[None, :], mask=ok, other=-1
    )
    b_bit = tl.broadcast_to((tl.full([BF], 1, tl.int32) << (features % 32))[:, None], [BF, BL])
    at = (index * T + b_key) * words + (features // 32)[:, None]
    tl.atomic_or(p_members + at, b_bit, mask=ok & (b_key >= 0), sem="relaxed")
