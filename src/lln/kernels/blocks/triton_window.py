"""Softmax inside a sliding window or inside blocks, forward and backward, without atomics.

Rows are completed tile by tile, as in FlashAttention (arXiv:2205.14135), over the keys that at
least one row of a tile can see. What a row may see follows from the distance of two *places* alone:
a token's place is its index; packed sequences, and blocks, stand too far apart to see each other;
a key that is masked, or no token at all, is nowhere. With s = scale · q kᵀ, ℓ = log Σ exp(s),
P = exp(s − ℓ), dP = dO vᵀ and δ = rowsum(dO ∘ o):

    o = P v;   dv = Pᵀ dO;   dS = scale · P∘(dP − δ);   dq = dS k;   dk = dSᵀ q

Scores and ℓ are in units of log 2. A row that sees no key has ℓ = −NEVER, so that its P is zero.

BLOCKS: a row sees its block of ``window`` tokens. FULL: tiles in which every row sees every key are
gone over apart, and not asked what they hide; EDGES: there are others. ADDS: tensors hold what LLN
attention has written, and get mix · (that) + (1 − mix) · (this).

Dimension legend: see `lln.kernels.launching.triton_steps`; B samples, H query heads, HK key heads,
R = H / HK, T tokens, BS tokens in a tile of the other side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_order import wait_for_launch
from lln.kernels.launching.triton_steps import (
    INTERPRETED,
    LOG2E,
    NEVER,
    heads_on,
    load_queries,
    load_rows,
    rows_of,
    store_rows,
)

# Further from every place than a window reaches.
NOWHERE = tl.constexpr(-(1 << 30))


@triton.jit
def power_of_two(b_x):
    """2^x, results below the normal range flushed to zero."""
    if INTERPRETED:
        return tl.exp2(b_x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def find_tile(tiles, heads, T, BT: tl.constexpr):
    """The tile of a program: sample, head, first token, rows, and which of them are tokens."""
    program = tl.program_id(0)
    first, index = program % tiles * BT, (program // tiles).to(tl.int64)
    rows = first + tl.arange(0, BT)
    return index // heads, index % heads, first, rows, rows < T


@triton.jit
def places(p_places, tokens, inside, window, PACKED: tl.constexpr, BLOCKS: tl.constexpr):
    """Where tokens stand."""
    if PACKED:
        return tl.load(p_places + tokens, mask=inside, other=0)
    if BLOCKS:
        return tokens + tokens // window * window
    return tokens


@triton.jit
def valid(p_mask, tokens, inside, HAS_MASK: tl.constexpr):
    """Which tokens there are and may be seen."""
    if HAS_MASK:
        inside = inside & (tl.load(p_mask + tokens, mask=inside, other=0) != 0)
    return inside


@triton.jit
def find_keys(
    p_places, p_mask, tokens, T, window,
    PACKED: tl.constexpr, BLOCKS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Which keys may be seen, and their places; the others are nowhere."""
    seen = valid(p_mask, tokens, tokens < T, HAS_MASK)
    return tl.where(seen, places(p_places, tokens, seen, window, PACKED, BLOCKS), NOWHERE), seen


@triton.jit
def hide(b_s, b_distance, window, CAUSAL: tl.constexpr, BLOCKS: tl.constexpr):
    """Scores, ``NEVER`` where the distance from key to row is more than one that is seen."""
    reach = window - 1 if BLOCKS else window
    if CAUSAL:
        return tl.where((b_distance >= 0) & (b_distance <= reach), b_s, NEVER)
    return tl.where(tl.abs(b_distance) <= reach, b_s, NEVER)


@triton.jit
def first_seen(token, window, BLOCKS: tl.constexpr):
    """The first token in reach of a token, on this side of it."""
    return token // window * window if BLOCKS else tl.maximum(token - window, 0)


@triton.jit
def last_seen(token, window, BLOCKS: tl.constexpr):
    """The last token in reach of a token, on the other side of it."""
    return token // window * window + window - 1 if BLOCKS else token + window


@triton.jit
def cut_walk(
    first, T, window, BT: tl.constexpr, BS: tl.constexpr,
    BEFORE: tl.constexpr, BEHIND: tl.constexpr, BLOCKS: tl.constexpr,
    EDGES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Where a tile's walk over the other side begins; its tiles at the edge before, full, and all.

    BEFORE, BEHIND: whether tokens of the other side count that come before a token, or behind it.
    """
    last = first + BT - 1
    begin = first_seen(first, window, BLOCKS) if BEFORE else first
    end = tl.minimum(last_seen(last, window, BLOCKS) if BEHIND else last, T - 1) + 1
    steps = tl.cdiv(end - begin, BS)
    if not FULL:
        return begin, steps, 0, steps
    if not EDGES:
        return begin, 0, steps, steps
    low = first_seen(last, window, BLOCKS) if BEFORE else last
    high = tl.minimum(last_seen(first, window, BLOCKS) if BEHIND else first, T - 1) + 1
    edge = tl.minimum(tl.cdiv(tl.maximum(low - begin, 0), BS), steps)
    return begin, edge, tl.maximum(high - begin - edge * BS, 0) // BS, steps


@triton.jit
def place_of(step, begin, edge, full, BS: tl.constexpr, IS_FULL: tl.constexpr, FULL: tl.constexpr):
    """The first token of a step: of the full tiles, or of those at both edges."""
    if IS_FULL:
        return begin + (edge + step) * BS
    if not FULL:
        return begin + step * BS
    return begin + tl.where(step < edge, step, step + full) * BS


@triton.jit
def add_to(
    rows, first, b_tile, inside, mix, BT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    EVEN: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Write a tile, or with ``ADDS`` what is there mixed with it."""
    if ADDS:
        b_tile = b_tile * (1.0 - mix) + load_rows(rows, first, inside, BT, D, BD, EVEN) * mix
    store_rows(rows, first, b_tile, inside, BT, D, BD, EVEN)


@triton.jit
def scores(b_left, b_right, scale, PRECISION: tl.constexpr):
    """Scores ``[left, right]`` of two tiles, in units of log 2."""
    return tl.dot(b_left, tl.trans(b_right), input_precision=PRECISION) * (scale * LOG2E)


@triton.jit
def window_fwd_kernel(
    p_q, p_k, p_v, p_o, p_norm, p_mask, p_places, scale, window, mix, tiles, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_ob, stride_oh, stride_ot, stride_od,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    PACKED: tl.constexpr, BLOCKS: tl.constexpr, EDGES: tl.constexpr, FULL: tl.constexpr,
    ADDS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one (sample, head); ℓ of its rows goes to ``[B, H, T]``."""
    batch, head, first, rows, inside = find_tile(tiles, H, T, BT)
    q = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, head // R, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, head // R, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    o = rows_of(p_o, batch, head, 0, stride_ob, stride_oh, stride_ot, stride_od)
    b_row = places(p_places, rows, inside, window, PACKED, BLOCKS)
    ok = valid(p_mask + batch * T, rows, inside, HAS_MASK)
    b_q = load_queries(q, first, inside, ok, BT, D, BD, not EDGES, HAS_MASK)
    b_peak = tl.full([BT], NEVER, tl.float32)
    b_mass = tl.zeros([BT], tl.float32)
    b_o = tl.zeros([BT, BE], tl.float32)
    begin, edge, full, steps = cut_walk(
        first, T, window, BT, BS, True, not CAUSAL, BLOCKS, EDGES, FULL
    )  # fmt: skip
    for part in tl.static_range(0 if EDGES else 1, 2 if FULL else 1):
        for step in tl.range(0, full if part == 1 else steps - full, num_stages=STAGES):
            start = place_of(step, begin, edge, full, BS, part == 1, FULL)
            keys = start + tl.arange(0, BS)
            b_key, seen = find_keys(
                p_places, p_mask + batch * T, keys, T, window, PACKED, BLOCKS, HAS_MASK
            )
            b_k = load_rows(k, start, seen, BS, D, BD, part == 1)
            b_s = scores(b_q, b_k, scale, PRECISION)
            if part != 1:
                b_s = hide(b_s, b_row[:, None] - b_key[None, :], window, CAUSAL, BLOCKS)
            b_new = tl.maximum(b_peak, tl.max(b_s, 1))
            b_shrink = power_of_two(b_peak - b_new)
            b_p = power_of_two(b_s - b_new[:, None])
            b_mass = b_mass * b_shrink + tl.sum(b_p, 1)
            b_v = load_rows(v, start, seen, BS, E, BE, part == 1)
            b_o = b_o * b_shrink[:, None]
            b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision=PRECISION)
            b_peak = b_new
    # A row with NaN sees it.
    sees = (b_peak > 0.5 * NEVER) | (b_mass != b_mass)
    b_o = tl.where(sees[:, None], b_o * (1.0 / b_mass)[:, None], 0.0)
    add_to(o, first, b_o, inside, mix, BT, E, BE, not EDGES, ADDS)
    b_norm = tl.where(sees, b_peak + tl.log2(b_mass), -NEVER)
    tl.store(p_norm + (batch * H + head) * T + rows, b_norm, mask=inside)


@triton.jit
def window_query_kernel(
    p_q, p_k, p_v, p_o, p_g, p_dq, p_norm, p_level, p_mask, p_places,
    scale, window, mix, tiles, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_ob, stride_oh, stride_ot, stride_od,
    stride_gb, stride_gh, stride_gt, stride_gd, stride_dqb, stride_dqh, stride_dqt, stride_dqd,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    PACKED: tl.constexpr, BLOCKS: tl.constexpr, EDGES: tl.constexpr, FULL: tl.constexpr,
    ADDS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient dq of one tile of queries; δ of its rows goes to ``[B, H, T]``."""
    batch, head, first, rows, inside = find_tile(tiles, H, T, BT)
    q = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, head // R, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, head // R, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    o = rows_of(p_o, batch, head, 0, stride_ob, stride_oh, stride_ot, stride_od)
    g = rows_of(p_g, batch, head, 0, stride_gb, stride_gh, stride_gt, stride_gd)
    dq = rows_of(p_dq, batch, head, 0, stride_dqb, stride_dqh, stride_dqt, stride_dqd)
    b_row = places(p_places, rows, inside, window, PACKED, BLOCKS)
    ok = valid(p_mask + batch * T, rows, inside, HAS_MASK)
    b_q = load_queries(q, first, inside, ok, BT, D, BD, not EDGES, HAS_MASK)
    b_do = load_rows(g, first, inside, BT, E, BE, not EDGES)
    b_o = load_rows(o, first, inside, BT, E, BE, not EDGES)
    b_level = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    at = (batch * H + head) * T + rows
    tl.store(p_level + at, b_level, mask=inside)
    b_norm = tl.load(p_norm + at, mask=inside, other=0.0)
    b_dq = tl.zeros([BT, BD], tl.float32)
    begin, edge, full, steps = cut_walk(
        first, T, window, BT, BS, True, not CAUSAL, BLOCKS, EDGES, FULL
    )  # fmt: skip
    for part in tl.static_range(0 if EDGES else 1, 2 if FULL else 1):
        for step in tl.range(0, full if part == 1 else steps - full, num_stages=STAGES):
            start = place_of(step, begin, edge, full, BS, part == 1, FULL)
            keys = start + tl.arange(0, BS)
            b_key, seen = find_keys(
                p_places, p_mask + batch * T, keys, T, window, PACKED, BLOCKS, HAS_MASK
            )
            b_k = load_rows(k, start, seen, BS, D, BD, part == 1)
            b_s = scores(b_q, b_k, scale, PRECISION)
            if part != 1:
                b_s = hide(b_s, b_row[:, None] - b_key[None, :], window, CAUSAL, BLOCKS)
            b_v = load_rows(v, start, seen, BS, E, BE, part == 1)
            b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
            b_ds = power_of_two(b_s - b_norm[:, None]) * (b_dp - b_level[:, None])
            b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    add_to(dq, first, b_dq * scale, inside, mix, BT, D, BD, not EDGES, ADDS)


@triton.jit
def window_key_kernel(
    p_q, p_k, p_v, p_g, p_dk, p_dv, p_norm, p_level, p_mask, p_places,
    scale, window, mix, tiles, T, HK,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dkb, stride_dkh, stride_dkt, stride_dkd, stride_dvb, stride_dvh, stride_dvt, stride_dvd,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    PACKED: tl.constexpr, BLOCKS: tl.constexpr, EDGES: tl.constexpr, FULL: tl.constexpr,
    ADDS: tl.constexpr, OF_VALUE: tl.constexpr, OF_KEY: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """The gradients dv (OF_VALUE) and dk (OF_KEY) of a tile, from the R query heads that share it.

    Products are turned: Pᵀ and dSᵀ are left operands straight from the registers.
    """
    wait_for_launch(FOLLOWS)
    batch, key_head, first, keys, inside = find_tile(tiles, HK, T, BT)
    q = rows_of(p_q, batch, key_head * R, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, key_head, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, key_head, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    g = rows_of(p_g, batch, key_head * R, 0, stride_gb, stride_gh, stride_gt, stride_gd)
    dk = rows_of(p_dk, batch, key_head, 0, stride_dkb, stride_dkh, stride_dkt, stride_dkd)
    dv = rows_of(p_dv, batch, key_head, 0, stride_dvb, stride_dvh, stride_dvt, stride_dvd)
    b_key, seen = find_keys(p_places, p_mask + batch * T, keys, T, window, PACKED, BLOCKS, HAS_MASK)
    b_k = load_rows(k, first, seen, BT, D, BD, not EDGES)
    b_v = load_rows(v, first, seen, BT, E, BE, not EDGES)
    b_dk = tl.zeros([BT, BD], tl.float32)
    b_dv = tl.zeros([BT, BE], tl.float32)
    begin, edge, full, steps = cut_walk(
        first, T, window, BT, BS, not CAUSAL, True, BLOCKS, EDGES, FULL
    )  # fmt: skip
    for r in range(R):
        own, at = tl.cast(r, tl.int64), (batch * HK * R + key_head * R + r) * T
        for part in tl.static_range(0 if EDGES else 1, 2 if FULL else 1):
            for step in tl.range(0, full if part == 1 else steps - full, num_stages=STAGES):
                start = place_of(step, begin, edge, full, BS, part == 1, FULL)
                rows = start + tl.arange(0, BS)
                there = rows < T
                b_row = places(p_places, rows, there, window, PACKED, BLOCKS)
                ok = valid(p_mask + batch * T, rows, there, HAS_MASK)
                b_q = load_queries(
                    heads_on(q, own), start, there, ok, BS, D, BD, part == 1, HAS_MASK
                )
                b_do = load_rows(heads_on(g, own), start, there, BS, E, BE, part == 1)
                # No row: its P is zero.
                b_norm = tl.load(p_norm + at + rows, mask=there, other=-NEVER)
                b_level = tl.load(p_level + at + rows, mask=there, other=0.0)
                b_s = scores(b_k, b_q, scale, PRECISION)
                if part != 1:
                    b_s = hide(b_s, b_row[None, :] - b_key[:, None], window, CAUSAL, BLOCKS)
                b_p = power_of_two(b_s - b_norm[None, :])
                if OF_VALUE:
                    b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
                if OF_KEY:
                    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
                    b_ds = b_p * (b_dp - b_level[None, :])
                    b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    if OF_KEY:
        add_to(dk, first, b_dk * scale, inside, mix, BT, D, BD, not EDGES, ADDS)
    if OF_VALUE:
        add_to(dv, first, b_dv, inside, mix, BT, E, BE, not EDGES, ADDS)
