"""From the pages of every query to the queries of every page, in order and without sorting.

A line is the queries of one (sample, key head), cut into parts of ``chunk`` queries so that what
their pages write fits in memory. Of every part and page there is one bit per query; lists are these
bits in order. Sinks are pages that every query has: a part's pages are SINK pages, then all
pages, V together, and a query's *slots* the SINK pages, then its P. An *entry* is query · slots +
slot, counted in its part. A list is cut into *segments* of C entries, and a segment is a program's.

1. ``mark`` sets the bits. Atomic operations that set bits give the same in any order.
2. ``count`` adds them up; running sums say where lists begin.
3. ``list`` writes entries, and a table of segments: page and first entry.

Dimension legend: see `lln.kernels.pages.triton_page_choice`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.keys.triton_keys_select import ones


@triton.jit
def mark_kernel(
    p_chosen, p_bits, first_part, parts, chunk, tiles, words, slots, sink_pages, V, T, P,
    BQ: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Set the bits of BQ queries: ``[parts here, V, words]``, zero before."""
    tile, local = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    part = first_part + local
    b_query = tile * BQ + tl.arange(0, BQ)
    b_slot = tl.arange(0, BP)
    token = part % parts * chunk
    ok = ((b_query < chunk) & (token + b_query < T))[:, None] & (b_slot < slots)[None, :]
    b_own = b_slot - sink_pages
    p_in = p_chosen + ((part // parts) * T + token + b_query)[:, None] * P + b_own[None, :]
    b_page = tl.load(p_in, mask=ok & (b_own >= 0)[None, :], other=0)
    ok = ok & (b_page >= 0)
    b_page = tl.where((b_own >= 0)[None, :], b_page + sink_pages, b_slot[None, :])
    ok = ok & (b_page < V)
    p_out = p_bits + (local * V + b_page) * words + (b_query // 32)[:, None]
    b_bit = tl.broadcast_to((tl.full([BQ], 1, tl.int32) << (b_query % 32))[:, None], [BQ, BP])
    tl.atomic_or(p_out, b_bit, mask=ok, sem="relaxed")


@triton.jit
def count_kernel(p_bits, p_counts, words, V, BV: tl.constexpr, BW: tl.constexpr):
    """The entries of BV pages: ``[parts here, V]``."""
    tiles = tl.cdiv(V, BV)
    tile, local = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b_page, b_word = tile * BV + tl.arange(0, BV), tl.arange(0, BW)
    p_in = p_bits + (local * V + b_page)[:, None] * words + b_word[None, :]
    b_count = tl.zeros([BV, BW], tl.int32)
    for at in range(0, words, BW):
        ok = (b_page < V)[:, None] & (at + b_word < words)[None, :]
        b_count += ones(tl.load(p_in + at, mask=ok, other=0))
    tl.store(p_counts + local * V + b_page, tl.sum(b_count, 1), mask=b_page < V)


@triton.jit
def list_kernel(
    p_chosen, p_bits, p_counts, p_ends, p_segment_ends, p_order, p_table, first_part, parts, chunk,
    words, slots, sink_pages, V, T, P, most,
    BW: tl.constexpr, BE: tl.constexpr, BP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Entries and segments of one page: ``[parts here, chunk · slots]`` and ``[…, most, 2]``."""
    page, local = tl.program_id(0) % V, (tl.program_id(0) // V).to(tl.int64)
    count, end = tl.load(p_counts + local * V + page), tl.load(p_ends + local * V + page)
    if count == 0:
        return
    first, segments = end - count, tl.cdiv(count, C)
    segment = tl.load(p_segment_ends + local * V + page) - segments
    for number in range(segments):
        p_out = p_table + (local * most + segment + number) * 2
        tl.store(p_out, page)
        tl.store(p_out + 1, first + number * C)
    p_order += local * chunk * slots
    b_lane, b_slot = tl.arange(0, BW), tl.arange(0, BP)
    place = first
    for at in range(0, words, BW):
        p_in = p_bits + (local * V + page) * words + at + b_lane
        b_word = tl.load(p_in, mask=at + b_lane < words, other=0)
        b_number = ones(b_word)
        b_place = place + tl.cumsum(b_number, 0) - b_number
        place += tl.sum(b_number, 0)
        while tl.max((b_word != 0).to(tl.int32), 0) > 0:
            # The lowest bit of every word, which is then taken off.
            b_low = b_word & -b_word
            b_query = (at + b_lane) * 32 + ones(b_low - 1)
            tl.store(p_order + b_place, b_query * slots + page, mask=b_word != 0)
            b_place += (b_word != 0).to(tl.int32)
            b_word = b_word ^ b_low
    if page >= sink_pages:
        # Which of its query's slots the page is.
        tl.debug_barrier()
        token = ((first_part + local) // parts) * T + (first_part + local) % parts * chunk
        for at in range(first, end, BE):
            b_at = at + tl.arange(0, BE)
            b_query = tl.load(p_order + b_at, mask=b_at < end, other=page) - page
            b_query = b_query // slots
            p_in = p_chosen + (token + b_query)[:, None] * P + b_slot[None, :]
            ok = (b_at < end)[:, None] & (b_slot < P)[None, :]
            b_same = tl.load(p_in, mask=ok, other=-1) == page - sink_pages
            b_own = tl.max(tl.where(b_same, b_slot[None, :], 0), 1)
            tl.debug_barrier()
            tl.store(p_order + b_at, b_query * slots + sink_pages + b_own, mask=b_at < end)
