"""One token at a time: add its key and value to the summary, then read with its queries.

The state of a head is D log-masses and D×E centroids, whatever came before; it is read once and
written once. With y = β k:

    L' = log(e^L + e^y),  C' = C + σ(y − L) (v − C),  out = softmax(α q + L') C'

Dimension legend: B batch, H query heads, SH summary heads, R = H / SH, D head width, E value width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lln.kernels.launching.triton_steps import NEVER, exponential, load_scale


@triton.jit
def decode_kernel(
    p_q, p_k, p_v, p_o, p_alpha, p_beta, p_log_mass, p_centroid, p_new_log_mass, p_new_centroid,
    alpha, beta, SH,
    stride_qb, stride_qh, stride_qd, stride_kb, stride_kh, stride_kd, stride_vb, stride_vh,
    stride_vd, stride_ob, stride_oh, stride_od,
    R: tl.constexpr, KG: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, HAS_ALPHA: tl.constexpr, HAS_BETA: tl.constexpr,
):  # fmt: skip
    """One (sample, summary head) and one slice of its channels."""
    index = tl.program_id(0).to(tl.int64)
    batch, head = index // SH, index % SH
    slots = tl.arange(0, BD)
    columns = tl.program_id(1) * BE + tl.arange(0, BE)
    slot_ok, column_ok = slots < D, columns < E
    p_key = p_k + batch * stride_kb + (head // KG) * stride_kh + slots * stride_kd
    b_k = tl.load(p_key, mask=slot_ok, other=0.0)
    p_value = p_v + batch * stride_vb + (head // KG) * stride_vh + columns * stride_vd
    b_v = tl.load(p_value, mask=column_ok, other=0.0).to(tl.float32)
    b_y = b_k.to(tl.float32) * load_scale(p_beta, beta, index, HAS_BETA)
    b_old = tl.load(p_log_mass + index * D + slots, mask=slot_ok, other=0.0)
    # In float64 (only D numbers): errors of fast logarithms near 1 exceed what a late token adds.
    b_far = tl.minimum(b_old, b_y).to(tl.float64) - tl.maximum(b_old, b_y).to(tl.float64)
    b_mass = tl.maximum(b_old, b_y) + tl.log(1.0 + tl.exp(b_far)).to(tl.float32)
    # Weights w and 1 − w: with two exponentials rounding of L would make the sum differ from 1,
    # which adds up over thousands of tokens.
    b_gain = 1.0 / (1.0 + tl.exp(b_old - b_y))
    places = index * D * E + slots[:, None] * E + columns[None, :]
    ok = slot_ok[:, None] & column_ok[None, :]
    b_c = tl.load(p_centroid + places, mask=ok, other=0.0)
    b_c += b_gain[:, None] * (b_v[None, :] - b_c)
    tl.store(p_new_centroid + places, b_c, mask=ok)
    if tl.program_id(1) == 0:
        tl.store(p_new_log_mass + index * D + slots, b_mass, mask=slot_ok)
    for r in range(R):
        query_head = head * R + r
        p_query = p_q + batch * stride_qb + query_head * stride_qh + slots * stride_qd
        b_q = tl.load(p_query, mask=slot_ok, other=0.0).to(tl.float32)
        b_x = b_q * load_scale(p_alpha, alpha, index * R + r, HAS_ALPHA) + b_mass
        b_x = tl.where(slot_ok, b_x, NEVER)
        b_e = exponential(b_x - tl.max(b_x, 0))
        b_o = tl.sum(b_e[:, None] * b_c, 0) / tl.sum(b_e, 0)
        p_out = p_o + batch * stride_ob + query_head * stride_oh + columns * stride_od
        tl.store(p_out, b_o.to(p_o.dtype.element_ty), mask=column_ok)
