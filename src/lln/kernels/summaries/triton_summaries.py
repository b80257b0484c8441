"""Builds the summary of keys and values: of a range of tokens, of a split, of all splits merged.

A partial summary is the largest exponent of every slot (peak), and relative to it the slot's mass
and its weighted sum of values. The states of causal walks have the same three tensors.

Dimension legend: see `lln.kernels.launching.triton_steps`; SH summary heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import (
    NEVER,
    add_tile,
    exponential,
    find_program,
    find_stretch,
    load_rows,
    load_scale,
    load_values,
    rows_inside,
    rows_of,
    token_ok,
    widen_turned,
)


@triton.jit
def empty_partial(BD: tl.constexpr, BE: tl.constexpr):
    """The summary of no tokens: peak ``[BD]``, mass ``[BD]``, sum ``[BD, BE]``."""
    b_peak = tl.full([BD], NEVER, tl.float32)
    return b_peak, tl.zeros([BD], tl.float32), tl.zeros([BD, BE], tl.float32)


@triton.jit
def load_partial(
    p_peak, p_mass, p_sum, part, slots, BD: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """Some slots of one of the partial summaries in memory."""
    b_peak, b_mass = tl.load(p_peak + part * BD + slots), tl.load(p_mass + part * BD + slots)
    p_in = p_sum + part * BD * BE + slots[:, None] * BE + tl.arange(0, BE)[None, :]
    return b_peak, b_mass, tl.load(p_in)


@triton.jit
def store_partial(
    p_peak, p_mass, p_sum, part, slots, b_peak, b_mass, b_sum, BD: tl.constexpr, BE: tl.constexpr
):
    """The opposite of `load_partial`."""
    tl.store(p_peak + part * BD + slots, b_peak)
    tl.store(p_mass + part * BD + slots, b_mass)
    p_out = p_sum + part * BD * BE + slots[:, None] * BE + tl.arange(0, BE)[None, :]
    tl.store(p_out, b_sum)


@triton.jit
def merge_partials(b_peak, b_mass, b_sum, b_other, b_other_mass, b_other_sum):
    """Merge two partial summaries into that of all their tokens."""
    b_new = tl.maximum(b_peak, b_other)
    b_old, b_add = exponential(b_peak - b_new), exponential(b_other - b_new)
    b_mass = b_mass * b_old + b_other_mass * b_add
    return b_new, b_mass, b_sum * b_old[:, None] + b_other_sum * b_add[:, None]


@triton.jit
def summarise_range(
    k, v, p_mask, start, end, beta, seed, drop_first, dropout_p,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
    EVEN: tl.constexpr, HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, TOTAL: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The summary of tokens ``start … end − 1`` of one head: peak, mass and weighted sum.

    The last result is the sum of the keys ``[BD]`` if TOTAL, else zeros.
    """
    b_peak, b_mass, b_sum = empty_partial(BD, BE)
    b_total = tl.zeros([BD], tl.float32)
    for first in tl.range(start, end, BT, num_stages=STAGES):
        inside = rows_inside(first, end, BT, HAS_MASK)
        ok = token_ok(p_mask, first, end, BT, HAS_MASK)
        b_k = load_rows(k, first, inside, BT, D, BD, EVEN)
        b_v, _ = load_values(
            v, first, inside, ok, seed, drop_first, dropout_p, BT, E, BE, EVEN, HAS_MASK,
            HAS_DROPOUT,
        )  # fmt: skip
        b_turned = widen_turned(b_k, BD)
        b_x = b_turned * beta
        if not EVEN:
            b_x = tl.where(ok[None, :], b_x, NEVER)
            b_turned = tl.where(ok[None, :], b_turned, 0.0)
        if TOTAL:
            b_total += tl.sum(b_turned, 1)
        b_peak, b_mass, b_sum = add_tile(b_peak, b_mass, b_sum, b_x, b_v, PRECISION)
    return b_peak, b_mass, b_sum, b_total


@triton.jit(do_not_specialize=["seed"])
def summarise_kernel(
    p_k, p_v, p_mask, p_beta, p_peak, p_mass, p_sum, p_starts,
    beta, seed, dropout_p, S, SH, program_tokens,
    stride_kb, stride_kh, stride_kt, stride_kd, stride_vb, stride_vh, stride_vt, stride_vd,
    KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_BETA: tl.constexpr, EVEN: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PACKED: tl.constexpr, SHIFTED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One split of one (sample, summary head) → a partial summary in float32.

    SHIFTED: splits begin where the blocks of a causal walk begin.
    """
    wait_for_launch(FOLLOWS)
    split, index, part = find_program()
    batch, head, begin, start, end = find_stretch(
        p_starts, split, index, program_tokens, S, SH, PACKED, SHIFTED
    )
    key_head = head // KG
    b_peak, b_mass, b_sum, _ = summarise_range(
        rows_of(p_k, batch, key_head, begin, stride_kb, stride_kh, stride_kt, stride_kd),
        rows_of(p_v, batch, key_head, begin, stride_vb, stride_vh, stride_vt, stride_vd),
        p_mask + batch * S, start, end, load_scale(p_beta, beta, index, HAS_BETA),
        seed, (batch * (SH // KG) + key_head) * S, dropout_p,
        D, E, BD, BE, BT, EVEN, HAS_MASK, HAS_DROPOUT, False, PRECISION, STAGES,
    )  # fmt: skip
    slots = tl.arange(0, BD)
    store_partial(p_peak, p_mass, p_sum, part, slots, b_peak, b_mass, b_sum, BD, BE)


@triton.jit
def merge_parts(
    p_peak, p_mass, p_sum, index, parts, slots,
    BD: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Log-mass ``[ROWS]`` and centroids ``[ROWS, BE]`` of slots, their parts in a fixed order."""
    b_peak, b_mass, b_sum = empty_partial(ROWS, BE)
    for part in range(parts):
        place = index * parts + part
        b_other, b_more, b_add = load_partial(p_peak, p_mass, p_sum, place, slots, BD, BE)
        b_peak, b_mass, b_sum = merge_partials(b_peak, b_mass, b_sum, b_other, b_more, b_add)
    return b_peak + tl.log(b_mass), b_sum / b_mass[:, None]


@triton.jit
def store_summary(
    p_log_mass, p_centroid, index, slots, b_log_mass, b_c,
    D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Write some slots of a summary."""
    columns = tl.arange(0, BE)
    tl.store(p_log_mass + index * D + slots, b_log_mass, mask=slots < D)
    p_out = p_centroid + index * D * E + slots[:, None] * E + columns[None, :]
    ok = (slots < D)[:, None] & (columns < E)[None, :]
    tl.store(p_out, b_c.to(p_centroid.dtype.element_ty), mask=ok)


@triton.jit
def merge_kernel(
    p_peak, p_mass, p_sum, p_log_mass, p_centroid, parts,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    """Merge ROWS slots of the partial summaries."""
    wait_for_launch(FOLLOWS)
    index = tl.program_id(1).to(tl.int64)
    slots = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b_log_mass, b_c = merge_parts(p_peak, p_mass, p_sum, index, parts, slots, BD, BE, ROWS)
    store_summary(p_log_mass, p_centroid, index, slots, b_log_mass, b_c, D, E, BE)
