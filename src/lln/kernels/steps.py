"""The steps that every kernel is made of: load, exponents, softmax rows, block-diagonal rows.

Everything inside kernels is in base 2 (exp2 is one instruction): exponents are α·log₂e·q and
β·log₂e·k, and the log-mass of a slot is log₂ of its mass. ``NEVER`` stands for log 0.

Dimension legend: BT tokens in a tile, BD ≥ D and BE ≥ E padded widths (powers of two).
Names: ``b_*`` values of a tile, ``p_*`` pointers, capitals are compile-time constants.
"""

from __future__ import annotations

import triton
import triton.language as tl

# In base 2; finite, so that NEVER − NEVER is 0 and not NaN.
NEVER = tl.constexpr(-1e30)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(
    p_tile, stride_t, stride_d, row_ok, BT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):
    """A tile ``[BT, BD]``; zero outside."""
    rows, columns = tl.arange(0, BT), tl.arange(0, BD)
    ok = row_ok[:, None]
    if D < BD:
        ok = ok & (columns < D)[None, :]
    return tl.load(
        p_tile + rows[:, None] * stride_t + columns[None, :] * stride_d, mask=ok, other=0
    )


@triton.jit
def store_rows(
    p_tile, b_tile, stride_t, stride_d, row_ok, BT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):
    """Write a tile ``[BT, BD]`` back."""
    rows, columns = tl.arange(0, BT), tl.arange(0, BD)
    ok = row_ok[:, None]
    if D < BD:
        ok = ok & (columns < D)[None, :]
    p_out = p_tile + rows[:, None] * stride_t + columns[None, :] * stride_d
    tl.store(p_out, b_tile.to(p_tile.dtype.element_ty), mask=ok)


@triton.jit
def load_scale(p_scale, number, index, HAS_TENSOR: tl.constexpr):
    """α or β: a number, or the entry of a tensor."""
    if HAS_TENSOR:
        return tl.load(p_scale + index).to(tl.float32)
    return number


@triton.jit
def token_ok(p_mask, first, end, BT: tl.constexpr, HAS_MASK: tl.constexpr):
    """Which tokens of a tile exist and are not masked."""
    tokens = first + tl.arange(0, BT)
    ok = tokens < end
    if HAS_MASK:
        ok = ok & (tl.load(p_mask + tokens, mask=ok, other=0) != 0)
    return ok


@triton.jit
def drop_factor(seed, first, dropout_p, BT: tl.constexpr):
    """0 or 1/(1 − p) for every token of a tile, from its place in the whole."""
    places = first + tl.arange(0, BT)
    return tl.where(tl.rand(seed, places) >= dropout_p, 1.0 / (1.0 - dropout_p), 0.0)


@triton.jit
def hide_rows(b_tile, ok):
    """Zero masked rows by selection: a NaN there must not come through as 0 · NaN."""
    return tl.where(ok[:, None], b_tile, tl.zeros_like(b_tile))


@triton.jit
def slot_softmax(b_q, alpha, b_log2_mass, D: tl.constexpr, BD: tl.constexpr):
    """Rows of A: unnormalised softmax over the slots ``[BT, BD]``, and the normalisers ``[BT]``."""
    b_x = b_q.to(tl.float32) * (alpha * LOG2E) + b_log2_mass[None, :]
    if D < BD:
        b_x = tl.where((tl.arange(0, BD) < D)[None, :], b_x, NEVER)
    b_e = tl.exp2(b_x - tl.max(b_x, 1)[:, None])
    return b_e, tl.sum(b_e, 1)


@triton.jit
def block_softmax(
    b_q,
    b_k,
    scale,
    first,
    ok,
    block_size,
    BT: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows of the block-diagonal matrix: unnormalised ``[BT, BT]`` and normalisers ``[BT]``."""
    tokens = first + tl.arange(0, BT)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * (scale * LOG2E)
    same = (tokens // block_size)[:, None] == (tokens // block_size)[None, :]
    b_s = tl.where(same & ok[None, :], b_s, NEVER)
    if CAUSAL:
        b_s = tl.where(tokens[:, None] >= tokens[None, :], b_s, NEVER)
    b_p = tl.exp2(b_s - tl.max(b_s, 1)[:, None])
    # Where a row sees no key every entry is exp2(0): the values they meet are zero.
    b_p = tl.where(b_s > NEVER * 0.5, b_p, 0.0)
    b_sum = tl.sum(b_p, 1)
    return b_p, tl.where(b_sum > 0, b_sum, 1.0)


@triton.jit
def add_tile(b_peak, b_mass, b_sum, b_x, b_v, PRECISION: tl.constexpr):
    """Take a tile of exponents ``[BT, BD]`` and values into a running summary (online maximum)."""
    b_new = tl.maximum(b_peak, tl.max(b_x, 0))
    b_shrink = tl.exp2(b_peak - b_new)
    b_e = tl.exp2(b_x - b_new[None, :])
    b_mass = b_mass * b_shrink + tl.sum(b_e, 0)
    b_sum = b_sum * b_shrink[:, None]
    b_sum += tl.dot(tl.trans(b_e.to(b_v.dtype)), b_v, input_precision=PRECISION)
    return b_new, b_mass, b_sum
