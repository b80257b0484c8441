"""Forward kernels: queries against the summary of keys and values.

*Short*: one program per (sample, head) summarises and reads, and the summary never leaves the chip
unless the backward pass will need it. *Long*: the sequence is split over programs, their partial
summaries are merged once (`lln.kernels.summaries.triton_summaries`), and a second pass reads them.

With ``MIX > 0`` the pass over the queries adds the block-diagonal softmax of the same tokens.

Dimension legend: see `triton_steps`; SH summary heads, R query heads per summary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import (
    block_softmax,
    find_program,
    find_stretch,
    gap_before,
    heads_on,
    load_queries,
    load_rows,
    load_scale,
    load_unmasked,
    load_values,
    locate,
    rows_inside,
    rows_of,
    slot_softmax,
    store_rows,
    token_ok,
)
from lln.kernels.summaries.triton_mixing import mix_outputs, row_weights
from lln.kernels.summaries.triton_summaries import merge_parts, store_summary, summarise_range


@triton.jit
def read_both_ahead(
    q, k, v, o, mixes, start, end, alpha, b_log_mass, b_c, mix, scale, block_size,
    seed, drop_first, dropout_p, tile_tokens,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
    ONE_BLOCK: tl.constexpr, MIX: tl.constexpr, EVEN: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    PLAIN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`read_range` with the diagonal part, for two programs per multiprocessor.

    The values of the next tile wait in registers, not in shared memory. Weights are normalised and
    mixed before the products, which then share the registers of their sums. There is no mask, and
    a mix is one number or one per row.
    """
    inside = rows_inside(start, tl.minimum(start + tile_tokens, end), BT, False)
    b_next, _ = load_values(
        v, start, inside, inside, seed, drop_first, dropout_p, BT, E, BE, EVEN, False, HAS_DROPOUT
    )
    for first in tl.range(start, end, tile_tokens, num_stages=STAGES):
        last = tl.minimum(first + tile_tokens, end)
        inside = rows_inside(first, last, BT, False)
        b_q = load_rows(q, first, inside, BT, D, BD, EVEN)
        b_k = load_rows(k, first, inside, BT, D, BD, EVEN)
        b_v = b_next
        # Nothing follows the last tile: full tiles, which have no row mask, load it once more.
        following = tl.minimum(last, end - tile_tokens) if EVEN else last
        coming = rows_inside(following, tl.minimum(last + tile_tokens, end), BT, False)
        b_next, _ = load_values(
            v, following, coming, coming, seed, drop_first, dropout_p, BT, E, BE, EVEN, False,
            HAS_DROPOUT,
        )  # fmt: skip
        b_row = row_weights(mixes, mix, first, inside, BT, MIX)
        b_wide = b_q.to(tl.float32) if PLAIN else b_q
        b_e, b_norm = slot_softmax(b_wide, alpha, b_log_mass, D, BD)
        b_e = b_e * (b_row / b_norm)[:, None]
        b_o = tl.dot(b_e.to(b_c.dtype), b_c, input_precision=PRECISION)
        b_p, b_sum = block_softmax(
            b_q, b_k, scale, inside, block_size, BT, EVEN, ONE_BLOCK, False, PRECISION
        )
        b_p = b_p * ((1.0 - b_row) / b_sum)[:, None]
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision=PRECISION)
        store_rows(o, first, b_o, inside, BT, E, BE, EVEN)


@triton.jit
def read_range(
    q, k, v, o, mixes, p_mask, start, end, alpha, b_log_mass, b_c, mix, scale, block_size,
    seed, drop_first, dropout_p, tile_tokens,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
    QUIET: tl.constexpr, ONE_BLOCK: tl.constexpr, MIX: tl.constexpr, EVEN: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, PLAIN: tl.constexpr,
    AHEAD: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Queries ``start … end − 1`` of one head read a summary; writes their outputs.

    PLAIN: queries are widened as they are, without a product with the identity.
    AHEAD: as `read_both_ahead`; only with the diagonal part.
    """
    if AHEAD:
        read_both_ahead(
            q, k, v, o, mixes, start, end, alpha, b_log_mass, b_c, mix, scale, block_size,
            seed, drop_first, dropout_p, tile_tokens,
            D, E, BD, BE, BT, ONE_BLOCK, MIX, EVEN, HAS_DROPOUT, PLAIN, PRECISION, STAGES,
        )  # fmt: skip
        return
    for first in tl.range(start, end, tile_tokens, num_stages=STAGES):
        last = tl.minimum(first + tile_tokens, end)
        inside = rows_inside(first, last, BT, HAS_MASK)
        ok = token_ok(p_mask, first, last, BT, HAS_MASK and (QUIET or MIX > 0))
        b_q = load_queries(q, first, inside, ok, BT, D, BD, EVEN, QUIET)
        b_wide = b_q.to(tl.float32) if PLAIN else b_q
        b_e, b_norm = slot_softmax(b_wide, alpha, b_log_mass, D, BD)
        b_o = tl.dot(b_e.to(b_c.dtype), b_c, input_precision=PRECISION)
        if MIX > 0:
            b_k = load_unmasked(k, first, inside, ok, BT, D, BD, EVEN, HAS_MASK)
            b_v, _ = load_values(
                v, first, inside, ok, seed, drop_first, dropout_p, BT, E, BE, EVEN, HAS_MASK,
                HAS_DROPOUT,
            )  # fmt: skip
            b_p, b_sum = block_softmax(
                b_q, b_k, scale, ok, block_size, BT, EVEN, ONE_BLOCK, False, PRECISION
            )
            b_d = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
            b_o = mix_outputs(
                b_o, b_norm, b_d, b_sum, mixes, mix, first, inside, E, BE, BT, MIX, EVEN
            )
        else:
            b_o = b_o * (1.0 / b_norm)[:, None]
        store_rows(o, first, b_o, inside, BT, E, BE, EVEN)


@triton.jit(do_not_specialize=["seed"])
def short_fwd_kernel(
    p_q, p_k, p_v, p_o, p_m, p_mask, p_alpha, p_beta, p_log_mass, p_centroid, p_starts,
    alpha, beta, mix, scale, block_size, seed, dropout_p, tile_tokens, T, S, SH,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_ob, stride_oh, stride_ot, stride_od,
    stride_mb, stride_mh, stride_mt, stride_md,
    R: tl.constexpr, KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BK: tl.constexpr, BQ: tl.constexpr, HAS_ALPHA: tl.constexpr,
    HAS_BETA: tl.constexpr, QUIET: tl.constexpr, ONE_BLOCK: tl.constexpr, MIX: tl.constexpr,
    EVEN: tl.constexpr, HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, SAVE: tl.constexpr,
    PACKED: tl.constexpr, SHIFTED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One (sample, summary head): summarise all keys, then read with its R query heads."""
    index = tl.program_id(0).to(tl.int64)
    batch, head = index // SH, index % SH
    key_head = head // KG
    begin, keys = locate(p_starts, batch, S, PACKED)
    queries = keys if PACKED else T
    k = rows_of(p_k, batch, key_head, begin, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, key_head, begin, stride_vb, stride_vh, stride_vt, stride_vd)
    q = rows_of(p_q, batch, head * R, begin, stride_qb, stride_qh, stride_qt, stride_qd)
    o = rows_of(p_o, batch, head * R, begin, stride_ob, stride_oh, stride_ot, stride_od)
    mixes = rows_of(p_m, batch, head * R, begin, stride_mb, stride_mh, stride_mt, stride_md)
    p_mask += batch * S
    drop_first = (batch * (SH // KG) + key_head) * S
    b_peak, b_mass, b_sum, _ = summarise_range(
        k, v, p_mask, 0, keys, load_scale(p_beta, beta, index, HAS_BETA),
        seed, drop_first, dropout_p,
        D, E, BD, BE, BK, EVEN, HAS_MASK, HAS_DROPOUT, False, PRECISION, STAGES,
    )  # fmt: skip
    b_log_mass = b_peak + tl.log(b_mass)
    b_c = (b_sum * (1.0 / b_mass)[:, None]).to(p_centroid.dtype.element_ty)
    if SAVE:
        store_summary(p_log_mass, p_centroid, index, tl.arange(0, BD), b_log_mass, b_c, D, E, BE)
    gap = gap_before(p_starts, batch, SHIFTED)
    for r in range(R):
        own = tl.cast(r, tl.int64)
        read_range(
            heads_on(q, own), k, v, heads_on(o, own), heads_on(mixes, own), p_mask, -gap, queries,
            load_scale(p_alpha, alpha, index * R + r, HAS_ALPHA), b_log_mass, b_c,
            mix, scale, block_size, seed, drop_first, dropout_p, tile_tokens,
            D, E, BD, BE, BQ, QUIET, ONE_BLOCK, MIX, EVEN, HAS_MASK, HAS_DROPOUT, False, False,
            PRECISION, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["seed"])
def read_kernel(
    p_q, p_k, p_v, p_o, p_m, p_mask, p_alpha, p_log_mass, p_centroid, p_peak, p_mass, p_sum,
    p_starts, alpha, mix, scale, block_size, seed, dropout_p, tile_tokens, program_tokens, parts,
    T, S, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_ob, stride_oh, stride_ot, stride_od,
    stride_mb, stride_mh, stride_mt, stride_md,
    R: tl.constexpr, KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BT: tl.constexpr, HAS_ALPHA: tl.constexpr, QUIET: tl.constexpr,
    ONE_BLOCK: tl.constexpr, MIX: tl.constexpr, EVEN: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PACKED: tl.constexpr, SHIFTED: tl.constexpr, PLAIN: tl.constexpr,
    AHEAD: tl.constexpr, FOLDS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One stretch (a program's share) of queries of one (sample, head) reads its summary.

    FOLDS: the summary comes in parts, which every program merges; one of them writes it down.
    """
    wait_for_launch(FOLLOWS)
    split, index, _ = find_program()
    summary, slots = index // R, tl.arange(0, BD)
    if FOLDS:
        b_log_mass, b_wide = merge_parts(p_peak, p_mass, p_sum, summary, parts, slots, BD, BE, BD)
        b_c = b_wide.to(p_centroid.dtype.element_ty)
        if (split == 0) & (index % R == 0):
            store_summary(p_log_mass, p_centroid, summary, slots, b_log_mass, b_c, D, E, BE)
    else:
        b_log_mass = tl.load(p_log_mass + summary * D + slots, mask=slots < D, other=0.0)
        centroids = p_centroid + summary * D * E, 0, E, 1
        b_c = load_rows(centroids, 0, slots < D, BD, E, BE, D == BD)
    batch, head, begin, start, end = find_stretch(
        p_starts, split, index, program_tokens, T, H, PACKED, SHIFTED
    )
    key_head, key_heads = head // (R * KG), H // (R * KG)
    read_range(
        rows_of(p_q, batch, head, begin, stride_qb, stride_qh, stride_qt, stride_qd),
        rows_of(p_k, batch, key_head, begin, stride_kb, stride_kh, stride_kt, stride_kd),
        rows_of(p_v, batch, key_head, begin, stride_vb, stride_vh, stride_vt, stride_vd),
        rows_of(p_o, batch, head, begin, stride_ob, stride_oh, stride_ot, stride_od),
        rows_of(p_m, batch, head, begin, stride_mb, stride_mh, stride_mt, stride_md),
        p_mask + batch * S, start, end, load_scale(p_alpha, alpha, index, HAS_ALPHA), b_log_mass,
        b_c, mix, scale, block_size,
        seed, (batch * key_heads + key_head) * S, dropout_p, tile_tokens,
        D, E, BD, BE, BT, QUIET, ONE_BLOCK, MIX, EVEN, HAS_MASK, HAS_DROPOUT, PLAIN, AHEAD,
        PRECISION, STAGES,
    )  # fmt: skip
