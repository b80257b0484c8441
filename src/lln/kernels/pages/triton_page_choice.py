"""Choosing pages for every query: scores of pages, then the best of every row.

A *page* is ``page`` tokens, counted from a sample's first valid one, ``first``. Its score for a
query is the largest q·k among its tokens that are visible, no sinks and not near, and among the
heads that share their keys; each head first takes off its largest product among the near keys and
sinks (PEAKS).

1. ``near_peaks`` finds what is taken off.
2. ``page_scores``: rows are queries times heads. Keys of a tile are in the order of their place in
   their page, so that the maximum over a page is taken within a thread. Tiles far from window,
   sinks and ends are not asked what they hide. Of many pages it writes the maxima of groups, too.
3. ``pick``: a row's largest scores, exactly, the first pages of equal ones; where there are groups,
   the P best of them, and then their pages: outside of them no page can be among the best P, as
   each of those groups has a better one or an equal one before it. A bound below the P-th largest
   comes from maxima of sets of columns; bisection from there counts few times.

Dimension legend: see `triton_steps`; B samples, HK key heads, R query heads each, BR ≥ R, T
queries, S keys, BP pages in a tile, TOKENS of each at once, P pages per query. A query stands
``ahead`` + its index.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import load_rows, rows_of

LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def first_valid(p_first, batch, HAS_MASK: tl.constexpr):
    """A sample's first valid token."""
    if HAS_MASK:
        return tl.load(p_first + batch)
    return 0


@triton.jit
def is_near(b_distance, window, CAUSAL: tl.constexpr):
    """Whether keys at these distances from a query lie in its window."""
    if CAUSAL:
        return (b_distance >= 0) & (b_distance <= window)
    return tl.abs(b_distance) <= window


@triton.jit
def load_group(
    p_q, batch, head, b_query, b_member, ok, stride_qb, stride_qh, stride_qt, stride_qd,
    D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Rows ``[BT, BD]`` of queries of the heads ``head`` + member; zero where not ok."""
    columns = tl.arange(0, BD)
    p_rows = p_q + batch * stride_qb + (head + b_member) * stride_qh
    p_rows += b_query.to(tl.int64) * stride_qt
    p_in = p_rows[:, None] + columns[None, :] * stride_qd
    return tl.load(p_in, mask=ok[:, None] & (columns < D)[None, :], other=0)


@triton.jit
def near_peaks_kernel(
    p_q, p_k, p_mask, p_first, p_peaks, window, sinks, ahead, tiles, T, S, HK,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    R: tl.constexpr, BR: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    BS: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The largest q·k among near keys and sinks, 0 if there are none: ``[B, H, T]``."""
    tile, index = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = index // HK, index % HK
    rows = tl.arange(0, BT)
    b_query, b_member = tile * (BT // BR) + rows // BR, rows % BR
    ok = (b_query < T) & (b_member < R)
    b_q = load_group(
        p_q, batch, head * R, b_query, b_member, ok, stride_qb, stride_qh, stride_qt, stride_qd,
        D, BD,
    )  # fmt: skip
    k = rows_of(p_k, batch, head, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    first = first_valid(p_first, batch, HAS_MASK)
    b_place = ahead + b_query
    low = tl.maximum(ahead + tile * (BT // BR) - window, 0)
    last = ahead + tile * (BT // BR) + BT // BR - 1
    high = tl.minimum(last + 1 if CAUSAL else last + 1 + window, S)
    steps = tl.cdiv(tl.maximum(high - low, 0), BS)
    b_peak = tl.full([BT], LOWEST, tl.float32)
    for step in tl.range(0, steps + tl.cdiv(sinks, BS), num_stages=STAGES):
        begin = tl.where(step < steps, low + step * BS, first + (step - steps) * BS)
        b_key = begin + tl.arange(0, BS)
        seen = b_key < S
        if HAS_MASK:
            seen = seen & (tl.load(p_mask + batch * S + b_key, mask=seen, other=0) != 0)
        b_s = tl.dot(
            b_q, tl.trans(load_rows(k, begin, seen, BS, D, BD, False)), input_precision=PRECISION
        )
        b_distance = b_place[:, None] - b_key[None, :]
        b_taken = is_near(b_distance, window, CAUSAL) | (b_key - first < sinks)[None, :]
        b_taken = b_taken & seen[None, :]
        if CAUSAL:
            b_taken = b_taken & (b_distance >= 0)
        b_peak = tl.maximum(b_peak, tl.max(tl.where(b_taken, b_s, LOWEST), 1))
    b_peak = tl.where(b_peak == LOWEST, 0.0, b_peak)
    tl.store(p_peaks + (index * R + b_member) * T + b_query, b_peak, mask=ok)


@triton.jit
def score_steps(
    b_q, b_query, b_row, p_keys, p_mask, p_peaks, p_scores, p_tops, first, first_page, steps, ok,
    window, sinks, page, ahead, pages, groups, S, stride_kt, stride_kd,
    BR: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr,
    TOKENS: tl.constexpr, ROUNDS: tl.constexpr, GROUP: tl.constexpr, IS_EVEN: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PEAKS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, IS_INNER: tl.constexpr,
):  # fmt: skip
    """Scores from ``first_page`` on; IS_INNER: all keys are there, and none is near or a sink."""
    columns, lanes = tl.arange(0, BD), tl.arange(0, BP * TOKENS)
    # Tokens of a page lie in one thread of a large tile, and in one warp of a small one.
    b_lane, b_token = lanes % BP, lanes // BP
    if BT < 64:
        b_lane, b_token = lanes // TOKENS, lanes % TOKENS
    b_peak = tl.zeros([BT], tl.float32)
    if PEAKS:
        b_peak = tl.load(p_peaks, mask=ok, other=0.0)
    b_best = tl.full([BT, BP], LOWEST, tl.float32)
    b_top = tl.full([BT // BR], LOWEST, tl.float32)
    for step in tl.range(0, steps * ROUNDS, num_stages=STAGES):
        begin, b_of_page = first_page + step // ROUNDS * BP, step % ROUNDS * TOKENS + b_token
        b_key = first + (begin + b_lane) * page + b_of_page
        seen = (b_of_page < page) & (b_key < S)
        if HAS_MASK:
            seen = seen & (tl.load(p_mask + b_key, mask=seen, other=0) != 0)
        p_in = p_keys + b_key.to(tl.int64)[:, None] * stride_kt + columns[None, :] * stride_kd
        if IS_INNER and IS_EVEN and not HAS_MASK and D == BD:
            b_k = tl.load(p_in)
        else:
            b_k = tl.load(p_in, mask=seen[:, None] & (columns < D)[None, :], other=0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if not IS_INNER:
            b_distance = (ahead + b_query)[:, None] - b_key[None, :]
            b_free = (seen & (b_key - first >= sinks))[None, :]
            if not CAUSAL:
                b_distance = tl.abs(b_distance)
            b_s = tl.where(b_free & (b_distance > window), b_s, LOWEST)
        elif HAS_MASK or not IS_EVEN:
            b_s = tl.where(seen[None, :], b_s, LOWEST)
        if BT < 64:
            b_new = tl.max(tl.reshape(b_s, [BT, BP, TOKENS]), 2)
        else:
            b_new = tl.max(tl.reshape(b_s, [BT, TOKENS, BP]), 1)
        if ROUNDS > 1:
            b_best = tl.where(step % ROUNDS == 0, b_new, tl.maximum(b_best, b_new))
        else:
            b_best = b_new
        b_found = b_best - b_peak[:, None]
        # What is no number is not chosen.
        b_found = tl.where(ok[:, None] & (b_found == b_found), b_found, LOWEST)
        if BR > 1:
            b_found = tl.max(tl.reshape(b_found, [BT // BR, BR, BP]), 1)
        is_last = step % ROUNDS == ROUNDS - 1
        b_page = begin + tl.arange(0, BP)
        p_out = p_scores + b_row.to(tl.int64)[:, None] * pages + b_page[None, :]
        there = (b_row >= 0) & is_last
        tl.store(p_out, b_found, mask=there[:, None] & (b_page < pages)[None, :])
        if GROUP > 0:
            b_new_top = tl.max(b_found, 1)
            b_top = tl.where(begin % GROUP == 0, b_new_top, tl.maximum(b_top, b_new_top))
            p_out = p_tops + b_row.to(tl.int64) * groups + begin // GROUP
            is_last = is_last & (begin % GROUP == GROUP - BP) & (begin // GROUP < groups)
            tl.store(p_out, b_top, mask=(b_row >= 0) & is_last)


@triton.jit
def edge_units(low, high, sinks, end, window, unit, units, CAUSAL: tl.constexpr):
    """From which of a strip's units, ``unit`` keys each, to which anything is hidden.

    Places of queries, the end of the sinks and that of all keys are counted from its first key.
    """
    begin = tl.minimum(tl.maximum(low - window, 0) // unit, units)
    over = units
    if not CAUSAL:
        over = tl.minimum(tl.cdiv(tl.maximum(high + window + 1, 0), unit), units)
    if sinks > 0:
        over = tl.maximum(tl.where(begin < over, over, 0), tl.minimum(tl.cdiv(sinks, unit), units))
        begin = 0
    if end < unit * units:
        begin = tl.where(begin < over, tl.minimum(begin, end // unit), end // unit)
        over = units
    return begin, over


@triton.jit
def page_scores_kernel(
    p_q, p_k, p_mask, p_first, p_peaks, p_scores, p_tops, window, sinks, page, ahead, first_query,
    count, pages, groups, row_tiles, page_tiles, T, S, HK,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    R: tl.constexpr, BR: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    BP: tl.constexpr, TOKENS: tl.constexpr, ROUNDS: tl.constexpr, STEPS: tl.constexpr,
    GROUP: tl.constexpr, IS_EVEN: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    PEAKS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """Scores of STEPS · BP pages for ``count`` queries from ``first_query`` on.

    They go to ``[B·HK, count, pages]``, and the largest of every GROUP pages to ``[B·HK, count,
    groups]``. Groups that no query of a tile of rows can see are not written.
    """
    wait_for_launch(FOLLOWS)
    row_tile, rest = tl.program_id(0) % row_tiles, tl.program_id(0) // row_tiles
    page_tile, index = rest % page_tiles, (rest // page_tiles).to(tl.int64)
    batch, head = index // HK, index % HK
    first = first_valid(p_first, batch, HAS_MASK)
    low_place = ahead + first_query + row_tile * (BT // BR)
    high_place = low_place + BT // BR - 1
    first_page = page_tile * STEPS * BP
    low_key = first + first_page * page
    steps = tl.minimum(STEPS, tl.cdiv(pages - first_page, BP))
    if CAUSAL:
        if low_key > high_place:
            return
        steps = tl.minimum(steps, tl.cdiv(high_place - low_key + 1, BP * page))
    UNIT: tl.constexpr = max(GROUP // BP, 1)
    units = tl.cdiv(steps, UNIT)
    edge, inner = edge_units(
        low_place - low_key, high_place - low_key, first + sinks - low_key, S - low_key, window,
        UNIT * BP * page, units, CAUSAL,
    )  # fmt: skip
    rows = tl.arange(0, BT)
    b_row, b_member = row_tile * (BT // BR) + rows // BR, rows % BR
    ok = (b_row < count) & (b_member < R)
    b_query = first_query + b_row
    b_q = load_group(
        p_q, batch, head * R, b_query, b_member, ok, stride_qb, stride_qh, stride_qt, stride_qd,
        D, BD,
    )  # fmt: skip
    if BD <= 32:
        # Not as it was loaded: it is multiplied from registers, as shared memory has no time.
        b_q = tl.where(ok[:, None], b_q, tl.zeros_like(b_q))
    p_peaks += (index * R + b_member) * T + b_query
    p_keys = p_k + batch * stride_kb + head * stride_kh
    b_row = row_tile * (BT // BR) + tl.arange(0, BT // BR)
    b_row = tl.where(b_row < count, b_row, -1)
    p_scores += index * count * pages
    p_tops += index * count * groups
    begin, end = 0, edge
    for part in tl.static_range(3):
        score_steps(
            b_q, b_query, b_row, p_keys, p_mask + batch * S, p_peaks, p_scores, p_tops, first,
            first_page + begin * UNIT * BP, (end - begin) * UNIT, ok, window, sinks, page, ahead,
            pages, groups, S, stride_kt, stride_kd, BR, D, BD, BT, BP, TOKENS, ROUNDS, GROUP,
            IS_EVEN, CAUSAL, HAS_MASK, PEAKS, PRECISION, STAGES, part != 1,
        )  # fmt: skip
        begin = end
        end = inner if part == 0 else units


@triton.jit
def count_from(b_score, bound):
    """How many numbers reach a bound."""
    return tl.sum((b_score >= bound).to(tl.int32), 0)


@triton.jit
def pick_kernel(
    p_scores, p_found, p_first, p_picked, page, ahead, first_query, count, pages, candidates,
    segments, P, HK, rows_before, rows,
    WIDE: tl.constexpr, SETS: tl.constexpr, FILL: tl.constexpr, EACH: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, IS_FIRST: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """The P best of one segment of a row's candidates, ascending; -1 where there are fewer.

    Candidates are all pages, or in later rounds those that the round before left, or the EACH pages
    of every group that it left; while groups are picked, they are the pages here. What is picked
    goes to ``[B·HK, rows, segments, P]``, that of row 0 behind ``rows_before`` others.
    """
    wait_for_launch(FOLLOWS)
    segment, rest = tl.program_id(0) % segments, tl.program_id(0) // segments
    row, index = rest % count, (rest // count).to(tl.int64)
    places = segment * WIDE + tl.arange(0, WIDE)
    p_scores += (index * count + row) * pages
    if IS_FIRST:
        known = places < pages
        if CAUSAL:
            first = first_valid(p_first, index // HK, HAS_MASK)
            known = known & (first + places * page <= ahead + first_query + row)
        b_page = places
    else:
        p_in = p_found + (index * count + row) * (candidates // EACH) + places // EACH
        b_page = tl.load(p_in, mask=places < candidates, other=-1) * EACH + places % EACH
        b_page = tl.max_contiguous(tl.multiple_of(b_page, EACH), EACH)
        known = (b_page >= 0) & (b_page < pages)
    b_score = tl.load(p_scores + b_page, mask=known, other=LOWEST)
    high = tl.max(b_score, 0)
    low = tl.full([], -3.0e38, tl.float32)
    over = tl.full([], float("inf"), tl.float32)
    taken_over = tl.full([], 0, tl.int32)
    reached = count_from(b_score, low)
    if reached > P:
        if SETS > 0:
            # At least P sets reach what the P-th largest of their maxima does.
            b_peak = tl.max(tl.reshape(b_score, [WIDE // SETS, SETS]), 0)
            known_sets = count_from(b_peak, low)
            if known_sets >= P:
                below = tl.min(tl.where(b_peak >= low, b_peak, high), 0)
                above, number, step = high, known_sets, 0
                while (step < 12) & (number > P + P // 8):
                    middle = below * 0.5 + above * 0.5
                    reach = count_from(b_peak, middle)
                    number = tl.where(reach >= P, reach, number)
                    below = tl.where(reach >= P, middle, below)
                    above = tl.where(reach >= P, above, middle)
                    step += 1
                low = below
                reached = count_from(b_score, low)
        highest = count_from(b_score, high)
        if highest >= P:
            low, reached = high, P
        else:
            over, taken_over = high, highest
            low = tl.maximum(low, tl.min(tl.where(b_score >= low, b_score, high), 0))
        goes_on = reached > P
        while goes_on:
            middle = low * 0.5 + over * 0.5
            goes_on = (middle > low) & (middle < over)
            if goes_on:
                reach = count_from(b_score, middle)
                if reach >= P:
                    low, reached = middle, reach
                else:
                    over, taken_over = middle, reach
                goes_on = reached > P
    b_sure = b_score >= over
    b_maybe = (b_score >= low) & (b_score < over)
    # Both counts in one running sum.
    b_upto = tl.cumsum(tl.where(b_sure, 1 << 16, b_maybe.to(tl.int32)), 0)
    b_rank = b_upto & 0xFFFF
    wanted = P - taken_over
    b_taken = b_sure | (b_maybe & (b_rank <= wanted))
    b_slot = (b_upto >> 16) + tl.minimum(b_rank, wanted) - 1
    p_out = p_picked + ((index * rows + rows_before + row) * segments + segment) * P
    tl.store(p_out + b_slot, b_page, mask=b_taken & (b_slot < P))
    slots = tl.arange(0, FILL)
    found = tl.sum(b_taken.to(tl.int32), 0)
    empty = (slots >= found) & (slots < P)
    tl.store(p_out + slots, tl.full([FILL], -1, tl.int32), mask=empty)
