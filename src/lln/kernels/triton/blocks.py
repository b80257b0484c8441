"""Block-diagonal softmax attention alone (section 4.2), forward and backward in one pass each.

A tile holds whole blocks, so that its softmax rows are complete: nothing is saved for the backward,
which forms them again. Per block of b tokens, with P = softmax(scale · q kᵀ):

    o = P v;   dv = Pᵀ dO;   dS = P ∘ (dO vᵀ − rowsum(P ∘ dO vᵀ));   dq = scale · dS k
    dk = scale · dSᵀ q

Dimension legend: see `lln.kernels.triton.steps`; B samples, H query heads, HK key heads,
R = H / HK, T tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lln.kernels.call import mask_bytes, precision_of
from lln.kernels.recipes import Recipe, Step, follow, look_of, places
from lln.kernels.shapes import output_like
from lln.kernels.sizes import Plan, Tile, cdiv, make_plan
from lln.kernels.triton.gaps import find_gaps
from lln.kernels.triton.steps import (
    block_softmax,
    gap_before,
    hide_rows,
    load_rows,
    quiet_rows,
    rows_inside,
    store_rows,
    token_ok,
)


@triton.jit
def blocks_fwd_kernel(
    p_q, p_k, p_v, p_o, p_mask, p_gap, scale, block_size, tile_tokens, program_tokens, splits, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_ob, stride_oh, stride_ot, stride_od,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, EVEN: tl.constexpr, ONE_BLOCK: tl.constexpr, HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One stretch of tokens of one (sample, query head)."""
    program = tl.program_id(0)
    split, index = program % splits, (program // splits).to(tl.int64)
    batch, head = index // H, index % H
    key_head = head // R
    p_q += batch * stride_qb + head * stride_qh
    p_k += batch * stride_kb + key_head * stride_kh
    p_v += batch * stride_vb + key_head * stride_vh
    p_o += batch * stride_ob + head * stride_oh
    p_mask += batch * T
    start = split * program_tokens - gap_before(p_gap, batch, HAS_MASK)
    end = tl.minimum(start + program_tokens, T)
    for first in tl.range(start, end, tile_tokens, num_stages=STAGES):
        last = tl.minimum(first + tile_tokens, end)
        inside = rows_inside(first, last, BT, HAS_MASK)
        ok = token_ok(p_mask, first, last, BT, HAS_MASK)
        offset = tl.cast(first, tl.int64)
        b_q = load_rows(p_q + offset * stride_qt, stride_qt, stride_qd, inside, BT, D, BD, EVEN)
        b_k = load_rows(p_k + offset * stride_kt, stride_kt, stride_kd, inside, BT, D, BD, EVEN)
        b_v = load_rows(p_v + offset * stride_vt, stride_vt, stride_vd, inside, BT, E, BE, EVEN)
        if HAS_MASK:
            b_q, b_k, b_v = quiet_rows(b_q, ok), hide_rows(b_k, ok), hide_rows(b_v, ok)
        b_p, b_sum = block_softmax(
            b_q, b_k, scale, ok, block_size, BT, EVEN, ONE_BLOCK, CAUSAL, PRECISION
        )
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
        b_o = b_o * (1.0 / b_sum)[:, None]
        store_rows(p_o + offset * stride_ot, b_o, stride_ot, stride_od, inside, BT, E, BE, EVEN)


@triton.jit
def blocks_bwd_kernel(
    p_q, p_k, p_v, p_do, p_dq, p_dk, p_dv, p_mask, p_gap,
    scale, block_size, tile_tokens, program_tokens, splits, T, HK,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_gb, stride_gh, stride_gt, stride_gd,
    stride_dqb, stride_dqh, stride_dqt, stride_dqd, stride_dkb, stride_dkh, stride_dkt, stride_dkd,
    stride_dvb, stride_dvh, stride_dvt, stride_dvd,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, EVEN: tl.constexpr, ONE_BLOCK: tl.constexpr, HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One stretch of tokens of one (sample, key head), for the R query heads that share it."""
    program = tl.program_id(0)
    split, index = program % splits, (program // splits).to(tl.int64)
    batch, key_head = index // HK, index % HK
    head = key_head * R
    p_q += batch * stride_qb + head * stride_qh
    p_k += batch * stride_kb + key_head * stride_kh
    p_v += batch * stride_vb + key_head * stride_vh
    p_do += batch * stride_gb + head * stride_gh
    p_dq += batch * stride_dqb + head * stride_dqh
    p_dk += batch * stride_dkb + key_head * stride_dkh
    p_dv += batch * stride_dvb + key_head * stride_dvh
    p_mask += batch * T
    start = split * program_tokens - gap_before(p_gap, batch, HAS_MASK)
    end = tl.minimum(start + program_tokens, T)
    for first in tl.range(start, end, tile_tokens, num_stages=STAGES):
        last = tl.minimum(first + tile_tokens, end)
        inside = rows_inside(first, last, BT, HAS_MASK)
        ok = token_ok(p_mask, first, last, BT, HAS_MASK)
        offset = tl.cast(first, tl.int64)
        b_k = load_rows(p_k + offset * stride_kt, stride_kt, stride_kd, inside, BT, D, BD, EVEN)
        b_v = load_rows(p_v + offset * stride_vt, stride_vt, stride_vd, inside, BT, E, BE, EVEN)
        if HAS_MASK:
            b_k, b_v = hide_rows(b_k, ok), hide_rows(b_v, ok)
        b_dk = tl.zeros([BT, BD], tl.float32)
        b_dv = tl.zeros([BT, BE], tl.float32)
        for r in tl.static_range(R):
            own = tl.cast(r, tl.int64)
            p_row = p_q + own * stride_qh + offset * stride_qt
            b_q = load_rows(p_row, stride_qt, stride_qd, inside, BT, D, BD, EVEN)
            p_row = p_do + own * stride_gh + offset * stride_gt
            b_do = load_rows(p_row, stride_gt, stride_gd, inside, BT, E, BE, EVEN)
            if HAS_MASK:
                b_q = quiet_rows(b_q, ok)
            b_p, b_sum = block_softmax(
                b_q, b_k, scale, ok, block_size, BT, EVEN, ONE_BLOCK, CAUSAL, PRECISION
            )
            b_p = b_p * (1.0 / b_sum)[:, None]
            b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
            b_level = tl.sum(b_p * b_dp, 1)
            b_ds = (b_p * (b_dp - b_level[:, None]) * scale).to(b_q.dtype)
            b_p_low = b_p.to(b_do.dtype)
            b_dq = tl.dot(b_ds, b_k, input_precision=PRECISION)
            p_out = p_dq + own * stride_dqh + offset * stride_dqt
            store_rows(p_out, b_dq, stride_dqt, stride_dqd, inside, BT, D, BD, EVEN)
            b_dk = tl.dot(tl.trans(b_ds), b_q, b_dk, input_precision=PRECISION)
            b_dv = tl.dot(tl.trans(b_p_low), b_do, b_dv, input_precision=PRECISION)
        p_out = p_dk + offset * stride_dkt
        store_rows(p_out, b_dk, stride_dkt, stride_dkd, inside, BT, D, BD, EVEN)
        p_out = p_dv + offset * stride_dvt
        store_rows(p_out, b_dv, stride_dvt, stride_dvd, inside, BT, E, BE, EVEN)


class BlockCall(NamedTuple):
    """One call.

    Attributes:
        query: ``[B, H, T, D]``.
        key: ``[B, HK, T, D]``.
        value: ``[B, HK, T, E]``.
        mask: bool ``[B, T]`` or None.
        block_size: Tokens in a block; they fit a tile.
        scale: Of the scores.
        causal: Whether a token sees only itself and earlier tokens of its block.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    block_size: int
    scale: float
    causal: bool


def attend_blocks(call: BlockCall) -> Tensor:
    """Output ``[B, H, T, E]``."""
    out = output_like(call.query, call.value.shape[3])
    if out.numel() > 0:
        tensors = {"query": call.query, "key": call.key, "value": call.value, "out": out}
        _launch(blocks_fwd_kernel, call, tensors, call.query.shape[1], "joint_read")
    return out


def attend_blocks_backward(call: BlockCall, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    dq, dk, dv = (torch.empty_like(side) for side in (call.query, call.key, call.value))
    if gradient.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    tensors = {"query": call.query, "key": call.key, "value": call.value, "gradient": gradient}
    tensors |= {"dq": dq, "dk": dk, "dv": dv}
    _launch(blocks_bwd_kernel, call, tensors, call.key.shape[1], "joint_grad")
    return dq, dk, dv


def _launch(
    kernel: Any, call: BlockCall, tensors: dict[str, Tensor], heads: int, walker: str
) -> None:
    """One launch over all stretches of all (sample, head) pairs.

    Args:
        kernel: Takes the tensors in order, the mask, the numbers, the tensors' strides.
        call: What to compute.
        tensors: By name.
        heads: Programs of a sample.
        walker: Which of the plan's tiles it uses.
    """
    query, key, value, mask = call.query, call.key, call.value, call.mask
    batch, tokens = query.shape[0], query.shape[2]
    seen = tuple([look_of(tensor) for tensor in (*tensors.values(), mask)])
    options = (call.block_size, call.scale, call.causal)
    kind = (walker, "blocks", query.device, seen, options)
    family = (walker, "blocks", query.device, query.dtype, query.shape[3], value.shape[3])

    def plan() -> Plan:
        return make_plan(query, key, value, batch, key.shape[1], call.block_size)

    def write(chosen: Plan) -> Recipe:
        tile: Tile = getattr(chosen, walker)
        rows = chosen.block_rows
        # With a mask the first block may begin before the first token.
        reach = tokens if mask is None else tokens + call.block_size - 1
        stretch = tile.stretch(reach, rows, batch * heads, chosen.cores)
        splits = cdiv(reach, stretch)
        constants = {
            "R": query.shape[1] // key.shape[1],
            "D": query.shape[3],
            "E": value.shape[3],
            "BD": chosen.width,
            "BE": chosen.value_width,
            "BT": tile.tokens,
            "EVEN": mask is None and tile.tokens == rows and tokens % rows == 0,
            "ONE_BLOCK": tile.tokens == call.block_size,
            "HAS_MASK": mask is not None,
            "CAUSAL": call.causal,
            "PRECISION": precision_of(query, chosen.width),
            "STAGES": tile.stages,
        }
        numbers = [call.scale, call.block_size, rows, stretch, splits, tokens, heads]
        strides = [size for tensor in tensors.values() for size in tensor.stride()]
        before, room = ([], {}) if mask is None else find_gaps(batch, tokens, call.block_size)
        names = (*tensors, "mask", "mask" if mask is None else "gaps")
        arguments = [*places(" ".join(names)), *numbers, *strides]
        grid = (splits * batch * heads,)
        return Recipe([*before, Step(kernel, grid, arguments, constants, tile.warps)], room)

    live = {**tensors, "mask": mask_bytes(mask, query)}
    follow(kind, (*family, call.block_size), live, query.device, plan, write)
