"""The steps of a walk over the tiles: load a tile, compute its rows' weights, add it to the state.

Row i of a tile reads the summary of everything before the tile and, inside the tile, the keys up
to itself. With the largest exponent m_f of every slot so far, and r_i the largest of x_if + m_f:

    S_ij = Σ_f e^{x_if + m_f − r_i} e^{y_jf − m_f},  j ≤ i         one product, no exponent above 0
    n_i = Σ_j S_ij + Σ_f e^{x_if + m_f − r_i} mass_f                normaliser

A key that row i may not see can set m_f; if it is too far above the others, row i loses its digits.
Its normaliser shows this: below ``GUARD`` the stretch is marked lost, and walked again with the
scores of `lln.kernels.causal.triton_walk_exact`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.causal.triton_walk_exact import exact_scores, exact_weights
from lln.kernels.launching.triton_steps import (
    NEVER,
    exponential,
    key_exponents,
    load_queries,
    load_unmasked,
    load_values,
    widen,
)

# Terms lost to underflow are at most 1e-38 / GUARD of their row's sum.
GUARD = tl.constexpr(1e-20)


@triton.jit
def query_exponents(b_q, alpha, D: tl.constexpr, BD: tl.constexpr):
    """α·q ``[BT, BD]``; ``NEVER`` in slots that are padding."""
    b_x = widen(b_q, BD) * alpha
    if D < BD:
        b_x = tl.where((tl.arange(0, BD) < D)[None, :], b_x, NEVER)
    return b_x


@triton.jit
def load_tile(
    q, k, v, first, inside, ok, seed, drop_first, dropout_p,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
    EVEN: tl.constexpr, QUIET: tl.constexpr, HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values of a tile, padding and dropped keys zero; dropout factors."""
    b_q = load_queries(q, first, inside, ok, BT, D, BD, EVEN, QUIET)
    b_k = load_unmasked(k, first, inside, ok, BT, D, BD, EVEN, HAS_MASK)
    b_v, b_factor = load_values(
        v, first, inside, ok, seed, drop_first, dropout_p, BT, E, BE, EVEN, HAS_MASK, HAS_DROPOUT
    )
    return b_q, b_k, b_v, b_factor


@triton.jit
def weigh_rows(
    b_q, b_k, ok, inside, b_peak, b_mass, b_sum, q, k, first, alpha, beta,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, EVEN: tl.constexpr, QUIET: tl.constexpr,
    EXACT: tl.constexpr, EXP: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights of the tile's keys and of the state in every row of a tile.

    Returns:
        S ``[BT, BT]``, the slots' weights ``[BT, BD]``, the exponent ``[BT]`` they were both
        shifted by, the rows' normalisers ``[BT]``, the keys e^{y − m} (``EXACT``: y itself), and
        the state shifted to match.
    """
    b_x = query_exponents(b_q, alpha, D, BD)
    b_e = key_exponents(b_k, beta, ok, BD, EVEN)
    if EXACT:
        b_log = exact_scores(q, k, first, alpha, beta, inside, ok, D, BT, QUIET, EXP)
        b_wide = b_x.to(EXP) + b_peak[None, :].to(EXP)
        b_top = tl.maximum(tl.max(b_wide, 1), tl.max(b_log, 1))
        b_w = exponential((b_wide - b_top[:, None]).to(tl.float32))
        b_s = exact_weights(b_log, b_top)
    else:
        b_e, b_peak, b_mass, b_sum = shift_state(b_e, ok, b_peak, b_mass, b_sum, EVEN)
        b_wide = b_x.to(EXP) + b_peak[None, :].to(EXP)
        b_top = tl.max(b_wide, 1)
        b_w = exponential((b_wide - b_top[:, None]).to(tl.float32))
        rows = tl.arange(0, BT)
        b_s = tl.dot(b_w.to(LOW), tl.trans(b_e.to(LOW)), input_precision=PRECISION)
        b_s = tl.where(rows[:, None] >= rows[None, :], b_s, 0.0)
    b_norm = tl.sum(b_s, 1) + tl.sum(b_w * b_mass[None, :], 1)
    return b_s, b_w, b_top, b_norm, b_e, b_peak, b_mass, b_sum


@triton.jit
def shift_state(b_y, ok, b_peak, b_mass, b_sum, EVEN: tl.constexpr):
    """The keys as e^{y − m} ``[BT, BD]`` with m the new peak, and the state relative to it."""
    b_new = tl.maximum(b_peak, tl.max(b_y, 0))
    b_shrink = exponential(b_peak - b_new)
    b_e = exponential(b_y - b_new[None, :])
    if not EVEN:
        b_e = tl.where(ok[:, None], b_e, 0.0)
    return b_e, b_new, b_mass * b_shrink, b_sum * b_shrink[:, None]


@triton.jit
def take_tile(
    b_peak, b_mass, b_sum, b_e, b_v, ok,
    EVEN: tl.constexpr, EXACT: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a tile's keys, as `weigh_rows` returns them, and its values to the state."""
    if EXACT:
        b_e, b_peak, b_mass, b_sum = shift_state(b_e, ok, b_peak, b_mass, b_sum, EVEN)
    b_mass += tl.sum(b_e, 0)
    b_sum = tl.dot(tl.trans(b_e.to(LOW)), b_v.to(LOW), b_sum, input_precision=PRECISION)
    return b_peak, b_mass, b_sum


@triton.jit
def any_lost(b_norm, b_mass, inside, ok, HAS_MASK: tl.constexpr):
    """Whether a row that sees a key has a normaliser below the guard."""
    gone = (b_norm < GUARD) & inside
    if HAS_MASK:
        # A row before the first valid key has nothing to lose.
        gone = gone & (tl.cumsum(ok.to(tl.float32), 0) + tl.max(b_mass) > 0)
    return tl.max(gone.to(tl.int32))
