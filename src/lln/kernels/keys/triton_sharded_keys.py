"""Gradients of keys and values where chosen rows lie apart from the tokens of a call.

A rank of several holds its own tokens and, behind them in the same tensors, the rows that its
groups chose, wherever they came from. Nobody chooses one of its own tokens here, and the summary is
that of all ranks, whose gradient goes back to them. So the pass over keys in
`lln.kernels.keys.triton_keys_grad` falls apart: blocks of tokens get the share of their own queries
(``own``), rows behind them that of the pairs which chose them (``rows``).

Dimension legend: see `lln.kernels.keys.triton_keys_grad`; T tokens, S rows behind them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.keys.triton_keys_grad import add_near, add_pairs, load_pairs
from lln.kernels.keys.triton_keys_read import load_near, tokens_ok
from lln.kernels.launching.triton_steps import (
    NEVER,
    heads_on,
    load_queries,
    load_rows,
    rows_of,
    store_rows,
)


@triton.jit
def keys_own_kernel(
    p_q, p_k, p_v, p_g, p_dk, p_dv, p_lse, p_delta, p_mask, scale, T, H, HK, blocks,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dkb, stride_dkh, stride_dkt, stride_dkd, stride_dvb, stride_dvh, stride_dvt, stride_dvd,
    W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BW: tl.constexpr, R: tl.constexpr, HAS_MASK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of tokens of one (sample, key head), for the R query heads that share it."""
    number, index = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    batch, key_head, first = index // HK, index % HK, number * W
    inside, ok = tokens_ok(p_mask + batch * T, first, W, T, BW, HAS_MASK)
    k = rows_of(p_k, batch, key_head, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, key_head, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    q = rows_of(p_q, batch, key_head * R, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    g = rows_of(p_g, batch, key_head * R, 0, stride_gb, stride_gh, stride_gt, stride_gd)
    dk = rows_of(p_dk, batch, key_head, 0, stride_dkb, stride_dkh, stride_dkt, stride_dkd)
    dv = rows_of(p_dv, batch, key_head, 0, stride_dvb, stride_dvh, stride_dvt, stride_dvd)
    b_k = load_near(k, first, inside, ok, BW, D, BD, EVEN)
    b_v = load_near(v, first, inside, ok, BW, E, BE, EVEN)
    b_dk = tl.zeros([BW, BD], tl.float32)
    b_dv = tl.zeros([BW, BE], tl.float32)
    for r in tl.static_range(R):
        own = tl.cast(r, tl.int64)
        rows = (batch * H + key_head * R + r) * T + first + tl.arange(0, BW)
        b_q = load_queries(heads_on(q, own), first, inside, ok, BW, D, BD, EVEN, HAS_MASK)
        b_do = load_rows(heads_on(g, own), first, inside, BW, E, BE, EVEN)
        b_lse = tl.load(p_lse + rows, mask=inside, other=-NEVER)
        b_delta = tl.load(p_delta + rows, mask=inside, other=0.0)
        b_dk, b_dv = add_near(
            b_dk, b_dv, b_q, b_do, b_k, b_v, ok, b_lse, b_delta, scale, EVEN, PRECISION
        )
    store_rows(dk, first, b_dk, inside, BW, D, BD, EVEN)
    store_rows(dv, first, b_dv, inside, BW, E, BE, EVEN)


@triton.jit
def keys_rows_kernel(
    p_dk, p_dv, p_pair_dk, p_pair_dv, p_order, p_chosen, p_starts, first_head, T, S, HK, G, K,
    parts,
    stride_dkb, stride_dkh, stride_dkt, stride_dkd, stride_dvb, stride_dvh, stride_dvt, stride_dvd,
    W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BW: tl.constexpr, BP: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """W of the S rows behind the tokens of one (sample, key head): the sum over their pairs."""
    part, local = tl.program_id(0) % parts, (tl.program_id(0) // parts).to(tl.int64)
    index = local + first_head
    batch, key_head, first = index // HK, index % HK, T + part * W
    dk = rows_of(p_dk, batch, key_head, 0, stride_dkb, stride_dkh, stride_dkt, stride_dkd)
    dv = rows_of(p_dv, batch, key_head, 0, stride_dvb, stride_dvh, stride_dvt, stride_dvd)
    b_dk = tl.zeros([BW, BD], tl.float32)
    b_dv = tl.zeros([BW, BE], tl.float32)
    base = (index - local) * R * G * K
    for r in tl.static_range(R):
        p_ends = p_starts + (index * R + r) * parts + part
        start, end = tl.load(p_ends), tl.load(p_ends + 1)
        for at in tl.range(start, end, BP, num_stages=STAGES):
            b_key, b_row, b_value_row = load_pairs(
                p_pair_dk, p_pair_dv, p_order, p_chosen, base, at, end, D, E, BD, BE, BP
            )
            b_dk, b_dv = add_pairs(b_dk, b_dv, b_key, b_row, b_value_row, first, BW, PRECISION)
    places = part * W + tl.arange(0, BW)
    inside = (places < S) & (tl.arange(0, BW) < W)
    store_rows(dk, first, b_dk, inside, BW, D, BD, False)
    store_rows(dv, first, b_dv, inside, BW, E, BE, False)
