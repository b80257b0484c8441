"""The rows of one chunk: their weights of the state before it, and of its own keys.

The equations are those of `lln.kernels.causal.triton_walk_tiles`, with m the peaks behind the
chunk and the state relative to its own peaks p: e^{x + p − r} = e^{x + m − r} e^{p − m}.

Tiles that come in float32 stay in the layout of loads (`widen`). That is faster where their weights
go to shared memory anyway, as right operands do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.causal.triton_walk_tiles import GUARD, query_exponents
from lln.kernels.launching.triton_steps import exponential, widen


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
