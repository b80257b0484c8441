"""Causal kernels: a program walks over the tiles of its stretch and carries the summary along.

Row i of a tile reads the summary of everything before the tile and, inside the tile, the keys up
to itself. With x = α q, y = β k, the largest exponent m_f of every slot so far, and r_i the largest
of x_if + m_f:

    S_ij = Σ_f e^{x_if + m_f − r_i} e^{y_jf − m_f},  j ≤ i         one product, no exponent above 0
    n_i = Σ_j S_ij + Σ_f e^{x_if + m_f − r_i} mass_f                normaliser
    out_i = (Σ_j S_ij v_j + Σ_f e^{x_if + m_f − r_i} sum_f) / n_i

A key that row i may not see can set m_f; if it lies too far above the others, row i loses its
digits, and its normaliser tells: below ``GUARD`` the stretch is marked lost. A second launch of the
same kernel with ``EXACT`` leaves at once where nothing was lost; elsewhere it forms the scores of a
tile one slot at a time in the log domain, and walks the stretch again.

Backward, with Z_i = r_i + log n_i, dP_ij = dO_i·v_j and δ_i = dO_i·out_i: forward over the tiles
for dq, backward over them for dk and dv with the *gathered* state

    U_f = Σ_i e^{x_if − Z_i} dO_i,  V_f = Σ_i e^{x_if − Z_i} δ_i    over all later rows
    dy_jf = Σ_i e^{x_if + y_jf − Z_i} (dP_ij − δ_i) + e^{y_jf} (v_j·U_f − V_f)

whose exponents y_jf + x_if − Z_i are never positive. They are small differences of what may be
large numbers: float32 calls form them in float64 (``EXP``), so that Z rounds nothing away.
Stretches start from states that a scan over the stretches' own sums has left in memory.

Dimension legend: see `lln.kernels.steps`; every query head walks by itself, KG of them share a key
head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.backward import mix_rows, row_weights
from lln.kernels.steps import (
    NEVER,
    block_softmax,
    drop_factor,
    exponential,
    hide_rows,
    key_exponents,
    load_rows,
    load_scale,
    locate,
    quiet_rows,
    store_rows,
    token_ok,
    widen,
)

# Terms lost to underflow weigh at most 1e-38 / GUARD of their row.
GUARD = tl.constexpr(1e-20)
# Z of a row that no gradient passes through: every weight e^{x − Z} is then zero.
ALWAYS = tl.constexpr(1e30)


@triton.jit
def load_state(
    p_peak, p_mass, p_sum, part, BD: tl.constexpr, BE: tl.constexpr, HAS_STATE: tl.constexpr
):
    """The state that a stretch starts from: peak ``[BD]``, mass ``[BD]``, sum ``[BD, BE]``."""
    slots = tl.arange(0, BD)
    if HAS_STATE:
        p_in = p_sum + part * BD * BE + slots[:, None] * BE + tl.arange(0, BE)[None, :]
        b_peak = tl.load(p_peak + part * BD + slots)
        return b_peak, tl.load(p_mass + part * BD + slots), tl.load(p_in)
    b_peak = tl.full([BD], NEVER, tl.float32)
    return b_peak, tl.zeros([BD], tl.float32), tl.zeros([BD, BE], tl.float32)


@triton.jit
def scan_kernel(
    p_peak, p_mass, p_sum, p_peak_before, p_mass_before, p_sum_before, segments,
    BD: tl.constexpr, BE: tl.constexpr, ROWS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """From every stretch's own sums to those of all stretches before (or after) it.

    Not in place: several warps load the same peak, and one could store before another loads.
    """
    index = tl.program_id(1).to(tl.int64)
    slots = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b_peak = tl.full([ROWS], NEVER, tl.float32)
    b_mass = tl.zeros([ROWS], tl.float32)
    b_sum = tl.zeros([ROWS, BE], tl.float32)
    for step in range(segments):
        segment = segments - 1 - step if REVERSE else step
        part = index * segments + segment
        places = part * BD * BE + slots[:, None] * BE + tl.arange(0, BE)[None, :]
        b_other = tl.load(p_peak + part * BD + slots)
        b_other_mass = tl.load(p_mass + part * BD + slots)
        b_other_sum = tl.load(p_sum + places)
        tl.store(p_peak_before + part * BD + slots, b_peak)
        tl.store(p_mass_before + part * BD + slots, b_mass)
        tl.store(p_sum_before + places, b_sum)
        b_new = tl.maximum(b_peak, b_other)
        b_old, b_add = exponential(b_peak - b_new), exponential(b_other - b_new)
        b_mass = b_mass * b_old + b_other_mass * b_add
        b_sum = b_sum * b_old[:, None] + b_other_sum * b_add[:, None]
        b_peak = b_new


@triton.jit
def query_exponents(b_q, alpha, D: tl.constexpr, BD: tl.constexpr):
    """α·q ``[BT, BD]``; ``NEVER`` in slots that are padding."""
    b_x = widen(b_q, BD) * alpha
    if D < BD:
        b_x = tl.where((tl.arange(0, BD) < D)[None, :], b_x, NEVER)
    return b_x


@triton.jit
def exact_columns(
    p_q, p_k, slot, stride_qt, stride_qd, stride_kt, stride_kd, alpha, beta, inside, ok,
    BT: tl.constexpr, QUIET: tl.constexpr, EXP: tl.constexpr,
):  # fmt: skip
    """x_i + y_j of one slot ``[BT, BT]``; ``NEVER`` for keys that do not count."""
    rows = tl.arange(0, BT)
    b_q = tl.load(p_q + rows * stride_qt + slot * stride_qd, mask=inside, other=0.0)
    b_k = tl.load(p_k + rows * stride_kt + slot * stride_kd, mask=ok, other=0.0)
    b_x = b_q.to(tl.float32)
    if QUIET:
        b_x = tl.where(ok | ((b_x - b_x) == 0), b_x, 0.0)
    b_y = tl.where(ok, b_k.to(tl.float32) * beta, NEVER)
    return (b_x * alpha).to(EXP)[:, None] + b_y.to(EXP)[None, :]


@triton.jit
def exact_scores(
    p_q, p_k, stride_qt, stride_qd, stride_kt, stride_kd, alpha, beta, inside, ok,
    D: tl.constexpr, BT: tl.constexpr, QUIET: tl.constexpr, EXP: tl.constexpr,
):  # fmt: skip
    """Log Σ_f e^{x_if + y_jf} ``[BT, BT]`` for j ≤ i, without any common shift."""
    b_peak = tl.full([BT, BT], NEVER, EXP)
    for slot in range(D):
        b_x = exact_columns(
            p_q, p_k, slot, stride_qt, stride_qd, stride_kt, stride_kd, alpha, beta, inside, ok,
            BT, QUIET, EXP,
        )  # fmt: skip
        b_peak = tl.maximum(b_peak, b_x)
    b_mass = tl.zeros([BT, BT], tl.float32)
    for slot in range(D):
        b_x = exact_columns(
            p_q, p_k, slot, stride_qt, stride_qd, stride_kt, stride_kd, alpha, beta, inside, ok,
            BT, QUIET, EXP,
        )  # fmt: skip
        b_mass += exponential((b_x - b_peak).to(tl.float32))
    rows = tl.arange(0, BT)
    seen = (rows[:, None] >= rows[None, :]) & ok[None, :]
    return tl.where(seen, b_peak + tl.log(b_mass).to(EXP), NEVER)


@triton.jit
def exact_products(
    b_g, b_z, p_q, p_k, stride_qt, stride_qd, stride_kt, stride_kd, alpha, beta, inside, ok,
    AXIS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
    QUIET: tl.constexpr, EXP: tl.constexpr,
):  # fmt: skip
    """Σ G_ij e^{x_if + y_jf − z_i} over the tokens of one axis: ``[BT, BD]``."""
    rows = tl.arange(0, BT)
    seen = (rows[:, None] >= rows[None, :]) & ok[None, :] & inside[:, None]
    b_out = tl.zeros([BT, BD], tl.float32)
    slots = tl.arange(0, BD)
    for slot in range(D):
        b_x = exact_columns(
            p_q, p_k, slot, stride_qt, stride_qd, stride_kt, stride_kd, alpha, beta, inside, ok,
            BT, QUIET, EXP,
        )  # fmt: skip
        b_e = tl.where(seen, exponential((b_x - b_z[:, None]).to(tl.float32)) * b_g, 0.0)
        b_out = tl.where((slots == slot)[None, :], tl.sum(b_e, AXIS)[:, None], b_out)
    return b_out


@triton.jit
def load_tile(
    p_q_tile, p_k_tile, p_v_tile, stride_qt, stride_qd, stride_kt, stride_kd, stride_vt, stride_vd,
    inside, ok, seed, drop_first, dropout_p,
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
    EVEN: tl.constexpr, QUIET: tl.constexpr, HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values of a tile, padding and dropped keys out; the dropout's factors."""
    b_q = load_rows(p_q_tile, stride_qt, stride_qd, inside, BT, D, BD, EVEN)
    b_k = load_rows(p_k_tile, stride_kt, stride_kd, inside, BT, D, BD, EVEN)
    b_v = load_rows(p_v_tile, stride_vt, stride_vd, inside, BT, E, BE, EVEN)
    b_factor = tl.full([BT], 1.0, tl.float32)
    if QUIET:
        b_q = quiet_rows(b_q, ok)
    if HAS_MASK:
        b_k, b_v = hide_rows(b_k, ok), hide_rows(b_v, ok)
    if HAS_DROPOUT:
        b_factor = drop_factor(seed, drop_first, dropout_p, BT)
        b_v = (b_v.to(tl.float32) * b_factor[:, None]).to(b_v.dtype)
    return b_q, b_k, b_v, b_factor


@triton.jit
def weigh_rows(
    b_x, b_y, ok, inside, b_peak, b_mass, b_sum, p_q_tile, p_k_tile, stride_qt, stride_qd,
    stride_kt, stride_kd, alpha, beta,
    D: tl.constexpr, BT: tl.constexpr, EVEN: tl.constexpr, QUIET: tl.constexpr,
    EXACT: tl.constexpr, EXP: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """How much every row of a tile sees of the tile's keys and of the state.

    Returns:
        S ``[BT, BT]``, the slots' weights ``[BT, BD]``, the exponent ``[BT]`` they were both
        shifted by, the keys e^{y − m} (``EXACT``: y itself), and the state shifted to match.
    """
    rows = tl.arange(0, BT)
    if EXACT:
        b_log = exact_scores(
            p_q_tile, p_k_tile, stride_qt, stride_qd, stride_kt, stride_kd, alpha, beta, inside, ok,
            D, BT, QUIET, EXP,
        )  # fmt: skip
        b_wide = b_x.to(EXP) + b_peak[None, :].to(EXP)
        b_top = tl.maximum(tl.max(b_wide, 1), tl.max(b_log, 1))
        b_w = exponential((b_wide - b_top[:, None]).to(tl.float32))
        b_s = exponential((b_log - b_top[:, None]).to(tl.float32))
        b_s = tl.where(b_log > NEVER * 0.5, b_s, 0.0)
        return b_s, b_w, b_top, b_y, b_peak, b_mass, b_sum
    b_new = tl.maximum(b_peak, tl.max(b_y, 0))
    b_shrink = exponential(b_peak - b_new)
    b_e = exponential(b_y - b_new[None, :])
    if not EVEN:
        b_e = tl.where(ok[:, None], b_e, 0.0)
    b_wide = b_x.to(EXP) + b_new[None, :].to(EXP)
    b_top = tl.max(b_wide, 1)
    b_w = exponential((b_wide - b_top[:, None]).to(tl.float32))
    b_s = tl.dot(b_w.to(LOW), tl.trans(b_e.to(LOW)), input_precision=PRECISION)
    b_s = tl.where(rows[:, None] >= rows[None, :], b_s, 0.0)
    return b_s, b_w, b_top, b_e, b_new, b_mass * b_shrink, b_sum * b_shrink[:, None]


@triton.jit
def take_tile(
    b_peak, b_mass, b_sum, b_e, b_v, ok,
    EVEN: tl.constexpr, EXACT: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take a tile's keys, as `weigh_rows` left them, and values into the state."""
    if EXACT:
        b_new = tl.maximum(b_peak, tl.max(b_e, 0))
        b_shrink = exponential(b_peak - b_new)
        b_e = exponential(b_e - b_new[None, :])
        if not EVEN:
            b_e = tl.where(ok[:, None], b_e, 0.0)
        b_mass, b_sum, b_peak = b_mass * b_shrink, b_sum * b_shrink[:, None], b_new
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


@triton.jit(do_not_specialize=["seed"])
def causal_fwd_kernel(
    p_q, p_k, p_v, p_o, p_mix, p_mask, p_alpha, p_beta, p_bounds, p_peak, p_mass, p_sum, p_lost,
    alpha, beta, mix, scale, block_size, seed, dropout_p, tile_tokens, program_tokens, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_ob, stride_oh, stride_ot, stride_od,
    stride_mb, stride_mh, stride_mt, stride_me,
    KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr, HAS_STATE: tl.constexpr,
    QUIET: tl.constexpr, ONE_BLOCK: tl.constexpr, MIX: tl.constexpr, EVEN: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, PACKED: tl.constexpr, EXACT: tl.constexpr,
    EXP: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One stretch of one (sample, query head): its outputs, and whether any row was lost."""
    segment, segments = tl.program_id(0), tl.num_programs(0)
    index = tl.program_id(1).to(tl.int64)
    part = index * segments + segment
    if EXACT:  # noqa: SIM102 (EXACT is known when compiling)
        if tl.load(p_lost + part) == 0:
            return
    batch, head = index // H, index % H
    key_head = head // KG
    begin, tokens = locate(p_bounds, batch, T, PACKED)
    start = segment * program_tokens
    end = tl.minimum(start + program_tokens, tokens)
    p_q += batch * stride_qb + begin * stride_qt + head * stride_qh
    p_k += batch * stride_kb + begin * stride_kt + key_head * stride_kh
    p_v += batch * stride_vb + begin * stride_vt + key_head * stride_vh
    p_o += batch * stride_ob + begin * stride_ot + head * stride_oh
    p_mix += batch * stride_mb + begin * stride_mt + head * stride_mh
    p_mask += batch * T
    drop_first = (batch * (H // KG) + key_head) * T
    alpha_here = load_scale(p_alpha, alpha, index, HAS_ALPHA)
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    b_peak, b_mass, b_sum = load_state(p_peak, p_mass, p_sum, part, BD, BE, HAS_STATE)
    rows = tl.arange(0, BT)
    lost = 0
    for first in tl.range(start, end, tile_tokens, num_stages=STAGES):
        last = tl.minimum(first + tile_tokens, end)
        inside = first + rows < last
        ok = token_ok(p_mask, first, last, BT, HAS_MASK)
        offset = tl.cast(first, tl.int64)
        p_q_tile, p_k_tile = p_q + offset * stride_qt, p_k + offset * stride_kt
        b_q, b_k, b_v, _ = load_tile(
            p_q_tile, p_k_tile, p_v + offset * stride_vt, stride_qt, stride_qd, stride_kt,
            stride_kd, stride_vt, stride_vd, inside, ok, seed, drop_first + first, dropout_p,
            D, E, BD, BE, BT, EVEN, QUIET, HAS_MASK, HAS_DROPOUT,
        )  # fmt: skip
        b_x = query_exponents(b_q, alpha_here, D, BD)
        b_y = key_exponents(b_k, beta_here, ok, BD, EVEN)
        b_s, b_w, _, b_e, b_peak, b_mass, b_sum = weigh_rows(
            b_x, b_y, ok, inside, b_peak, b_mass, b_sum, p_q_tile, p_k_tile, stride_qt, stride_qd,
            stride_kt, stride_kd, alpha_here, beta_here,
            D, BT, EVEN, QUIET, EXACT, EXP, LOW, PRECISION,
        )  # fmt: skip
        b_norm = tl.sum(b_s, 1) + tl.sum(b_w * b_mass[None, :], 1)
        if not EXACT:
            lost = tl.maximum(lost, any_lost(b_norm, b_mass, inside, ok, HAS_MASK))
        if HAS_MASK:
            b_norm = tl.where(b_norm == 0, 1.0, b_norm)
        b_o = tl.dot(b_w.to(LOW), b_sum.to(LOW), input_precision=PRECISION)
        b_o = tl.dot(b_s.to(LOW), b_v.to(LOW), b_o, input_precision=PRECISION)
        b_peak, b_mass, b_sum = take_tile(
            b_peak, b_mass, b_sum, b_e, b_v, ok, EVEN, EXACT, LOW, PRECISION
        )
        if MIX > 0:
            b_p, b_total = block_softmax(
                b_q, b_k, scale, first, ok, block_size, BT, EVEN, ONE_BLOCK, True, PRECISION
            )
            b_d = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
            if MIX == 3:
                p_m = p_mix + offset * stride_mt
                b_mix = load_rows(p_m, stride_mt, stride_me, inside, BT, E, BE, EVEN)
                b_mix = b_mix.to(tl.float32)
                b_o = b_o * b_mix / b_norm[:, None] + b_d * (1.0 - b_mix) / b_total[:, None]
            else:
                b_row = row_weights(p_mix, mix, offset, stride_mt, inside, BT, MIX)
                b_o = b_o * (b_row / b_norm)[:, None] + b_d * ((1.0 - b_row) / b_total)[:, None]
        else:
            b_o = b_o / b_norm[:, None]
        store_rows(p_o + offset * stride_ot, b_o, stride_ot, stride_od, inside, BT, E, BE, EVEN)
    if not EXACT:
        tl.store(p_lost + part, lost)


@triton.jit(do_not_specialize=["seed"])
def causal_query_kernel(
    p_q, p_k, p_v, p_do, p_dq, p_mix, p_dmix, p_mask, p_alpha, p_beta, p_dalpha, p_bounds,
    p_peak, p_mass, p_sum, p_lost, p_z, p_delta,
    alpha, beta, mix, scale, block_size, seed, dropout_p, tile_tokens, program_tokens, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd, stride_mb, stride_mh, stride_mt, stride_me,
    KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr, HAS_STATE: tl.constexpr,
    ALPHA_GRAD: tl.constexpr, MIX_GRAD: tl.constexpr, QUIET: tl.constexpr,
    ONE_BLOCK: tl.constexpr, MIX: tl.constexpr, EVEN: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, PACKED: tl.constexpr, EXACT: tl.constexpr, EXP: tl.constexpr,
    LOW: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One stretch of one (sample, query head), forward: dq, Z, δ, and parts of dα and dmix."""
    segment, segments = tl.program_id(0), tl.num_programs(0)
    index = tl.program_id(1).to(tl.int64)
    part = index * segments + segment
    if EXACT:  # noqa: SIM102 (EXACT is known when compiling)
        if tl.load(p_lost + part) == 0:
            return
    batch, head = index // H, index % H
    key_head = head // KG
    begin, tokens = locate(p_bounds, batch, T, PACKED)
    start = segment * program_tokens
    end = tl.minimum(start + program_tokens, tokens)
    p_q += batch * stride_qb + begin * stride_qt + head * stride_qh
    p_k += batch * stride_kb + begin * stride_kt + key_head * stride_kh
    p_v += batch * stride_vb + begin * stride_vt + key_head * stride_vh
    p_do += batch * stride_gb + begin * stride_gt + head * stride_gh
    p_dq += batch * stride_dqb + begin * stride_dqt + head * stride_dqh
    p_mix += batch * stride_mb + begin * stride_mt + head * stride_mh
    p_mask += batch * T
    place = mix_rows(index, head, begin, T, 1, PACKED)
    drop_first = (batch * (H // KG) + key_head) * T
    alpha_here = load_scale(p_alpha, alpha, index, HAS_ALPHA)
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    b_peak, b_mass, b_sum = load_state(p_peak, p_mass, p_sum, part, BD, BE, HAS_STATE)
    rows = tl.arange(0, BT)
    lost, dalpha = 0, 0.0
    b_dmix = tl.zeros([BE], tl.float32)
    for first in tl.range(start, end, tile_tokens, num_stages=STAGES):
        last = tl.minimum(first + tile_tokens, end)
        inside = first + rows < last
        ok = token_ok(p_mask, first, last, BT, HAS_MASK)
        offset = tl.cast(first, tl.int64)
        p_q_tile, p_k_tile = p_q + offset * stride_qt, p_k + offset * stride_kt
        b_q, b_k, b_v, _ = load_tile(
            p_q_tile, p_k_tile, p_v + offset * stride_vt, stride_qt, stride_qd, stride_kt,
            stride_kd, stride_vt, stride_vd, inside, ok, seed, drop_first + first, dropout_p,
            D, E, BD, BE, BT, EVEN, QUIET, HAS_MASK, HAS_DROPOUT,
        )  # fmt: skip
        b_do = load_rows(p_do + offset * stride_gt, stride_gt, stride_gd, inside, BT, E, BE, EVEN)
        b_row = row_weights(p_mix, mix, offset, stride_mt, inside, BT, MIX)
        b_long, b_short, b_rest = b_do, b_do, 1.0 - b_row
        if MIX == 3:
            p_m = p_mix + offset * stride_mt
            b_mix = load_rows(p_m, stride_mt, stride_me, inside, BT, E, BE, EVEN).to(tl.float32)
            b_long = (b_do.to(tl.float32) * b_mix).to(b_do.dtype)
            b_short = (b_do.to(tl.float32) * (1.0 - b_mix)).to(b_do.dtype)
            b_rest = b_row
        b_x = query_exponents(b_q, alpha_here, D, BD)
        b_y = key_exponents(b_k, beta_here, ok, BD, EVEN)
        b_s, b_w, b_top, b_e, b_peak, b_mass, b_sum = weigh_rows(
            b_x, b_y, ok, inside, b_peak, b_mass, b_sum, p_q_tile, p_k_tile, stride_qt, stride_qd,
            stride_kt, stride_kd, alpha_here, beta_here,
            D, BT, EVEN, QUIET, EXACT, EXP, LOW, PRECISION,
        )  # fmt: skip
        b_norm = tl.sum(b_s, 1) + tl.sum(b_w * b_mass[None, :], 1)
        if not EXACT:
            lost = tl.maximum(lost, any_lost(b_norm, b_mass, inside, ok, HAS_MASK))
        blind = b_norm == 0
        b_norm = tl.where(blind, 1.0, b_norm)
        b_dp = tl.dot(b_long, tl.trans(b_v), input_precision=PRECISION)
        b_da = tl.dot(b_long.to(LOW), tl.trans(b_sum.to(LOW)), input_precision=PRECISION)
        b_delta = (tl.sum(b_s * b_dp, 1) + tl.sum(b_w * b_da, 1)) / b_norm
        tl.store(p_delta + place + first + rows, b_delta, mask=inside)
        b_z = tl.where(blind, ALWAYS, b_top + tl.log(b_norm).to(EXP))
        tl.store(p_z + place + first + rows, b_z, mask=inside)
        if MIX_GRAD > 1:
            b_far = tl.dot(b_s.to(LOW), b_v.to(LOW), input_precision=PRECISION)
            b_far = tl.dot(b_w.to(LOW), b_sum.to(LOW), b_far, input_precision=PRECISION)
            b_far = b_far / b_norm[:, None]
        b_share = b_row / b_norm
        b_g = (b_dp - b_delta[:, None]) * b_share[:, None]
        b_g = tl.where((rows[:, None] >= rows[None, :]) & ok[None, :], b_g, 0.0)
        b_dx = b_w * (b_da - b_delta[:, None] * b_mass[None, :]) * b_share[:, None]
        if EXACT:
            b_dx += exact_products(
                b_g, b_top, p_q_tile, p_k_tile, stride_qt, stride_qd, stride_kt, stride_kd,
                alpha_here, beta_here, inside, ok, 1, D, BD, BT, QUIET, EXP,
            )  # fmt: skip
        else:
            b_dx += b_w * tl.dot(b_g.to(LOW), b_e.to(LOW), input_precision=PRECISION)
        b_peak, b_mass, b_sum = take_tile(
            b_peak, b_mass, b_sum, b_e, b_v, ok, EVEN, EXACT, LOW, PRECISION
        )
        if ALPHA_GRAD:
            dalpha += tl.sum(tl.where(inside[:, None], b_dx * widen(b_q, BD), 0.0))
        b_dq = b_dx * alpha_here
        if MIX > 0:
            b_p, b_total = block_softmax(
                b_q, b_k, scale, first, ok, block_size, BT, EVEN, ONE_BLOCK, True, PRECISION
            )
            if MIX == 3:
                b_dp = tl.dot(b_short, tl.trans(b_v), input_precision=PRECISION)
            b_level = tl.sum(b_p * b_dp, 1) / b_total
            b_ds = b_p * (b_rest / b_total)[:, None] * (b_dp - b_level[:, None]) * scale
            b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
            if MIX_GRAD == 1:
                tl.store(p_dmix + place + first + rows, b_delta - b_level, mask=inside)
            elif MIX_GRAD > 1:
                b_near = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
                b_dm = (b_far - b_near / b_total[:, None]) * b_do.to(tl.float32)
                if MIX_GRAD == 2:
                    p_out = p_dmix + (place + offset) * E
                    store_rows(p_out, b_dm, E, 1, inside, BT, E, BE, EVEN)
                else:
                    b_dmix += tl.sum(tl.where(inside[:, None], b_dm, 0.0), 0)
        p_out = p_dq + offset * stride_dqt
        store_rows(p_out, b_dq, stride_dqt, stride_dqd, inside, BT, D, BD, EVEN)
    if ALPHA_GRAD:
        tl.store(p_dalpha + part, dalpha)
    if MIX_GRAD == 3:
        columns = tl.arange(0, BE)
        tl.store(p_dmix + part * E + columns, b_dmix, mask=columns < E)
    if not EXACT:
        tl.store(p_lost + part, lost)


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
    PACKED: tl.constexpr, EXP: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The gathered state of one stretch by itself."""
    segment, segments = tl.program_id(0), tl.num_programs(0)
    index = tl.program_id(1).to(tl.int64)
    batch, head = index // H, index % H
    begin, tokens = locate(p_bounds, batch, T, PACKED)
    start = segment * program_tokens
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
        inside = first + tl.arange(0, BT) < end
        offset = tl.cast(first, tl.int64)
        b_q = load_rows(p_q + offset * stride_qt, stride_qt, stride_qd, inside, BT, D, BD, EVEN)
        if QUIET:
            b_q = quiet_rows(b_q, token_ok(p_mask + batch * T, first, end, BT, True))
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


@triton.jit(do_not_specialize=["seed"])
def causal_key_kernel(
    p_q, p_k, p_v, p_do, p_dk, p_dv, p_mix, p_mask, p_alpha, p_beta, p_dbeta, p_bounds,
    p_peak, p_level, p_sum, p_lost, p_z, p_delta,
    alpha, beta, mix, scale, block_size, seed, dropout_p, tile_tokens, program_tokens, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dkb, stride_dkh, stride_dkt, stride_dkd, stride_dvb, stride_dvh, stride_dvt, stride_dvd,
    stride_mb, stride_mh, stride_mt, stride_me,
    KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr, HAS_STATE: tl.constexpr,
    BETA_GRAD: tl.constexpr, QUIET: tl.constexpr, ONE_BLOCK: tl.constexpr, MIX: tl.constexpr,
    EVEN: tl.constexpr, HAS_MASK: tl.constexpr, HAS_DROPOUT: tl.constexpr, PACKED: tl.constexpr,
    EXACT: tl.constexpr, EXP: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One stretch of one (sample, query head), backward over its tiles: dk, dv, part of dβ."""
    segment, segments = tl.program_id(0), tl.num_programs(0)
    index = tl.program_id(1).to(tl.int64)
    part = index * segments + segment
    if EXACT:  # noqa: SIM102 (EXACT is known when compiling)
        if tl.load(p_lost + part) == 0:
            return
    batch, head = index // H, index % H
    key_head = head // KG
    begin, tokens = locate(p_bounds, batch, T, PACKED)
    start = segment * program_tokens
    end = tl.minimum(start + program_tokens, tokens)
    p_q += batch * stride_qb + begin * stride_qt + head * stride_qh
    p_k += batch * stride_kb + begin * stride_kt + key_head * stride_kh
    p_v += batch * stride_vb + begin * stride_vt + key_head * stride_vh
    p_do += batch * stride_gb + begin * stride_gt + head * stride_gh
    p_dk += batch * stride_dkb + begin * stride_dkt + head * stride_dkh
    p_dv += batch * stride_dvb + begin * stride_dvt + head * stride_dvh
    p_mix += batch * stride_mb + begin * stride_mt + head * stride_mh
    p_mask += batch * T
    place = mix_rows(index, head, begin, T, 1, PACKED)
    drop_first = (batch * (H // KG) + key_head) * T
    alpha_here = load_scale(p_alpha, alpha, index, HAS_ALPHA)
    beta_here = load_scale(p_beta, beta, index, HAS_BETA)
    b_peak, b_level, b_sum = load_state(p_peak, p_level, p_sum, part, BD, BE, HAS_STATE)
    rows = tl.arange(0, BT)
    dbeta = 0.0
    tiles = tl.cdiv(tl.maximum(end - start, 0), tile_tokens)
    for step in tl.range(0, tiles, num_stages=STAGES):
        first = start + (tiles - 1 - step) * tile_tokens
        last = tl.minimum(first + tile_tokens, end)
        inside = first + rows < last
        ok = token_ok(p_mask, first, last, BT, HAS_MASK)
        seen = rows[:, None] >= rows[None, :]
        if not EVEN:
            seen = seen & ok[None, :]
        offset = tl.cast(first, tl.int64)
        p_q_tile, p_k_tile = p_q + offset * stride_qt, p_k + offset * stride_kt
        b_q, b_k, b_v, b_factor = load_tile(
            p_q_tile, p_k_tile, p_v + offset * stride_vt, stride_qt, stride_qd, stride_kt,
            stride_kd, stride_vt, stride_vd, inside, ok, seed, drop_first + first, dropout_p,
            D, E, BD, BE, BT, EVEN, QUIET, HAS_MASK, HAS_DROPOUT,
        )  # fmt: skip
        b_do, b_short, b_z, b_delta, b_row = load_gradient(
            p_do, p_mix, p_z + place, p_delta + place, mix, offset, inside, stride_gt, stride_gd,
            stride_mt, stride_me, E, BE, BT, MIX, EVEN,
        )  # fmt: skip
        b_h = query_exponents(b_q, alpha_here, D, BD).to(EXP) - b_z[:, None]
        b_y = key_exponents(b_k, beta_here, ok, BD, EVEN)
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        b_g = tl.where(seen, (b_dp - b_delta[:, None]) * b_row[:, None], 0.0)
        if EXACT:
            b_log = exact_scores(
                p_q_tile, p_k_tile, stride_qt, stride_qd, stride_kt, stride_kd, alpha_here,
                beta_here, inside, ok, D, BT, QUIET, EXP,
            )  # fmt: skip
            b_s = exponential((b_log - b_z[:, None]).to(tl.float32))
            b_s = tl.where(b_log > NEVER * 0.5, b_s, 0.0)
            b_dy = exact_products(
                b_g, b_z, p_q_tile, p_k_tile, stride_qt, stride_qd, stride_kt, stride_kd,
                alpha_here, beta_here, inside, ok, 0, D, BD, BT, QUIET, EXP,
            )  # fmt: skip
        else:
            # No exponent of a row exceeds −log n_i, which the guard has bounded.
            b_top = tl.max(b_y, 0)
            b_f = exponential((b_h + b_top[None, :].to(EXP)).to(tl.float32))
            b_e = exponential(b_y - b_top[None, :])
            b_s = tl.dot(b_f.to(LOW), tl.trans(b_e.to(LOW)), input_precision=PRECISION)
            b_s = tl.where(seen, b_s, 0.0)
            b_dy = tl.dot(tl.trans(b_g.to(LOW)), b_f.to(LOW), input_precision=PRECISION) * b_e
        b_s = (b_s * b_row[:, None]).to(LOW)
        b_dv = tl.dot(tl.trans(b_s), b_do.to(LOW), input_precision=PRECISION)
        b_w = exponential(b_y + b_peak[None, :])
        if not EVEN:
            b_w = tl.where(ok[:, None], b_w, 0.0)
        b_dv = tl.dot(b_w.to(LOW), b_sum.to(LOW), b_dv, input_precision=PRECISION)
        b_db = tl.dot(b_v.to(LOW), tl.trans(b_sum.to(LOW)), input_precision=PRECISION)
        b_dy += b_w * (b_db - b_level[None, :])
        if BETA_GRAD:
            dbeta += tl.sum(tl.where(ok[:, None], b_dy * widen(b_k, BD), 0.0))
        b_dk = b_dy * beta_here
        b_peak, b_level, b_sum = gather_tile(
            b_peak, b_level, b_sum, b_h, b_do, b_delta, b_row, EXP, LOW, PRECISION
        )
        if MIX > 0:
            b_p, b_total = block_softmax(
                b_q, b_k, scale, first, ok, block_size, BT, EVEN, ONE_BLOCK, True, PRECISION
            )
            b_rest = 1.0 - b_row
            if MIX == 3:
                b_dp = tl.dot(b_short, tl.trans(b_v), input_precision=PRECISION)
                b_rest = b_row
            b_near = tl.sum(b_p * b_dp, 1) / b_total
            b_p = b_p * (b_rest / b_total)[:, None]
            if not EVEN:
                b_p = tl.where(inside[:, None], b_p, 0.0)
            b_ds = (b_p * (b_dp - b_near[:, None]) * scale).to(b_q.dtype)
            b_dk = tl.dot(tl.trans(b_ds), b_q, b_dk, input_precision=PRECISION)
            b_p_low = b_p.to(b_short.dtype)
            b_dv = tl.dot(tl.trans(b_p_low), b_short, b_dv, input_precision=PRECISION)
        if HAS_MASK:
            b_dk, b_dv = hide_rows(b_dk, ok), hide_rows(b_dv, ok)
        if HAS_DROPOUT:
            b_dv *= b_factor[:, None]
        p_out = p_dk + offset * stride_dkt
        store_rows(p_out, b_dk, stride_dkt, stride_dkd, inside, BT, D, BD, EVEN)
        p_out = p_dv + offset * stride_dvt
        store_rows(p_out, b_dv, stride_dvt, stride_dvd, inside, BT, E, BE, EVEN)
    if BETA_GRAD:
        tl.store(p_dbeta + part, dbeta)
