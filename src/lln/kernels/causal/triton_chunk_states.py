"""The states of causal attention before every chunk, and of its gradients behind every chunk.

One program goes over the chunks of its stretch and writes the sums it has so far: keys and values
from the first chunk on, what rows contribute to the gradients of keys (`gathering` of the walks)
from the last one back. Sums are written in the type that products round them to anyway. What other
stretches contribute, the *far* state, comes from the same scan as for walks.

The weights of a chunk's rows, of the state before it and of its own keys, have the equations of
`lln.kernels.causal.triton_walk_tiles`, with m the peaks behind the chunk and the state relative to
its own peaks p: e^{x + p − r} = e^{x + m − r} e^{p − m}. Tiles that come in float32 stay in the
layout of loads (`widen`). That is faster where their weights go to shared memory anyway, as right
operands do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.causal.triton_walk_states import load_levels
from lln.kernels.causal.triton_walk_tiles import GUARD, query_exponents
from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import (
    NEVER,
    add_tile,
    exponential,
    find_program,
    find_stretch,
    load_rows,
    load_scale,
    rows_inside,
    rows_of,
    widen,
    widen_turned,
)
from lln.kernels.summaries.triton_mixing import load_gradient
from lln.kernels.summaries.triton_summaries import (
    empty_partial,
    load_partial,
    merge_partials,
    store_partial,
)


@triton.jit
def load_chunk_state(
    p_chunk_peak, p_chunk_mass, p_chunk_sum, place, chunk, chunks, program_tokens,
    BD: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr, BEHIND: tl.constexpr,
):  # fmt: skip
    """A chunk's state within its stretch: peak, mass and sum.

    The first chunk of a stretch (BEHIND: the last one) has mass zero, and no sum is read. The peaks
    before a chunk are those at the end of the chunk before; those of the first one do not matter.
    """
    slots, channels = tl.arange(0, BD), tl.arange(0, BE)
    count = program_tokens // BT
    has_some = chunk % count != 0
    if BEHIND:
        has_some = (chunk % count != count - 1) & (chunk != chunks - 1)
    own = place if BEHIND else tl.where(has_some, place - 1, place)
    b_peak = tl.load(p_chunk_peak + own * BD + slots)
    b_mass = tl.load(p_chunk_mass + place * BD + slots)
    p_in = p_chunk_sum + place * BD * BE + slots[:, None] * BE + channels[None, :]
    return b_peak, b_mass, tl.load(p_in, mask=has_some, other=0.0)


@triton.jit
def load_whole_state(
    p_chunk_peak, p_chunk_mass, p_chunk_sum, place, chunk, chunks, program_tokens,
    p_peak, p_mass, p_sum, part,
    BD: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr, BEHIND: tl.constexpr,
    HAS_STATE: tl.constexpr,
):  # fmt: skip
    """The same, merged with the far state."""
    b_peak, b_mass, b_sum = load_chunk_state(
        p_chunk_peak, p_chunk_mass, p_chunk_sum, place, chunk, chunks, program_tokens,
        BD, BE, BT, BEHIND,
    )  # fmt: skip
    if HAS_STATE:
        slots = tl.arange(0, BD)
        b_far, b_far_mass, b_far_sum = load_partial(p_peak, p_mass, p_sum, part, slots, BD, BE)
        b_peak, b_mass, b_wide = merge_partials(
            b_peak, b_mass, b_sum.to(tl.float32), b_far, b_far_mass, b_far_sum.to(tl.float32)
        )
        b_sum = b_wide.to(p_chunk_sum.dtype.element_ty)
    return b_peak, b_mass, b_sum


@triton.jit
def store_chunk_state(
    p_chunk_mass, p_chunk_sum, place, has_some, b_mass, b_sum, BD: tl.constexpr, BE: tl.constexpr
):
    """Mass of a chunk's state, and its sum where there is one."""
    slots, channels = tl.arange(0, BD), tl.arange(0, BE)
    tl.store(p_chunk_mass + place * BD + slots, b_mass)
    p_out = p_chunk_sum + place * BD * BE + slots[:, None] * BE + channels[None, :]
    tl.store(p_out, b_sum, mask=has_some)


@triton.jit
def load_top(p_chunk_top, place, p_peak, part, BD: tl.constexpr, HAS_STATE: tl.constexpr):
    """The largest exponent of every slot up to the end of a chunk ``[BD]``."""
    slots = tl.arange(0, BD)
    b_top = tl.load(p_chunk_top + place * BD + slots)
    if HAS_STATE:
        b_top = tl.maximum(b_top, tl.load(p_peak + part * BD + slots))
    return b_top


@triton.jit
def chunk_states_kernel(
    p_k, p_v, p_beta, p_peak, p_mass, p_sum, p_chunk_mass, p_chunk_sum, p_chunk_top, p_lost,
    beta, program_tokens, T, H,
    stride_kb, stride_kh, stride_kt, stride_kd, stride_vb, stride_vh, stride_vt, stride_vd,
    KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_BETA: tl.constexpr, HAS_STATE: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One stretch of one (sample, query head): the state of its keys before each of its chunks.

    Also the peak behind each chunk, with ``HAS_STATE`` the stretch's whole state, and the mark that
    says that no row is lost yet.
    """
    wait_for_launch(FOLLOWS)
    split, index, part = find_program()
    batch, head, begin, start, end = find_stretch(
        p_k, split, index, program_tokens, T, H, False, False
    )
    k = rows_of(p_k, batch, head // KG, begin, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, head // KG, begin, stride_vb, stride_vh, stride_vt, stride_vd)
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    slots, chunks = tl.arange(0, BD), tl.cdiv(T, BT)
    b_peak, b_mass, b_sum = empty_partial(BD, BE)
    tl.store(p_lost + part, 0)
    for first in tl.range(start, end, BT, num_stages=STAGES):
        inside = rows_inside(first, end, BT, False)
        b_k = load_rows(k, first, inside, BT, D, BD, EVEN)
        b_v = load_rows(v, first, inside, BT, E, BE, EVEN)
        place = index * chunks + first // BT
        store_chunk_state(p_chunk_mass, p_chunk_sum, place, first > start, b_mass, b_sum, BD, BE)
        b_y = widen_turned(b_k, BD) * beta_here
        if not EVEN:
            b_y = tl.where(inside[None, :], b_y, NEVER)
        b_peak, b_mass, b_sum = add_tile(b_peak, b_mass, b_sum, b_y, b_v, PRECISION)
        tl.store(p_chunk_top + place * BD + slots, b_peak)
    if HAS_STATE:
        store_partial(p_peak, p_mass, p_sum, part, slots, b_peak, b_mass, b_sum, BD, BE)


@triton.jit
def chunk_gather_kernel(
    p_q, p_g, p_m, p_alpha, p_z, p_delta, p_peak, p_mass, p_sum,
    p_chunk_peak, p_chunk_mass, p_chunk_sum, alpha, mix, program_tokens, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_mb, stride_mh, stride_mt, stride_md,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
    HAS_ALPHA: tl.constexpr, HAS_STATE: tl.constexpr, MIX: tl.constexpr, EVEN: tl.constexpr,
    EXP: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One stretch of one (sample, query head): the gathered state behind each of its chunks."""
    wait_for_launch(FOLLOWS)
    split, index, part = find_program()
    batch, head, begin, start, end = find_stretch(
        p_q, split, index, program_tokens, T, H, False, False
    )
    q = rows_of(p_q, batch, head, begin, stride_qb, stride_qh, stride_qt, stride_qd)
    gradients = rows_of(p_g, batch, head, begin, stride_gb, stride_gh, stride_gt, stride_gd)
    mixes = rows_of(p_m, batch, head, begin, stride_mb, stride_mh, stride_mt, stride_md)
    alpha_here = load_scale(p_alpha, alpha, index, HAS_ALPHA)
    slots, chunks = tl.arange(0, BD), tl.cdiv(T, BT)
    b_peak, b_level, b_sum = empty_partial(BD, BE)
    tiles = tl.cdiv(tl.maximum(end - start, 0), BT)
    for step in tl.range(0, tiles, num_stages=STAGES):
        first = start + (tiles - 1 - step) * BT
        inside = rows_inside(first, end, BT, False)
        b_q = load_rows(q, first, inside, BT, D, BD, EVEN)
        _, b_do, _, b_row, _ = load_gradient(
            gradients, mixes, mix, first, inside, E, BE, BT, MIX, EVEN
        )
        b_z, b_delta = load_levels(p_z + index * T, p_delta + index * T, first, inside, BT)
        place = index * chunks + first // BT
        store_chunk_state(p_chunk_mass, p_chunk_sum, place, step > 0, b_level, b_sum, BD, BE)
        tl.store(p_chunk_peak + place * BD + slots, b_peak)
        b_x = widen_turned(b_q, BD) * alpha_here
        if D < BD:
            b_x = tl.where((slots < D)[:, None], b_x, NEVER)
        b_h = b_x.to(EXP) - b_z[None, :]
        b_new = tl.maximum(b_peak, tl.max(b_h, 1).to(tl.float32))
        b_shrink = exponential(b_peak - b_new)
        b_e = exponential((b_h - b_new[:, None].to(EXP)).to(tl.float32)) * b_row[None, :]
        b_level = b_level * b_shrink + tl.sum(b_e * b_delta[None, :], 1)
        b_sum = b_sum * b_shrink[:, None]
        b_sum = tl.dot(b_e.to(LOW), b_do.to(LOW), b_sum, input_precision=PRECISION)
        b_peak = b_new
    if HAS_STATE:
        store_partial(p_peak, p_mass, p_sum, part, slots, b_peak, b_level, b_sum, BD, BE)


@triton.jit
def key_weights(b_k, beta, inside, b_top, BD: tl.constexpr, EVEN: tl.constexpr):
    """e^{y − m} ``[BT, BD]``; zero beyond the end."""
    b_e = exponential(widen(b_k, BD) * beta - b_top[None, :])
    if not EVEN:
        b_e = tl.where(inside[:, None], b_e, 0.0)
    return b_e


@triton.jit
def weigh_chunk(
    b_q, b_e, b_top, b_mass, alpha,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    EXP: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights in every row of a chunk; mass is that of all states, relative to m.

    Returns:
        S ``[BT, BT]``; weights e^{x + m − r} ``[BT, BD]``; r and the normalisers ``[BT]``.
    """
    b_x = query_exponents(b_q, alpha, D, BD)
    b_wide = b_x.to(EXP) + b_top[None, :].to(EXP)
    b_max = tl.max(b_wide, 1)
    b_w = exponential((b_wide - b_max[:, None]).to(tl.float32))
    rows = tl.arange(0, BT)
    b_s = tl.dot(b_w.to(LOW), tl.trans(b_e.to(LOW)), input_precision=PRECISION)
    b_s = tl.where(rows[:, None] >= rows[None, :], b_s, 0.0)
    b_norm = tl.sum(b_s, 1) + tl.sum(b_w * b_mass[None, :], 1)
    return b_s, b_w, b_max, b_norm


@triton.jit
def find_chunk(program_tokens, segments, H, BT: tl.constexpr, REVERSED: tl.constexpr):
    """A program's chunk, (sample, head), sample, head, first token, place of its state, stretch.

    REVERSED: the last head first, because what the pass before touched last is still in the cache.
    """
    chunk, index = tl.program_id(0), tl.program_id(1)
    if REVERSED:
        index = tl.num_programs(1) - 1 - index
    index, first = index.to(tl.int64), chunk * BT
    place, part = index * tl.num_programs(0) + chunk, index * segments + first // program_tokens
    return chunk, index, index // H, index % H, first, place, part


@triton.jit
def mark_lost(p_lost, part, b_norm, inside, BT: tl.constexpr):
    """Mark the stretch if a row has a normaliser below the guard; all such rows store the same."""
    p_mark = p_lost + part + tl.zeros([BT], tl.int64)
    tl.store(p_mark, tl.full([BT], 1, tl.int32), mask=(b_norm < GUARD) & inside)
