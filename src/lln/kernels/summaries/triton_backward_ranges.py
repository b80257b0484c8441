"""Gradients of a range of tokens, from q, k, v, the summary (L, C) and dO.

With A the softmax over the slots, B the softmax over the tokens and G = dO (docs/method.md):

    dA = G Cᵀ,  m = rowsum(A∘dA),  g = A∘(dA − m),  dq = α g,  dC = Aᵀ G
    dv = Bᵀ dC,  dk = β B∘(v dCᵀ + shift),  shift = dL − C·dC = −Aᵀ m

The first line is computed over queries, the second over keys. With the diagonal part the pass over
the queries only accumulates dC and the shift; the second pass reads q, k, v and dO of a tile
together and writes all three gradients.

Dimension legend: see `lln.kernels.launching.triton_steps`; R query heads per summary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_steps import (
    block_softmax,
    exponential,
    heads_on,
    hide_rows,
    key_exponents,
    load_queries,
    load_rows,
    load_scale,
    load_unmasked,
    load_values,
    rows_inside,
    slot_softmax,
    store_rows,
    token_ok,
    widen,
)
from lln.kernels.summaries.triton_mixing import load_gradient


@triton.jit
def centred_queries(b_q, b_e, b_norm, BD: tl.constexpr):
    """Queries minus their mean over the slots, weighted by the row's own softmax weights.

    Every row's part of dα is Σ_f g_f q_f, and its g sum to zero, so any constant may be subtracted
    from its q. Near the mean of q, rounding errors of g are multiplied by small numbers only.
    """
    b_wide = widen(b_q, BD)
    return b_wide - (tl.sum(b_e * b_wide, 1) / b_norm)[:, None]


@triton.jit
def add_beta_grad(b_dbeta, b_residue, b_centre, b_g, b_b, b_k, BD: tl.constexpr):
    """Add to three sums over tokens and slots: g·k (dβ), g (zero but for rounding), and B·k.

    The second and third correct the rounding error of the first; see
    `lln.kernels.summaries.gradients.beta_gradient`.
    """
    b_wide = widen(b_k, BD)
    b_dbeta += tl.sum(b_g * b_wide)
    b_residue += tl.sum(b_g)
    b_centre += tl.sum(b_b * b_wide)
    return b_dbeta, b_residue, b_centre


@triton.jit
def store_beta_grad(p_dbeta, part, b_dbeta, b_residue, b_centre):
    """Store the three sums of a program next to each other."""
    tl.store(p_dbeta + part * 3, b_dbeta)
    tl.store(p_dbeta + part * 3 + 1, b_residue)
    tl.store(p_dbeta + part * 3 + 2, b_centre)


@triton.jit
def query_grad_range(
    q, gradients, dq, mixes, p_mask, start, end, alpha, b_log_mass, b_c, b_dc, b_shift, mix,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
    EVEN: tl.constexpr, QUIET: tl.constexpr, MIX: tl.constexpr, SPLIT: tl.constexpr,
    ALPHA_GRAD: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add the queries ``start … end − 1`` to dCᵀ and the shift; write dq.

    With the diagonal part dq is written later, by the pass over both parts, unless ``SPLIT``.

    The shift is dL − C·dC, the same for all tokens of a slot. As Σ_i A_if (dO_i·C_f) = C_f·dC_f,
    it is −Σ_i A_if m_i with m_i = Σ_f A_if (dO_i·C_f), the mean that row i subtracts: nothing
    cancels. It is accumulated in a tile ``[BT, BD]`` and summed over its rows once, at the end.
    """
    b_dalpha = 0.0
    for first in tl.range(start, end, BT, num_stages=STAGES):
        inside = first + tl.arange(0, BT) < end
        ok = token_ok(p_mask, first, end, BT, QUIET)
        b_q = load_queries(q, first, inside, ok, BT, D, BD, EVEN, QUIET)
        _, b_do, _, b_row, _ = load_gradient(
            gradients, mixes, mix, first, inside, E, BE, BT, MIX, EVEN
        )
        b_e, b_norm = slot_softmax(b_q, alpha, b_log_mass, D, BD)
        b_da = tl.dot(b_do, tl.trans(b_c), input_precision=PRECISION)
        b_mean = tl.sum(b_e * b_da, 1) / b_norm
        b_a = b_e * (b_row / b_norm)[:, None]
        b_g = b_a * (b_da - b_mean[:, None])
        b_dc = tl.dot(tl.trans(b_do), b_a.to(b_do.dtype), b_dc, input_precision=PRECISION)
        b_shift -= b_a * b_mean[:, None]
        if ALPHA_GRAD:
            b_dalpha += tl.sum(b_g * centred_queries(b_q, b_e, b_norm, BD))
        if MIX == 0 or SPLIT:
            store_rows(dq, first, b_g * alpha, inside, BT, D, BD, EVEN)
    return b_dc, b_shift, b_dalpha


@triton.jit
def token_weights(b_k, beta, b_log_mass, ok, BD: tl.constexpr, EVEN: tl.constexpr):
    """Rows of Bᵀ ``[BT, BD]``: the weight of a token in every slot."""
    b_b = exponential(key_exponents(b_k, beta, ok, BD, EVEN) - b_log_mass[None, :])
    if not EVEN:
        # Needed because a head without any valid key has log-mass NEVER as well.
        b_b = tl.where(ok[:, None], b_b, 0.0)
    return b_b


@triton.jit
def key_grad_range(
    k, v, dk, dv, p_mask, start, end, beta, b_log_mass, b_dc, b_shift, seed, drop_first, dropout_p,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
    EVEN: tl.constexpr, HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    BETA_GRAD: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of the tokens ``start … end − 1``; returns their part of dβ."""
    b_dbeta, b_residue, b_centre = 0.0, 0.0, 0.0
    for first in tl.range(start, end, BT, num_stages=STAGES):
        inside = first + tl.arange(0, BT) < end
        ok = token_ok(p_mask, first, end, BT, HAS_MASK)
        b_k = load_unmasked(k, first, inside, ok, BT, D, BD, EVEN, HAS_MASK)
        b_v, b_factor = load_values(
            v, first, inside, ok, seed, drop_first, dropout_p, BT, E, BE, EVEN, HAS_MASK,
            HAS_DROPOUT,
        )  # fmt: skip
        b_b = token_weights(b_k, beta, b_log_mass, ok, BD, EVEN)
        b_dv = tl.dot(b_b.to(b_v.dtype), tl.trans(b_dc), input_precision=PRECISION)
        if HAS_DROPOUT:
            b_dv *= b_factor[:, None]
        b_db = tl.dot(b_v, b_dc, input_precision=PRECISION)
        b_g = b_b * (b_db + b_shift[None, :])
        if BETA_GRAD:
            b_dbeta, b_residue, b_centre = add_beta_grad(
                b_dbeta, b_residue, b_centre, b_g, b_b, b_k, BD
            )
        store_rows(dk, first, b_g * beta, inside, BT, D, BD, EVEN)
        store_rows(dv, first, b_dv, inside, BT, E, BE, EVEN)
    return b_dbeta, b_residue, b_centre


@triton.jit
def joint_grad_range(
    q, k, v, gradients, dq, dk, dv, mixes, p_dmix, p_mask, p_alpha, start, end, alpha, beta,
    b_log_mass, b_c, b_dc, b_shift, b_dmix, query_index, mix, scale, block_size,
    seed, drop_first, dropout_p, tile_tokens, T,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, EVEN: tl.constexpr, QUIET: tl.constexpr, ONE_BLOCK: tl.constexpr,
    HAS_ALPHA: tl.constexpr, MIX: tl.constexpr, MIX_GRAD: tl.constexpr, SPLIT: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, BETA_GRAD: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All gradients of the tokens ``start … end − 1`` of LLN + diagonal, for R query heads.

    SPLIT: only the diagonal's gradients, added to those of LLN that are already in dq, dk and dv.

    MIX_GRAD: 0 none, 1 a value per token, 2 per token and channel, 3 per channel (R = 1).
    """
    b_dbeta, b_residue, b_centre = 0.0, 0.0, 0.0
    for first in tl.range(start, end, tile_tokens, num_stages=STAGES):
        last = tl.minimum(first + tile_tokens, end)
        inside = rows_inside(first, last, BT, HAS_MASK)
        ok = token_ok(p_mask, first, last, BT, HAS_MASK)
        b_k = load_unmasked(k, first, inside, ok, BT, D, BD, EVEN, HAS_MASK)
        b_v, b_factor = load_values(
            v, first, inside, ok, seed, drop_first, dropout_p, BT, E, BE, EVEN, HAS_MASK,
            HAS_DROPOUT,
        )  # fmt: skip
        b_dk = tl.zeros([BT, BD], tl.float32)
        b_dv = tl.zeros([BT, BE], tl.float32)
        for r in tl.static_range(R):
            own = tl.cast(r, tl.int64)
            b_q = load_queries(heads_on(q, own), first, inside, ok, BT, D, BD, EVEN, QUIET)
            b_do, b_long, b_short, b_row, b_rest = load_gradient(
                heads_on(gradients, own), heads_on(mixes, own), mix, first, inside,
                E, BE, BT, MIX, EVEN,
            )  # fmt: skip
            dq_own = heads_on(dq, own)
            if SPLIT:
                b_dq = load_rows(dq_own, first, inside, BT, D, BD, EVEN).to(tl.float32)
            else:
                alpha_here = load_scale(p_alpha, alpha, query_index + r, HAS_ALPHA)
                b_e, b_norm = slot_softmax(b_q, alpha_here, b_log_mass, D, BD)
                b_da = tl.dot(b_long, tl.trans(b_c), input_precision=PRECISION)
                b_mean = tl.sum(b_e * b_da, 1) / b_norm
                b_dq = (b_e * (b_row * alpha_here / b_norm)[:, None]) * (b_da - b_mean[:, None])
            b_p, b_sum = block_softmax(
                b_q, b_k, scale, ok, block_size, BT, EVEN, ONE_BLOCK, False, PRECISION
            )
            b_dp = tl.dot(b_short, tl.trans(b_v), input_precision=PRECISION)
            b_level = tl.sum(b_p * b_dp, 1) / b_sum
            if MIX_GRAD == 1:
                # dO·(A C) and dO·(P v) are the row sums that the softmax gradients need anyway.
                rows = first + tl.arange(0, BT)
                tl.store(p_dmix + own * T + rows, b_mean - b_level, mask=inside)
            elif MIX_GRAD > 1:
                b_out = tl.dot(b_e.to(b_c.dtype), b_c, input_precision=PRECISION)
                b_out = b_out / b_norm[:, None]
                b_near = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
                b_dm = b_do.to(tl.float32) * (b_out - b_near / b_sum[:, None])
                if MIX_GRAD == 2:
                    out = p_dmix + own * T * E, 0, E, 1
                    store_rows(out, first, b_dm, inside, BT, E, BE, EVEN)
                else:
                    b_dmix += tl.sum(b_dm, 0)
            b_p = b_p * (b_rest / b_sum)[:, None]
            b_ds = (b_p * (b_dp - b_level[:, None]) * scale).to(b_q.dtype)
            b_p_low = b_p.to(b_short.dtype)
            b_dq = tl.dot(b_ds, b_k, b_dq, input_precision=PRECISION)
            store_rows(dq_own, first, b_dq, inside, BT, D, BD, EVEN)
            b_dk = tl.dot(tl.trans(b_ds), b_q, b_dk, input_precision=PRECISION)
            b_dv = tl.dot(tl.trans(b_p_low), b_short, b_dv, input_precision=PRECISION)
        if not SPLIT:
            # The slots' part comes last: together with the blocks' it would not fit in registers.
            b_b = token_weights(b_k, beta, b_log_mass, ok, BD, EVEN)
            b_dv = tl.dot(b_b.to(b_v.dtype), tl.trans(b_dc), b_dv, input_precision=PRECISION)
            b_db = tl.dot(b_v, b_dc, input_precision=PRECISION)
            b_g = b_b * (b_db + b_shift[None, :])
            b_dk += b_g * beta
            if BETA_GRAD:
                b_dbeta, b_residue, b_centre = add_beta_grad(
                    b_dbeta, b_residue, b_centre, b_g, b_b, b_k, BD
                )
        if HAS_MASK:
            b_dk, b_dv = hide_rows(b_dk, ok), hide_rows(b_dv, ok)
        if HAS_DROPOUT:
            b_dv *= b_factor[:, None]
        if SPLIT:
            b_dk += load_rows(dk, first, inside, BT, D, BD, EVEN)
            b_dv += load_rows(dv, first, inside, BT, E, BE, EVEN)
        store_rows(dk, first, b_dk, inside, BT, D, BD, EVEN)
        store_rows(dv, first, b_dv, inside, BT, E, BE, EVEN)
    return b_dbeta, b_residue, b_centre, b_dmix
