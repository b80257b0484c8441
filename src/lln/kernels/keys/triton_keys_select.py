"""Choosing exact keys: the K keys with the largest products with a group's mean query.

No score is written to memory but those of a few candidates. Four launches, after the mean queries:

1. ``peaks``: every program walks over its share of the keys and keeps the maximum of each of C
   interleaved sets of keys.
2. ``threshold``: the K-th largest of those maxima. At least K scores reach it, and few more do:
   about 1.4 K if the largest scores lie anywhere.
3. ``mark``: walks again and writes one bit per key: does its score reach the threshold?
4. ``finish``: one small program per group collects the marked keys, scores them again and keeps the
   K largest; among equal scores the first win. If too many are marked, it finds the exact threshold
   by bisection.

Scores are products of the mean queries, rounded to the precision of the queries, with the keys,
summed in float32. The result does not depend on how programs are cut.

Groups and keys need not be those of one call: a rank scores its keys with the mean queries of the
whole sequence. Key t then lies in block ``(t + gap) // W`` of that sequence (SHIFTED).

Dimension legend: ROWS groups of a program, C keys in a tile, CAP places for candidates, FEW keys
scored at a time; otherwise
see `triton_steps`. G groups per head, W tokens in a block, RG groups in a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_steps import NEVER, gap_before, hide_rows, load_rows, rows_of


@triton.jit
def means_kernel(
    p_q, p_mask, p_gaps, p_mean, T, H, G, W,
    stride_qb, stride_qh, stride_qt, stride_qd,
    D: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, GROUP: tl.constexpr,
    FLIP: tl.constexpr, HAS_MASK: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """The mean query of every group of one block, over the tokens that are not masked."""
    block, index = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = index // H, index % H
    first = block * W - gap_before(p_gaps, batch, SHIFTED)
    tokens = first + tl.arange(0, BW)
    ok = (tokens >= 0) & (tokens < T) & (tl.arange(0, BW) < W)
    if HAS_MASK:
        ok = ok & (tl.load(p_mask + batch * T + tokens, mask=ok, other=0) != 0)
    rows = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    b_q = hide_rows(load_rows(rows, first, ok, BW, D, BD, False), ok).to(tl.float32)
    if FLIP:
        b_q = -b_q
    b_sum = tl.sum(tl.reshape(b_q, [BW // GROUP, GROUP, BD]), 1)
    b_number = tl.sum(tl.reshape(ok.to(tl.float32), [BW // GROUP, GROUP]), 1)
    b_mean = b_sum / tl.maximum(b_number, 1.0)[:, None]
    groups = tl.arange(0, BW // GROUP)
    columns = tl.arange(0, BD)
    at = (index * G + block * (W // GROUP) + groups) * D
    there = (groups < W // GROUP)[:, None] & (columns < D)[None, :]
    p_out = p_mean + at[:, None] + columns[None, :]
    tl.store(p_out, b_mean.to(p_mean.dtype.element_ty), mask=there)


@triton.jit
def load_means(p_mean, index, first, G, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """The mean queries ``[ROWS, BD]`` of a head from group ``first`` on."""
    groups, columns = first + tl.arange(0, ROWS), tl.arange(0, BD)
    ok = (groups < G)[:, None] & (columns < D)[None, :]
    return tl.load(p_mean + (index * G + groups)[:, None] * D + columns[None, :], mask=ok, other=0)


@triton.jit
def score_tile(
    b_mean, keys, p_mask, gap, first, b_block, T,
    W: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores ``[ROWS, C]`` of the keys from ``first`` on; NEVER for those not to be chosen."""
    tokens = first + tl.arange(0, C)
    ok = tokens < T
    if HAS_MASK:
        ok = ok & (tl.load(p_mask + tokens, mask=ok, other=0) != 0)
    b_k = load_rows(keys, first, ok, C, D, BD, EVEN)
    b_s = tl.dot(b_mean, tl.trans(b_k), input_precision=PRECISION)
    # Keys that do not exist get a block that no group has.
    b_home = (tokens + gap) // W
    if not EVEN:
        b_home = tl.where(ok, b_home, -1)
        b_s = tl.where((b_home >= 0)[None, :], b_s, NEVER)
    return tl.where(b_home[None, :] == b_block[:, None], NEVER, b_s)


@triton.jit
def place_of(p_gaps, index, first, H, ROWS: tl.constexpr, RG, SHIFTED: tl.constexpr):
    """Sample, head, gap, and the block ``[ROWS]`` of every group of a program."""
    batch = index // H
    gap = gap_before(p_gaps, batch, SHIFTED)
    return batch, index % H, gap, (first + tl.arange(0, ROWS)) // RG


@triton.jit
def peaks_kernel(
    p_mean, p_k, p_mask, p_gaps, p_peaks, T, H, G, R, splits, stretch,
    stride_kb, stride_kh, stride_kt, stride_kd, W: tl.constexpr, RG: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
    HAS_MASK: tl.constexpr, SHIFTED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Maxima of C interleaved sets of one split's keys: ``[B·H, G, splits, C]``."""
    split, index = tl.program_id(0) % splits, tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) // splits * ROWS
    batch, head, gap, b_block = place_of(p_gaps, index, first, H, ROWS, RG, SHIFTED)
    keys = rows_of(p_k, batch, head // R, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    b_mean = load_means(p_mean, index, first, G, ROWS, D, BD)
    b_peak = tl.full([ROWS, C], NEVER, tl.float32)
    end = tl.minimum((split + 1) * stretch, T)
    for at in tl.range(split * stretch, end, C, num_stages=STAGES):
        b_s = score_tile(
            b_mean, keys, p_mask + batch * T, gap, at, b_block, T, W, C, D, BD, EVEN, HAS_MASK,
            PRECISION,
        )  # fmt: skip
        b_peak = tl.maximum(b_peak, b_s)
    groups = first + tl.arange(0, ROWS)
    p_out = p_peaks + ((index * G + groups) * splits + split)[:, None] * C
    tl.store(p_out + tl.arange(0, C)[None, :], b_peak, mask=(groups < G)[:, None])


@triton.jit
def kth_largest(b_values, keys, STEPS: tl.constexpr):
    """A number per row that at least ``keys`` of its values reach, by bisection; NEVER if fewer.

    With 32 steps it is the largest such number.
    """
    b_low = tl.full([b_values.shape[0]], -2147483648, tl.int32)
    b_order = ordered(b_values)
    for step in range(STEPS):
        # The highest bit of the ordered form is the sign: the first step tries zero.
        b_bit = tl.full([b_values.shape[0]], 1, tl.int32) << (31 - step)
        b_try = tl.where(step == 0, b_low ^ b_bit, b_low | b_bit)
        b_count = tl.sum((b_order >= b_try[:, None]).to(tl.int32), 1)
        b_low = tl.where(b_count >= keys, b_try, b_low)
    return tl.maximum(unordered(b_low), NEVER)


@triton.jit
def ordered(b_values):
    """float32 as int32 in the same order."""
    b_bits = b_values.to(tl.int32, bitcast=True)
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)


@triton.jit
def unordered(b_order):
    """The float32 of `ordered`; what is no number becomes NEVER."""
    b_bits = tl.where(b_order < 0, b_order ^ 0x7FFFFFFF, b_order)
    b_values = b_bits.to(tl.float32, bitcast=True)
    return tl.where(b_values == b_values, b_values, NEVER)


@triton.jit
def threshold_kernel(
    p_peaks, p_threshold, groups, keys, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The K-th largest of every group's maxima."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDE)
    ok = (rows < groups)[:, None] & (columns < COLUMNS)[None, :]
    p_in = p_peaks + rows[:, None] * COLUMNS + columns[None, :]
    b_threshold = kth_largest(tl.load(p_in, mask=ok, other=NEVER), keys, 18)
    tl.store(p_threshold + rows, b_threshold, mask=rows < groups)


@triton.jit
def mark_kernel(
    p_mean, p_k, p_mask, p_gaps, p_threshold, p_marks, T, H, G, R, bytes_per_row, splits, stretch,
    stride_kb, stride_kh, stride_kt, stride_kd, W: tl.constexpr, RG: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
    HAS_MASK: tl.constexpr, SHIFTED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One bit per key of one split: does its score reach the threshold? ``[B·H, G, T / 8]``."""
    split, index = tl.program_id(0) % splits, tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) // splits * ROWS
    batch, head, gap, b_block = place_of(p_gaps, index, first, H, ROWS, RG, SHIFTED)
    keys = rows_of(p_k, batch, head // R, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    b_mean = load_means(p_mean, index, first, G, ROWS, D, BD)
    groups = first + tl.arange(0, ROWS)
    b_ok = groups < G
    b_threshold = tl.load(p_threshold + index * G + groups, mask=b_ok, other=0.0)
    b_threshold = tl.maximum(b_threshold, NEVER * 0.5)
    # Eight bits become a byte by a product: its entries are sums of powers of two up to 255.
    tokens, columns = tl.arange(0, C), tl.arange(0, C // 8)
    b_power = tl.where((tokens // 8)[:, None] == columns[None, :], (1 << (tokens % 8))[:, None], 0)
    b_power = b_power.to(tl.float16)
    p_row = p_marks + (index * G + groups)[:, None] * bytes_per_row + columns[None, :]
    end = tl.minimum((split + 1) * stretch, T)
    for at in tl.range(split * stretch, end, C, num_stages=STAGES):
        b_s = score_tile(
            b_mean, keys, p_mask + batch * T, gap, at, b_block, T, W, C, D, BD, EVEN, HAS_MASK,
            PRECISION,
        )  # fmt: skip
        b_byte = tl.dot((b_s >= b_threshold[:, None]).to(tl.float16), b_power)
        tl.store(p_row + at // 8, b_byte.to(tl.uint8), mask=b_ok[:, None])


@triton.jit
def ones(b_word):
    """How many bits of an int32 are set."""
    b_word = b_word - ((b_word >> 1) & 0x55555555)
    b_word = (b_word & 0x33333333) + ((b_word >> 2) & 0x33333333)
    return (((b_word + (b_word >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24) & 0xFF


@triton.jit
def score_few(
    b_mean, keys, p_mask, gap, block, b_token, b_there, T,
    W: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Scores of some keys for one group; NEVER for those not to be chosen."""
    p_rows, _, stride_t, stride_d = keys
    columns = tl.arange(0, BD)
    ok = b_there & (b_token < T) & ((b_token + gap) // W != block)
    if HAS_MASK:
        ok = ok & (tl.load(p_mask + b_token, mask=ok, other=0) != 0)
    p_in = p_rows + b_token.to(tl.int64)[:, None] * stride_t + columns[None, :] * stride_d
    b_k = tl.load(p_in, mask=ok[:, None] & (columns < D)[None, :], other=0).to(tl.float32)
    # No zero keeps a sign: as an integer, -0 would not be equal to 0.
    return tl.where(ok, tl.sum(b_k * b_mean[None, :], 1) + 0.0, NEVER)


@triton.jit
def note(p_score, p_token, b_s, b_token, b_hit, count, CAP: tl.constexpr):
    """Write candidates down behind the ``count`` that are there; returns the new count."""
    b_one = b_hit.to(tl.int32)
    b_slot = count + tl.cumsum(b_one, 0) - 1
    there = b_hit & (b_slot < CAP)
    tl.store(p_score + b_slot, b_s, mask=there)
    tl.store(p_token + b_slot, b_token, mask=there)
    return count + tl.sum(b_one, 0)


@triton.jit
def finish_kernel(
    p_mean, p_k, p_mask, p_gaps, p_marks, p_scores, p_places, p_chosen, p_best,
    T, H, G, R, K, words, stride_kb, stride_kh, stride_kt, stride_kd, W: tl.constexpr,
    RG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, FEW: tl.constexpr, CAP: tl.constexpr,
    HAS_MASK: tl.constexpr, SHIFTED: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """The K best marked keys of one group, ascending by position; -1 where there are fewer.

    SCORED: their scores are written as well, -inf where there are fewer.
    Words with marks are written down first, then the marked positions, then their scores: each
    step reads what the one before it wrote to the group's own memory.
    """
    group, index = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = index * G + group
    batch, head, block = index // H, index % H, group // RG
    gap = gap_before(p_gaps, batch, SHIFTED)
    keys = rows_of(p_k, batch, head // R, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    columns, few, places = tl.arange(0, BD), tl.arange(0, FEW), tl.arange(0, CAP)
    b_mean = tl.load(p_mean + row * D + columns, mask=columns < D, other=0).to(tl.float32)
    p_mask += batch * T
    p_score, p_token = p_scores + row * CAP, p_places + row * CAP
    p_word = p_score.to(tl.pointer_type(tl.int32))

    marked = 0
    for at in range(0, words, CAP):
        b_at = at + places
        b_word = tl.load(p_marks + row * words + b_at, mask=b_at < words, other=0)
        marked = note(p_word, p_token, b_word, b_at, b_word != 0, marked, CAP)
    tl.debug_barrier()
    kept = places < marked
    b_word = tl.load(p_word + places, mask=kept, other=0)
    b_at = tl.load(p_token + places, mask=kept, other=0)
    tl.debug_barrier()
    b_number = ones(b_word)
    b_place = tl.cumsum(b_number, 0) - b_number
    count = tl.sum(b_number, 0)
    while tl.max((b_word != 0).to(tl.int32), 0) > 0:
        # The lowest mark of every word, which is then taken off.
        b_low = b_word & -b_word
        b_marked = (b_word != 0) & (b_place < CAP)
        tl.store(p_token + b_place, b_at * 32 + ones(b_low - 1), mask=b_marked)
        b_place += (b_word != 0).to(tl.int32)
        b_word = b_word ^ b_low
    tl.debug_barrier()
    if (marked > CAP) | (count > CAP):
        # Too many reach the threshold: find the exact one by bisection, and write down the scores
        # above it, and of those equal to it the first K. A group without queries has mean 0, and
        # all scores are: the first K keys are found without looking at the others.
        is_flat = tl.max(tl.abs(b_mean), 0) == 0
        low = tl.where(is_flat, 0, -2147483648)
        step = tl.where(is_flat, 32, 0)
        while step < 32:
            bit_now = tl.full([], 1, tl.int32) << (31 - step)
            trial = tl.where(step == 0, 0, low | bit_now)
            number = 0
            for tile in range(0, T, FEW):
                b_s = score_few(
                    b_mean, keys, p_mask, gap, block, tile + few, few >= 0, T, W, D, BD, HAS_MASK
                )
                number += tl.sum(((ordered(b_s) >= trial) & (b_s > NEVER)).to(tl.int32), 0)
            low = tl.where(number >= K, trial, low)
            step += 1
        count, equal, tile = 0, 0, 0
        while (tile < T) & ((count < K) | (is_flat == 0)):
            b_s = score_few(
                b_mean, keys, p_mask, gap, block, tile + few, few >= 0, T, W, D, BD, HAS_MASK
            )
            b_real = b_s > NEVER
            b_same = (ordered(b_s) == low) & b_real
            b_order = equal + tl.cumsum(b_same.to(tl.int32), 0)
            b_hit = ((ordered(b_s) > low) & b_real) | (b_same & (b_order <= K))
            equal += tl.sum(b_same.to(tl.int32), 0)
            count = note(p_score, p_token, b_s, tile + few, b_hit, count, CAP)
            tile += FEW
    else:
        for at in range(0, count, FEW):
            b_there = at + few < count
            b_token = tl.load(p_token + at + few, mask=b_there, other=0)
            b_s = score_few(
                b_mean, keys, p_mask, gap, block, b_token, b_there, T, W, D, BD, HAS_MASK
            )
            tl.store(p_score + at + few, b_s, mask=b_there)
    tl.debug_barrier()
    there = places < count
    b_s = tl.load(p_score + places, mask=there, other=NEVER)
    b_token = tl.load(p_token + places, mask=there, other=0)
    b_least = kth_largest(b_s[None, :], K, 32)
    least = tl.sum(b_least, 0)
    b_above = (b_s > least) & there
    b_equal = (b_s == least) & there & (b_s > NEVER)
    wanted = K - tl.sum(b_above.to(tl.int32), 0)
    b_taken = b_above | (b_equal & (tl.cumsum(b_equal.to(tl.int32), 0) <= wanted))
    b_slot = tl.cumsum(b_taken.to(tl.int32), 0) - 1
    tl.store(p_chosen + row * K + b_slot, b_token, mask=b_taken)
    found = tl.sum(b_taken.to(tl.int32), 0)
    rest = (places >= found) & (places < K)
    tl.store(p_chosen + row * K + places, tl.full([CAP], -1, tl.int32), mask=rest)
    if SCORED:
        tl.store(p_best + row * K + b_slot, b_s, mask=b_taken)
        tl.store(p_best + row * K + places, tl.full([CAP], float("-inf"), tl.float32), mask=rest)
