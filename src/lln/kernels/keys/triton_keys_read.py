"""Attention over own block, chosen keys and slots: the forward pass, and its parts.

A program takes one group of queries of one head and never leaves the chip: slots, block and the
first tile of chosen keys together, then the other tiles, under one running softmax
(`lln.eager.key_attention` has the formula).
It writes the output and, for the backward, the logarithm of each row's normaliser and what was
added to the logits of the slots.

Keys may have more rows than queries: chosen ones can lie behind the tokens of the call. ``held`` is
how many keys the summary holds, unless a mask says it for every sample.

Dimension legend: see `triton_steps`; BM ≥ group, BW ≥ W tokens in a block, BK chosen
keys in a tile (MORE: there are more than fit one), R query heads per key head, SR query heads per
summary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_steps import (
    NEVER,
    exponential,
    hide_rows,
    load_queries,
    load_rows,
    load_scale,
    rows_of,
    store_rows,
    widen,
)


@triton.jit
def load_chosen(
    rows, b_index, b_seen,
    BK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The rows ``[BK, BD]`` of the chosen tokens; zero where none was chosen."""
    p_rows, _, stride_t, stride_d = rows
    columns = tl.arange(0, BD)
    p_in = p_rows + b_index.to(tl.int64)[:, None] * stride_t + columns[None, :] * stride_d
    return tl.load(p_in, mask=b_seen[:, None] & (columns < D)[None, :], other=0)


@triton.jit
def load_near(
    rows, first, inside, ok,
    BT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A block of keys or values; masked rows are zero. EVEN: all are there."""
    b_tile = load_rows(rows, first, inside, BT, D, BD, EVEN)
    if not EVEN:
        b_tile = hide_rows(b_tile, ok)
    return b_tile


@triton.jit
def count_chosen(p_chosen, K, BK: tl.constexpr):
    """How many keys a group has chosen."""
    number = 0
    for first in range(0, K, BK):
        at = first + tl.arange(0, BK)
        number += tl.sum((tl.load(p_chosen + at, mask=at < K, other=-1) >= 0).to(tl.int32), 0)
    return number


@triton.jit
def slot_level(offset, held, near, chosen):
    """Offset plus ln ρ, what is added to the logits of the slots; NEVER if every key is exact."""
    rest = held - near - chosen
    share = tl.log(tl.maximum(rest, 1).to(tl.float32) / tl.maximum(held, 1).to(tl.float32))
    return tl.where(rest > 0, offset + share, NEVER)


@triton.jit
def slot_logits(b_q, alpha, b_slot, level, b_centre, scale, D: tl.constexpr, BD: tl.constexpr):
    """Logits ``[BM, BD]`` of the slots, and the queries in float32.

    ``level`` is one number or one per row. ``b_slot`` is L - βμ, with μ the mean key: slots are
    those of centred keys, and scale · q·μ puts them beside the scores of keys that are not centred.
    """
    b_wide = widen(b_q, BD)
    b_row = tl.sum(b_wide * b_centre[None, :], 1) * scale + level
    b_x = b_wide * alpha + b_slot[None, :] + b_row[:, None]
    if D < BD:
        b_x = tl.where((tl.arange(0, BD) < D)[None, :], b_x, NEVER)
    return tl.maximum(b_x, NEVER), b_wide


@triton.jit
def score_rows(b_q, b_k, ok, scale, EVEN: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of keys; NEVER for those that are not there. EVEN: all are."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
    if EVEN:
        return b_s
    return tl.where(ok[None, :], b_s, NEVER)


@triton.jit
def weights_of(b_s, b_level, EVEN: tl.constexpr):
    """e^(s - level); zero where a key is not there.

    EVEN: every row sees a key, its level is finite, and e^(NEVER - level) is zero by itself.
    """
    b_p = exponential(b_s - b_level[:, None])
    if EVEN:
        return b_p
    return tl.where(b_s > NEVER * 0.5, b_p, 0.0)


@triton.jit
def add_keys(b_peak, b_mass, b_out, b_s, b_v, PRECISION: tl.constexpr):
    """Add scores ``[BM, BK]`` and values to running rows."""
    b_new = tl.maximum(b_peak, tl.max(b_s, 1))
    b_shrink = exponential(b_peak - b_new)
    b_p = weights_of(b_s, b_new, False)
    b_mass = b_mass * b_shrink + tl.sum(b_p, 1)
    b_out = tl.dot(b_p.to(b_v.dtype), b_v, b_out * b_shrink[:, None], input_precision=PRECISION)
    return b_new, b_mass, b_out


@triton.jit
def group_place(p_gaps, batch, group, W, GROUP: tl.constexpr, HAS_MASK: tl.constexpr):
    """First token of a group, and of its block."""
    first = group * GROUP
    block = first // W * W
    if HAS_MASK:
        gap = tl.load(p_gaps + batch)
        first, block = first - gap, block - gap
    return first, block


@triton.jit
def tokens_ok(p_mask, first, size, T, BT: tl.constexpr, HAS_MASK: tl.constexpr):
    """Which of ``size`` tokens exist, and which of them are not masked."""
    tokens = first + tl.arange(0, BT)
    inside = (tokens >= 0) & (tokens < T) & (tl.arange(0, BT) < size)
    ok = inside
    if HAS_MASK:
        ok = inside & (tl.load(p_mask + tokens, mask=inside, other=0) != 0)
    return inside, ok


@triton.jit
def load_summary(
    p_log_mass, p_centroid, p_centre, p_beta, beta, summary,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, HAS_BETA: tl.constexpr,
):  # fmt: skip
    """L - βμ ``[BD]``, C ``[BD, BE]`` and μ ``[BD]``."""
    slots, columns = tl.arange(0, BD), tl.arange(0, BE)
    b_log_mass = tl.load(p_log_mass + summary * D + slots, mask=slots < D, other=0.0)
    p_in = p_centroid + summary * D * E + slots[:, None] * E + columns[None, :]
    b_c = tl.load(p_in, mask=(slots < D)[:, None] & (columns < E)[None, :], other=0)
    b_centre = tl.load(p_centre + summary * D + slots, mask=slots < D, other=0.0)
    return b_log_mass - load_scale(p_beta, beta, summary, HAS_BETA) * b_centre, b_c, b_centre


@triton.jit
def keys_read_kernel(
    p_q, p_k, p_v, p_o, p_lse, p_level, p_log_mass, p_centroid, p_centre, p_chosen, p_mask, p_gaps,
    p_held, p_alpha, p_beta, p_offset, alpha, beta, offset, scale, held, T, H, G, K,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_ob, stride_oh, stride_ot, stride_od,
    W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BM: tl.constexpr, BW: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    R: tl.constexpr, SR: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr,
    HAS_OFFSET: tl.constexpr, MORE: tl.constexpr, HAS_MASK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One group of one (sample, query head)."""
    group, index = tl.program_id(0) % G, (tl.program_id(0) // G).to(tl.int64)
    batch, head = index // H, index % H
    first, block = group_place(p_gaps, batch, group, W, GROUP, HAS_MASK)
    q = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, head // R, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, head // R, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    o = rows_of(p_o, batch, head, 0, stride_ob, stride_oh, stride_ot, stride_od)
    p_mask += batch * T
    p_chosen += (index * G + group) * K
    # All loads of the first tiles come before any arithmetic, so that they overlap.
    places = tl.arange(0, BK)
    b_index = tl.load(p_chosen + places, mask=places < K, other=-1)
    b_seen = b_index >= 0
    inside, row_ok = tokens_ok(p_mask, first, GROUP, T, BM, HAS_MASK)
    near_inside, near_ok = tokens_ok(p_mask, block, W, T, BW, HAS_MASK)
    if HAS_MASK:
        held = tl.load(p_held + batch)
    b_q = load_queries(q, first, inside, row_ok, BM, D, BD, EVEN, HAS_MASK)
    b_k = load_near(k, block, near_inside, near_ok, BW, D, BD, EVEN)
    b_v = load_near(v, block, near_inside, near_ok, BW, E, BE, EVEN)
    b_far_k = load_chosen(k, b_index, b_seen, BK, D, BD)
    b_far_v = load_chosen(v, b_index, b_seen, BK, E, BE)
    b_slot, b_c, b_centre = load_summary(
        p_log_mass, p_centroid, p_centre, p_beta, beta, index // SR, D, E, BD, BE, HAS_BETA
    )
    chosen = tl.sum(b_seen.to(tl.int32), 0)
    if MORE:
        chosen += count_chosen(p_chosen + BK, K - BK, BK)
    near = tl.sum(near_ok.to(tl.int32), 0)
    level = slot_level(load_scale(p_offset, offset, index, HAS_OFFSET), held, near, chosen)
    tl.store(p_level + index * G + group, level)

    own_alpha = load_scale(p_alpha, alpha, index, HAS_ALPHA)
    b_x, _ = slot_logits(b_q, own_alpha, b_slot, level, b_centre, scale, D, BD)
    b_s = score_rows(b_q, b_k, near_ok, scale, EVEN, PRECISION)
    b_far = score_rows(b_q, b_far_k, b_seen, scale, False, PRECISION)
    b_peak = tl.maximum(tl.maximum(tl.max(b_x, 1), tl.max(b_s, 1)), tl.max(b_far, 1))
    b_p = weights_of(b_x, b_peak, EVEN)
    b_mass = tl.sum(b_p, 1)
    b_out = tl.dot(b_p.to(b_c.dtype), b_c, input_precision=PRECISION)
    b_p = weights_of(b_s, b_peak, EVEN)
    b_mass += tl.sum(b_p, 1)
    b_out = tl.dot(b_p.to(b_v.dtype), b_v, b_out, input_precision=PRECISION)
    b_p = weights_of(b_far, b_peak, EVEN)
    b_mass += tl.sum(b_p, 1)
    b_out = tl.dot(b_p.to(b_v.dtype), b_far_v, b_out, input_precision=PRECISION)
    if MORE:
        for at in tl.range(BK, K, BK, num_stages=STAGES):
            b_index = tl.load(p_chosen + at + places, mask=at + places < K, other=-1)
            b_seen = b_index >= 0
            b_far_k = load_chosen(k, b_index, b_seen, BK, D, BD)
            b_far_v = load_chosen(v, b_index, b_seen, BK, E, BE)
            b_far = score_rows(b_q, b_far_k, b_seen, scale, False, PRECISION)
            b_peak, b_mass, b_out = add_keys(b_peak, b_mass, b_out, b_far, b_far_v, PRECISION)

    b_norm = tl.where(b_mass > 0, b_mass, 1.0)
    store_rows(o, first, b_out * (1.0 / b_norm)[:, None], inside, BM, E, BE, EVEN)
    # Rows that see nothing get a normaliser that makes all their weights zero.
    b_lse = tl.where(b_mass > 0, b_peak + tl.log(b_norm), -NEVER)
    tl.store(p_lse + index * T + first + tl.arange(0, BM), b_lse, mask=inside)
