"""The slots of attention with exact keys: their summary, and the sums of their gradients.

Slots are those of centred keys, so beside the summary (L, C) of all tokens there is the mean key μ;
the pass that summarises adds the keys up as well, and no other pass reads them for it.

Dimension legend: see `triton_steps`; SH summary heads, SR query heads per summary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_steps import find_program, find_stretch, load_scale, rows_of
from lln.kernels.summaries.triton_summaries import (
    empty_partial,
    load_partial,
    merge_partials,
    store_partial,
    store_summary,
    summarise_range,
)


@triton.jit
def keys_summary_kernel(
    p_k, p_v, p_mask, p_beta, p_peak, p_mass, p_sum, p_total, p_starts, beta, S, SH, program_tokens,
    stride_kb, stride_kh, stride_kt, stride_kd, stride_vb, stride_vh, stride_vt, stride_vd,
    KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_BETA: tl.constexpr, EVEN: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One split of one (sample, summary head) → a partial summary and the sum of its keys."""
    split, index, part = find_program()
    batch, head, begin, start, end = find_stretch(
        p_starts, split, index, program_tokens, S, SH, False, False
    )
    b_peak, b_mass, b_sum, b_total = summarise_range(
        rows_of(p_k, batch, head // KG, begin, stride_kb, stride_kh, stride_kt, stride_kd),
        rows_of(p_v, batch, head // KG, begin, stride_vb, stride_vh, stride_vt, stride_vd),
        p_mask + batch * S, start, end, load_scale(p_beta, beta, index, HAS_BETA), 0, 0, 0.0,
        D, E, BD, BE, BT, EVEN, HAS_MASK, False, True, PRECISION, STAGES,
    )  # fmt: skip
    slots = tl.arange(0, BD)
    store_partial(p_peak, p_mass, p_sum, part, slots, b_peak, b_mass, b_sum, BD, BE)
    tl.store(p_total + part * BD + slots, b_total)


@triton.jit
def keys_merge_kernel(
    p_peak, p_mass, p_sum, p_total, p_held, p_log_mass, p_centroid, p_centre, S, SH, splits,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr,
    HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Merge ROWS slots of the partial summaries, and their entries of the mean key."""
    index = tl.program_id(1).to(tl.int64)
    slots = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b_peak, b_mass, b_sum = empty_partial(ROWS, BE)
    b_total = tl.zeros([ROWS], tl.float32)
    for split in range(splits):
        part = index * splits + split
        b_other, b_more, b_add = load_partial(p_peak, p_mass, p_sum, part, slots, BD, BE)
        b_peak, b_mass, b_sum = merge_partials(b_peak, b_mass, b_sum, b_other, b_more, b_add)
        b_total += tl.load(p_total + part * BD + slots)
    b_centre = b_total / count_keys(p_held, index // SH, S, HAS_MASK)
    tl.store(p_centre + index * D + slots, b_centre, mask=slots < D)
    b_log_mass, b_c = b_peak + tl.log(b_mass), b_sum / b_mass[:, None]
    store_summary(p_log_mass, p_centroid, index, slots, b_log_mass, b_c, D, E, BE)


@triton.jit
def count_keys(p_held, batch, S, HAS_MASK: tl.constexpr):
    """How many keys of a sample are not masked, at least 1, in float32."""
    held = S
    if HAS_MASK:
        held = tl.load(p_held + batch)
    return tl.maximum(held, 1).to(tl.float32)


@triton.jit
def keys_gather_kernel(
    p_dc_parts, p_dl_parts, p_dm_parts, p_centroid, p_held, p_beta, p_dc, p_dl, p_shift, p_dcentre,
    beta, S, SH, splits,
    SR: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr,
    HAS_BETA: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Sum ROWS slots of the partial gradients of one summary, always in the same order.

    Writes dC, dL of every query head, the shift dL − C·dC, and what every key gets through the mean
    key, which enters the slots' logits as −βμ and every row as scale · q·μ.
    """
    index = tl.program_id(1).to(tl.int64)
    slots, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BE)
    slot_ok = slots < D
    ok = slot_ok[:, None] & (columns < E)[None, :]
    places = slots[:, None] * E + columns[None, :]
    b_dc = tl.zeros([ROWS, BE], tl.float32)
    b_dl = tl.zeros([ROWS], tl.float32)
    b_dm = tl.zeros([ROWS], tl.float32)
    for r in range(SR):
        head = index * SR + r
        b_own = tl.zeros([ROWS], tl.float32)
        for split in range(splits):
            part = head * splits + split
            b_dc += tl.load(p_dc_parts + part * D * E + places, mask=ok, other=0.0)
            b_own += tl.load(p_dl_parts + part * D + slots, mask=slot_ok, other=0.0)
            b_dm += tl.load(p_dm_parts + part * D + slots, mask=slot_ok, other=0.0)
        tl.store(p_dl + head * D + slots, b_own, mask=slot_ok)
        b_dl += b_own
    b_c = tl.load(p_centroid + index * D * E + places, mask=ok, other=0).to(tl.float32)
    b_shift = b_dl - tl.sum(b_c * b_dc, 1)
    own_beta = load_scale(p_beta, beta, index, HAS_BETA)
    b_dcentre = (b_dm - own_beta * b_dl) / count_keys(p_held, index // SH, S, HAS_MASK)
    tl.store(p_dc + index * D * E + places, b_dc.to(p_dc.dtype.element_ty), mask=ok)
    tl.store(p_shift + index * D + slots, b_shift, mask=slot_ok)
    tl.store(p_dcentre + index * D + slots, b_dcentre, mask=slot_ok)
