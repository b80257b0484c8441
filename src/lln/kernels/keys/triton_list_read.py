"""Attention where every query has keys of its own: the lists of its two features; forward pass.

`triton_list_choice` says what lists and entries are. Entries are sorted by feature; a
*run* is up to C of them with the same feature, one after another.

1. ``list_read``: a program takes one run. Its queries are gathered, the keys of their list too, and
   the softmax over that list goes to the entry's own place: output, log-normaliser, and how many
   keys it saw. A row sees no keys of its own block, and by its second feature none that are in
   the list of its first.
2. ``list_join``: a program takes one block. Own block and slots as in `keys_read`, then what both
   entries of a row left, under one normaliser.

Dimension legend: see `triton_keys_read`; F = 2D features, BF ≥ F, L keys in a list, BK
of them in a tile (MORE: there are more than fit one), BM entries in a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.keys.triton_keys_read import (
    add_keys,
    load_chosen,
    load_near,
    load_summary,
    score_rows,
    slot_level,
    slot_logits,
    tokens_ok,
    weights_of,
)
from lln.kernels.launching.triton_steps import (
    NEVER,
    exponential,
    load_queries,
    load_scale,
    quiet_rows,
    rows_of,
    store_rows,
)


@triton.jit
def find_run(p_starts, number, F: tl.constexpr, BF: tl.constexpr, C: tl.constexpr):
    """Feature, first entry and end of the run with that number; nothing between if there is none.

    Runs are counted feature by feature, so that a launch needs to know only how many there can be.
    """
    features = tl.arange(0, BF)
    b_start = tl.load(p_starts + features, mask=features < F, other=0)
    b_end = tl.load(p_starts + features + 1, mask=features < F, other=0)
    b_runs = (b_end - b_start + C - 1) // C
    b_upto = tl.cumsum(b_runs, 0)
    b_before = b_upto - b_runs
    b_mine = (b_before <= number) & (number < b_upto)
    feature = tl.sum(tl.where(b_mine, features, 0), 0)
    first = tl.sum(tl.where(b_mine, b_start + (number - b_before) * C, 0), 0)
    end = tl.sum(tl.where(b_mine, b_end, 0), 0)
    return feature, first, tl.minimum(first + C, end)


@triton.jit
def load_entries(p_order, p_first, first, end, T, BM: tl.constexpr):
    """Entries ``[BM]``, which there are, their tokens, whether by the second feature, the first.

    ``p_first`` points to the strongest feature of every token of the head.
    """
    places = first + tl.arange(0, BM)
    b_there = places < end
    b_entry = tl.load(p_order + places, mask=b_there, other=0)
    b_later = b_entry >= T
    b_token = tl.where(b_later, b_entry - T, b_entry)
    b_first = tl.load(p_first + b_token, mask=b_later, other=0).to(tl.int32)
    return b_entry, b_there, b_token, b_later, b_first


@triton.jit
def load_list(p_list, table, at, L, BK: tl.constexpr, TABLES: tl.constexpr):
    """Keys ``[BK]`` of a list from place ``at`` on, and which are there for either entry of a row.

    With two tables the second entry's list, ``table`` further on, lacks the weakest key.
    """
    places = at + tl.arange(0, BK)
    b_index = tl.load(p_list + places, mask=places < L, other=-1)
    b_known = b_index >= 0
    b_known_later = b_known
    if TABLES == 2:
        b_known_later = tl.load(p_list + table + places, mask=places < L, other=-1) >= 0
    return b_index, b_known, b_known_later


@triton.jit
def visible(
    b_index, b_known, b_known_later, b_there, b_token, b_later, b_first, p_members, gap, words,
    W: tl.constexpr,
):  # fmt: skip
    """Which keys ``[BK]`` of a list the entries ``[BM]`` see."""
    b_home, b_block = (b_index + gap) // W, (b_token + gap) // W
    b_seen = tl.where(b_later[:, None], b_known_later[None, :], b_known[None, :])
    b_seen = b_seen & b_there[:, None] & (b_home[None, :] != b_block[:, None])
    p_in = p_members + (b_index * words)[None, :] + (b_first // 32)[:, None]
    b_word = tl.load(p_in, mask=b_seen & b_later[:, None], other=0)
    return b_seen & (((b_word >> (b_first % 32)[:, None]) & 1) == 0)


@triton.jit
def score_list(b_q, b_k, b_seen, scale, PRECISION: tl.constexpr):
    """Scores ``[BM, BK]``; NEVER for keys that a row does not see."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
    return tl.where(b_seen, b_s, NEVER)


@triton.jit
def load_rows_at(
    rows, b_token, b_there, p_mask,
    BM: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, QUIET: tl.constexpr,
):  # fmt: skip
    """The queries of entries ``[BM, BD]``; QUIET: NaN and infinity in padded ones become zero."""
    b_q = load_chosen(rows, b_token, b_there, BM, D, BD)
    if QUIET:
        b_q = quiet_rows(b_q, tl.load(p_mask + b_token, mask=b_there, other=0) != 0)
    return b_q


@triton.jit
def list_read_kernel(
    p_q, p_k, p_v, p_part, p_part_lse, p_part_seen, p_lists, p_features, p_order, p_starts,
    p_members, p_mask, p_gaps, scale, T, H, L, runs, words, table,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd,
    W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, R: tl.constexpr, TABLES: tl.constexpr,
    MORE: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One run of BM entries of one (sample, query head)."""
    number, index = tl.program_id(0) % runs, (tl.program_id(0) // runs).to(tl.int64)
    feature, first, end = find_run(p_starts + index * (2 * D + 1), number, 2 * D, BF, BM)
    if first >= end:
        return
    batch, head = index // H, index % H
    key_index = index // R
    q = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, head // R, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, head // R, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    p_mask += batch * T
    p_members += key_index * T * words
    p_list = p_lists + (key_index * 2 * D + feature) * L
    gap = 0
    if HAS_MASK:
        gap = tl.load(p_gaps + batch)
    b_index, b_known, b_known_later = load_list(p_list, table, 0, L, BK, TABLES)
    b_entry, b_there, b_token, b_later, b_first = load_entries(
        p_order + index * 2 * T, p_features + index * 2 * T, first, end, T, BM
    )
    b_q = load_rows_at(q, b_token, b_there, p_mask, BM, D, BD, HAS_MASK)
    b_k = load_chosen(k, b_index, b_known, BK, D, BD)
    b_v = load_chosen(v, b_index, b_known, BK, E, BE)
    b_seen = visible(
        b_index, b_known, b_known_later, b_there, b_token, b_later, b_first, p_members, gap, words,
        W,
    )  # fmt: skip
    b_number = tl.sum(b_seen.to(tl.int32), 1)
    b_s = score_list(b_q, b_k, b_seen, scale, PRECISION)
    b_peak = tl.max(b_s, 1)
    b_p = weights_of(b_s, b_peak, False)
    b_mass = tl.sum(b_p, 1)
    b_out = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
    if MORE:
        for at in tl.range(BK, L, BK, num_stages=STAGES):
            b_index, b_known, b_known_later = load_list(p_list, table, at, L, BK, TABLES)
            b_k = load_chosen(k, b_index, b_known, BK, D, BD)
            b_v = load_chosen(v, b_index, b_known, BK, E, BE)
            b_seen = visible(
                b_index, b_known, b_known_later, b_there, b_token, b_later, b_first, p_members,
                gap, words, W,
            )  # fmt: skip
            b_number += tl.sum(b_seen.to(tl.int32), 1)
            b_s = score_list(b_q, b_k, b_seen, scale, PRECISION)
            b_peak, b_mass, b_out = add_keys(b_peak, b_mass, b_out, b_s, b_v, PRECISION)
    b_norm = tl.where(b_mass > 0, b_mass, 1.0)
    b_out = b_out * (1.0 / b_norm)[:, None]
    columns = tl.arange(0, BE)
    rows = index * 2 * T + b_entry
    ok = b_there[:, None] & (columns < E)[None, :]
    p_out = p_part + rows[:, None] * E + columns[None, :]
    tl.store(p_out, b_out.to(p_part.dtype.element_ty), mask=ok)
    b_lse = tl.where(b_mass > 0, b_peak + tl.log(b_norm), NEVER)
    tl.store(p_part_lse + rows, b_lse, mask=b_there)
    tl.store(p_part_seen + rows, b_number, mask=b_there)


@triton.jit
def add_part(
    b_out, b_mass, p_part, p_part_lse, rows, inside, b_peak,
    E: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Add what entries ``[BM]`` left to running rows."""
    columns = tl.arange(0, BE)
    ok = inside[:, None] & (columns < E)[None, :]
    b_part = tl.load(p_part + rows[:, None] * E + columns[None, :], mask=ok, other=0)
    b_lse = tl.load(p_part_lse + rows, mask=inside, other=NEVER)
    b_weight = tl.where(b_lse > NEVER * 0.5, exponential(b_lse - b_peak), 0.0)
    return b_out + b_part.to(tl.float32) * b_weight[:, None], b_mass + b_weight


@triton.jit
def list_join_kernel(
    p_q, p_k, p_v, p_o, p_lse, p_level, p_log_mass, p_centroid, p_centre, p_part, p_part_lse,
    p_part_seen, p_mask, p_gaps, p_held, p_alpha, p_beta, p_offset, alpha, beta, offset, scale, T,
    H, blocks,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_ob, stride_oh, stride_ot, stride_od,
    W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BW: tl.constexpr, R: tl.constexpr, SR: tl.constexpr, HAS_ALPHA: tl.constexpr,
    HAS_BETA: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_MASK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of one (sample, query head): own block, slots, and what its entries left."""
    block, index = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = index // H, index % H
    first, held = block * W, T
    if HAS_MASK:
        first -= tl.load(p_gaps + batch)
        held = tl.load(p_held + batch)
    q = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, head // R, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, head // R, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    o = rows_of(p_o, batch, head, 0, stride_ob, stride_oh, stride_ot, stride_od)
    inside, ok = tokens_ok(p_mask + batch * T, first, W, T, BW, HAS_MASK)
    b_q = load_queries(q, first, inside, ok, BW, D, BD, EVEN, HAS_MASK)
    b_k = load_near(k, first, inside, ok, BW, D, BD, EVEN)
    b_v = load_near(v, first, inside, ok, BW, E, BE, EVEN)
    b_slot, b_c, b_centre = load_summary(
        p_log_mass, p_centroid, p_centre, p_beta, beta, index // SR, D, E, BD, BE, HAS_BETA
    )
    rows = index * 2 * T + first + tl.arange(0, BW)
    b_seen = tl.load(p_part_seen + rows, mask=inside, other=0)
    b_seen += tl.load(p_part_seen + T + rows, mask=inside, other=0)
    b_lse_first = tl.load(p_part_lse + rows, mask=inside, other=NEVER)
    b_lse_second = tl.load(p_part_lse + T + rows, mask=inside, other=NEVER)
    near = tl.sum(ok.to(tl.int32), 0)
    b_level = slot_level(load_scale(p_offset, offset, index, HAS_OFFSET), held, near, b_seen)
    # One place for every row of every block, also where a mask leaves the first block short.
    places = tl.arange(0, BW)
    tl.store(p_level + (index * blocks + block) * W + places, b_level, mask=places < W)

    own_alpha = load_scale(p_alpha, alpha, index, HAS_ALPHA)
    b_x, _ = slot_logits(b_q, own_alpha, b_slot, b_level, b_centre, scale, D, BD)
    b_s = score_rows(b_q, b_k, ok, scale, EVEN, PRECISION)
    b_peak = tl.maximum(tl.max(b_x, 1), tl.max(b_s, 1))
    b_peak = tl.maximum(b_peak, tl.maximum(b_lse_first, b_lse_second))
    b_p = weights_of(b_x, b_peak, EVEN)
    b_mass = tl.sum(b_p, 1)
    b_out = tl.dot(b_p.to(b_c.dtype), b_c, input_precision=PRECISION)
    b_p = weights_of(b_s, b_peak, EVEN)
    b_mass += tl.sum(b_p, 1)
    b_out = tl.dot(b_p.to(b_v.dtype), b_v, b_out, input_precision=PRECISION)
    b_out, b_mass = add_part(b_out, b_mass, p_part, p_part_lse, rows, inside, b_peak, E, BE)
    b_out, b_mass = add_part(b_out, b_mass, p_part, p_part_lse, rows + T, inside, b_peak, E, BE)

    b_norm = tl.where(b_mass > 0, b_mass, 1.0)
    store_rows(o, first, b_out * (1.0 / b_norm)[:, None], inside, BW, E, BE, EVEN)
    # Rows that see nothing get a normaliser that makes all their weights zero.
    b_lse = tl.where(b_mass > 0, b_peak + tl.log(b_norm), -NEVER)
    tl.store(p_lse + index * T + first + tl.arange(0, BW), b_lse, mask=inside)
