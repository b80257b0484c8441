"""Scores of a tile computed one slot at a time in the log domain, where a fast walk lost a row.

A second launch of the same kernel with ``EXACT`` returns at once where nothing was lost; elsewhere
it walks the stretch again with these scores. They have no common shift, so that a key that a row
may not see cannot cost it digits (`lln.kernels.causal.triton_walk_tiles` explains how).
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_steps import NEVER, exponential


@triton.jit
def exact_columns(
    q, k, first, slot, alpha, beta, inside, ok,
    BT: tl.constexpr, QUIET: tl.constexpr, EXP: tl.constexpr,
):  # fmt: skip
    """x_i + y_j of one slot ``[BT, BT]``; ``NEVER`` for keys that do not count."""
    p_q, _, stride_qt, stride_qd = q
    p_k, _, stride_kt, stride_kd = k
    rows, offset = tl.arange(0, BT), tl.cast(first, tl.int64)
    p_q, p_k = p_q + offset * stride_qt, p_k + offset * stride_kt
    b_q = tl.load(p_q + rows * stride_qt + slot * stride_qd, mask=inside, other=0.0)
    b_k = tl.load(p_k + rows * stride_kt + slot * stride_kd, mask=ok, other=0.0)
    b_x = b_q.to(tl.float32)
    if QUIET:
        b_x = tl.where(ok | ((b_x - b_x) == 0), b_x, 0.0)
    b_y = tl.where(ok, b_k.to(tl.float32) * beta, NEVER)
    return (b_x * alpha).to(EXP)[:, None] + b_y.to(EXP)[None, :]


@triton.jit
def exact_scores(
    q, k, first, alpha, beta, inside, ok,
    D: tl.constexpr, BT: tl.constexpr, QUIET: tl.constexpr, EXP: tl.constexpr,
):  # fmt: skip
    """Log Σ_f e^{x_if + y_jf} ``[BT, BT]`` for j ≤ i, without any common shift."""
    b_peak = tl.full([BT, BT], NEVER, EXP)
    for slot in range(D):
        b_x = exact_columns(q, k, first, slot, alpha, beta, inside, ok, BT, QUIET, EXP)
        b_peak = tl.maximum(b_peak, b_x)
    b_mass = tl.zeros([BT, BT], tl.float32)
    for slot in range(D):
        b_x = exact_columns(q, k, first, slot, alpha, beta, inside, ok, BT, QUIET, EXP)
        b_mass += exponential((b_x - b_peak).to(tl.float32))
    rows = tl.arange(0, BT)
    seen = (rows[:, None] >= rows[None, :]) & ok[None, :]
    return tl.where(seen, b_peak + tl.log(b_mass).to(EXP), NEVER)


@triton.jit
def exact_weights(b_log, b_top):
    """e^{log S − top} ``[BT, BT]``; exactly zero for keys that do not count."""
    b_s = exponential((b_log - b_top[:, None]).to(tl.float32))
    return tl.where(b_log > NEVER * 0.5, b_s, 0.0)


@triton.jit
def exact_products(
    b_g, b_z, q, k, first, alpha, beta, inside, ok,
    AXIS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    QUIET: tl.constexpr, EXP: tl.constexpr,
):  # fmt: skip
    """Σ G_ij e^{x_if + y_jf − z_i} over the tokens of one axis: ``[BT, BD]``."""
    rows = tl.arange(0, BT)
    seen = (rows[:, None] >= rows[None, :]) & ok[None, :] & inside[:, None]
    b_out = tl.zeros([BT, BD], tl.float32)
    slots = tl.arange(0, BD)
    for slot in range(D):
        b_x = exact_columns(q, k, first, slot, alpha, beta, inside, ok, BT, QUIET, EXP)
        b_e = tl.where(seen, exponential((b_x - b_z[:, None]).to(tl.float32)) * b_g, 0.0)
        b_out = tl.where((slots == slot)[None, :], tl.sum(b_e, AXIS)[:, None], b_out)
    return b_out
