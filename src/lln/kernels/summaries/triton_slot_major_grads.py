"""Gradients of the keys of wide heads: tiles turned, with slots as rows.

The equations are those of `triton_backward_ranges`. There a tile is ``[BT, BD]``, and
64 tokens do not give each of eight warps rows of its own. Here it is ``[BD, BT]``: a warp has 16 of
128 slots, and what a slot shares (log-mass, shift) takes two registers instead of 32.

Dimension legend: see `triton_steps`; SH summary heads, R query heads per summary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import (
    NEVER,
    exponential,
    find_program,
    find_stretch,
    load_rows,
    load_scale,
    load_unmasked,
    load_values,
    rows_of,
    store_rows,
    token_ok,
    widen_turned,
)
from lln.kernels.summaries.triton_backward_ranges import store_beta_grad


@triton.jit
def weights_turned(b_wide, beta, b_log_mass, ok, EVEN: tl.constexpr):
    """The weights B ``[BD, BT]`` of tokens in every slot, from their keys turned in float32."""
    b_x = b_wide * beta
    if not EVEN:
        b_x = tl.where(ok[None, :], b_x, NEVER)
    b_b = exponential(b_x - b_log_mass[:, None])
    if not EVEN:
        # Needed because a head without any valid key has log-mass NEVER as well.
        b_b = tl.where(ok[None, :], b_b, 0.0)
    return b_b


@triton.jit
def load_key_side(
    p_log_mass, p_shift, p_dc, index,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Log-mass ``[BD]``, shift ``[BD]`` and dCᵀ ``[BE, BD]`` of a summary."""
    slots = tl.arange(0, BD)
    # Padding slots get a huge mass, so that every token has weight 0 in them.
    b_log_mass = tl.load(p_log_mass + index * D + slots, mask=slots < D, other=1e30)
    b_shift = tl.load(p_shift + index * D + slots, mask=slots < D, other=0.0)
    channels = p_dc + index * D * E, 0, D, 1
    b_dc = load_rows(channels, 0, tl.arange(0, BE) < E, BE, D, BD, E == BE)
    return b_log_mass, b_shift, b_dc


@triton.jit(do_not_specialize=["seed"])
def key_slot_major_kernel(
    p_k, p_v, p_dk, p_dv, p_mask, p_beta, p_dbeta, p_log_mass, p_shift, p_dc, p_starts,
    beta, seed, dropout_p, program_tokens, S, SH,
    stride_kb, stride_kh, stride_kt, stride_kd, stride_vb, stride_vh, stride_vt, stride_vd,
    stride_dkb, stride_dkh, stride_dkt, stride_dkd, stride_dvb, stride_dvh, stride_dvt, stride_dvd,
    KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_BETA: tl.constexpr, BETA_GRAD: tl.constexpr, EVEN: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One stretch of keys of one (sample, summary head): dk and dv of the LLN part."""
    wait_for_launch(FOLLOWS)
    split, index, part = find_program()
    batch, head, begin, start, end = find_stretch(
        p_starts, split, index, program_tokens, S, SH, PACKED, False
    )
    key_head = head // KG
    b_log_mass, b_shift, b_dc = load_key_side(p_log_mass, p_shift, p_dc, index, D, E, BD, BE)
    k = rows_of(p_k, batch, key_head, begin, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, key_head, begin, stride_vb, stride_vh, stride_vt, stride_vd)
    dk = rows_of(p_dk, batch, head, begin, stride_dkb, stride_dkh, stride_dkt, stride_dkd)
    dv = rows_of(p_dv, batch, head, begin, stride_dvb, stride_dvh, stride_dvt, stride_dvd)
    p_mask += batch * S
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    drop_first = (batch * (SH // KG) + key_head) * S
    b_dbeta, b_residue, b_centre = 0.0, 0.0, 0.0
    for first in tl.range(start, end, BT, num_stages=STAGES):
        inside = first + tl.arange(0, BT) < end
        ok = token_ok(p_mask, first, end, BT, HAS_MASK)
        b_k = load_unmasked(k, first, inside, ok, BT, D, BD, EVEN, HAS_MASK)
        b_v, b_factor = load_values(
            v, first, inside, ok, seed, drop_first, dropout_p, BT, E, BE, EVEN, HAS_MASK,
            HAS_DROPOUT,
        )  # fmt: skip
        b_wide = widen_turned(b_k, BD)
        b_b = weights_turned(b_wide, beta_here, b_log_mass, ok, EVEN)
        b_dv = tl.dot(b_dc, b_b.to(b_v.dtype), input_precision=PRECISION)
        if HAS_DROPOUT:
            b_dv *= b_factor[None, :]
        store_rows(dv, first, tl.trans(b_dv), inside, BT, E, BE, EVEN)
        b_db = tl.dot(tl.trans(b_dc), tl.trans(b_v), input_precision=PRECISION)
        b_g = b_b * (b_db + b_shift[:, None])
        if BETA_GRAD:
            # As in `backward_ranges.add_beta_grad`.
            b_dbeta += tl.sum(b_g * b_wide)
            b_residue += tl.sum(b_g)
            b_centre += tl.sum(b_b * b_wide)
        store_rows(dk, first, tl.trans(b_g * beta_here), inside, BT, D, BD, EVEN)
    if BETA_GRAD:
        store_beta_grad(p_dbeta, part, b_dbeta, b_residue, b_centre)
