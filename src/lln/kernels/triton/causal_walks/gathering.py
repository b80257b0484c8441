"""The gathered state of the backward: what later rows send back to a stretch's keys.

With Z and δ as `lln.kernels.triton.causal_walks.queries` left them:

    U_f = Σ_i e^{x_if − Z_i} dO_i,  V_f = Σ_i e^{x_if − Z_i} δ_i    over all later rows
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.triton.causal_walks.queries import ALWAYS
from lln.kernels.triton.causal_walks.tiles import query_exponents
from lln.kernels.triton.mixing import mix_rows, row_weights
from lln.kernels.triton.steps import (
    NEVER,
    exponential,
    gap_before,
    load_rows,
    load_scale,
    locate,
    quiet_rows,
    rows_inside,
    token_ok,
)


@triton.jit
def gather_tile(
    b_peak, b_level, b_sum, b_h, b_do, b_delta, b_row,
    EXP: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take rows with the exponents x − Z ``[BT, BD]`` into the gathered state (u, V, U)."""
    b_new = tl.maximum(b_peak, tl.max(b_h, 0).to(tl.float32))
    b_shrink = exponential(b_peak - b_new)
    b_e = exponential((b_h - b_new[None, :].to(EXP)).to(tl.float32))
    # Rows that see no key count too where nothing else is; only masked keys come before them.
    b_e = b_e * b_row[:, None]
    b_level = b_level * b_shrink + tl.sum(b_e * b_delta[:, None], 0)
    b_sum = b_sum * b_shrink[:, None]
    b_sum = tl.dot(tl.trans(b_e.to(LOW)), b_do.to(LOW), b_sum, input_precision=PRECISION)
    return b_new, b_level, b_sum


@triton.jit
def load_gradient(
    p_do, p_mix, p_z, p_delta, mix, offset, inside, stride_gt, stride_gd, stride_mt, stride_me,
    E: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr, MIX: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """DO of a tile for the long and the short range, Z, δ and the rows' weights."""
    rows = tl.arange(0, BT)
    b_do = load_rows(p_do + offset * stride_gt, stride_gt, stride_gd, inside, BT, E, BE, EVEN)
    b_z = tl.load(p_z + offset + rows, mask=inside, other=ALWAYS)
    b_delta = tl.load(p_delta + offset + rows, mask=inside, other=0.0)
    b_row = row_weights(p_mix, mix, offset, stride_mt, inside, BT, MIX)
    b_short = b_do
    if MIX == 3:
        p_m = p_mix + offset * stride_mt
        b_mix = load_rows(p_m, stride_mt, stride_me, inside, BT, E, BE, EVEN).to(tl.float32)
        b_short = (b_do.to(tl.float32) * (1.0 - b_mix)).to(b_do.dtype)
        b_do = (b_do.to(tl.float32) * b_mix).to(b_do.dtype)
    return b_do, b_short, b_z, b_delta, b_row


@triton.jit
def causal_gather_kernel(
    p_q, p_do, p_mix, p_mask, p_alpha, p_bounds, p_peak, p_level, p_sum, p_z, p_delta,
    alpha, mix, program_tokens, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_mb, stride_mh, stride_mt, stride_me,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
    HAS_ALPHA: tl.constexpr, QUIET: tl.constexpr, MIX: tl.constexpr, EVEN: tl.constexpr,
    PACKED: tl.constexpr, SHIFTED: tl.constexpr, EXP: tl.constexpr, LOW: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gathered state of one stretch by itself."""
    segment, segments = tl.program_id(0), tl.num_programs(0)
    index = tl.program_id(1).to(tl.int64)
    batch, head = index // H, index % H
    begin, tokens = locate(p_bounds, batch, T, PACKED)
    p_mask += batch * T
    start = segment * program_tokens - gap_before(p_bounds, batch, SHIFTED)
    end = tl.minimum(start + program_tokens, tokens)
    p_q += batch * stride_qb + begin * stride_qt + head * stride_qh
    p_do += batch * stride_gb + begin * stride_gt + head * stride_gh
    p_mix += batch * stride_mb + begin * stride_mt + head * stride_mh
    place = mix_rows(index, head, begin, T, 1, PACKED)
    alpha_here = load_scale(p_alpha, alpha, index, HAS_ALPHA)
    b_peak = tl.full([BD], NEVER, tl.float32)
    b_level = tl.zeros([BD], tl.float32)
    b_sum = tl.zeros([BD, BE], tl.float32)
    for first in tl.range(start, end, BT, num_stages=STAGES):
        inside = rows_inside(first, end, BT, SHIFTED)
        offset = tl.cast(first, tl.int64)
        b_q = load_rows(p_q + offset * stride_qt, stride_qt, stride_qd, inside, BT, D, BD, EVEN)
        if QUIET:
            b_q = quiet_rows(b_q, token_ok(p_mask, first, end, BT, True))
        b_do, _, b_z, b_delta, b_row = load_gradient(
            p_do, p_mix, p_z + place, p_delta + place, mix, offset, inside, stride_gt, stride_gd,
            stride_mt, stride_me, E, BE, BT, MIX, EVEN,
        )  # fmt: skip
        b_h = query_exponents(b_q, alpha_here, D, BD).to(EXP) - b_z[:, None]
        b_peak, b_level, b_sum = gather_tile(
            b_peak, b_level, b_sum, b_h, b_do, b_delta, b_row, EXP, LOW, PRECISION
        )
    part = index * segments + segment
    slots = tl.arange(0, BD)
    tl.store(p_peak + part * BD + slots, b_peak)
    tl.store(p_level + part * BD + slots, b_level)
    p_out = p_sum + part * BD * BE + slots[:, None] * BE + tl.arange(0, BE)[None, :]
    tl.store(p_out, b_sum)
