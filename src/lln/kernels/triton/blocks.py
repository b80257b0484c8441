"""Block-diagonal softmax attention alone (section 4.2), forward and backward in one pass each.

A tile holds whole blocks, so its softmax rows are complete: nothing is saved for the backward,
which recomputes them. Per block of b tokens, with P = softmax(scale · q kᵀ):

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

from lln.kernels.call import mask_bytes, precision_of, strides_of
from lln.kernels.recipes import Recipe, follow, over_tiles
from lln.kernels.shapes import look_of, output_like
from lln.kernels.sizes import Sizes, choose_sizes
from lln.kernels.stretches import Tile, cdiv
from lln.kernels.triton.gaps import find_gaps
from lln.kernels.triton.steps import (
    block_softmax,
    find_stretch,
    heads_on,
    load_queries,
    load_rows,
    load_unmasked,
    rows_inside,
    rows_of,
    store_rows,
    token_ok,
)


@triton.jit
def blocks_fwd_kernel(
    p_q, p_k, p_v, p_o, p_mask, p_starts,
    scale, block_size, tile_tokens, program_tokens, splits, T, H,
    stride_qb, stride_qh, stride_qt, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
    stride_vb, stride_vh, stride_vt, stride_vd, stride_ob, stride_oh, stride_ot, stride_od,
    R: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BT: tl.constexpr, EVEN: tl.constexpr, ONE_BLOCK: tl.constexpr, HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One stretch (a program's share of the tokens) of one (sample, query head)."""
    program = tl.program_id(0)
    split, index = program % splits, (program // splits).to(tl.int64)
    batch, head, _, start, end = find_stretch(
        p_starts, split, index, program_tokens, T, H, False, HAS_MASK
    )
    key_head = head // R
    q = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, key_head, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, key_head, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    o = rows_of(p_o, batch, head, 0, stride_ob, stride_oh, stride_ot, stride_od)
    p_mask += batch * T
    for first in tl.range(start, end, tile_tokens, num_stages=STAGES):
        last = tl.minimum(first + tile_tokens, end)
        inside = rows_inside(first, last, BT, HAS_MASK)
        ok = token_ok(p_mask, first, last, BT, HAS_MASK)
        b_q = load_queries(q, first, inside, ok, BT, D, BD, EVEN, HAS_MASK)
        b_k = load_unmasked(k, first, inside, ok, BT, D, BD, EVEN, HAS_MASK)
        b_v = load_unmasked(v, first, inside, ok, BT, E, BE, EVEN, HAS_MASK)
        b_p, b_sum = block_softmax(
            b_q, b_k, scale, ok, block_size, BT, EVEN, ONE_BLOCK, CAUSAL, PRECISION
        )
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
        b_o = b_o * (1.0 / b_sum)[:, None]
        store_rows(o, first, b_o, inside, BT, E, BE, EVEN)


@triton.jit
def blocks_bwd_kernel(
    p_q, p_k, p_v, p_g, p_dq, p_dk, p_dv, p_mask, p_starts,
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
    batch, key_head, _, start, end = find_stretch(
        p_starts, split, index, program_tokens, T, HK, False, HAS_MASK
    )
    head = key_head * R
    q = rows_of(p_q, batch, head, 0, stride_qb, stride_qh, stride_qt, stride_qd)
    k = rows_of(p_k, batch, key_head, 0, stride_kb, stride_kh, stride_kt, stride_kd)
    v = rows_of(p_v, batch, key_head, 0, stride_vb, stride_vh, stride_vt, stride_vd)
    g = rows_of(p_g, batch, head, 0, stride_gb, stride_gh, stride_gt, stride_gd)
    dq = rows_of(p_dq, batch, head, 0, stride_dqb, stride_dqh, stride_dqt, stride_dqd)
    dk = rows_of(p_dk, batch, key_head, 0, stride_dkb, stride_dkh, stride_dkt, stride_dkd)
    dv = rows_of(p_dv, batch, key_head, 0, stride_dvb, stride_dvh, stride_dvt, stride_dvd)
    p_mask += batch * T
    for first in tl.range(start, end, tile_tokens, num_stages=STAGES):
        last = tl.minimum(first + tile_tokens, end)
        inside = rows_inside(first, last, BT, HAS_MASK)
        ok = token_ok(p_mask, first, last, BT, HAS_MASK)
        b_k = load_unmasked(k, first, inside, ok, BT, D, BD, EVEN, HAS_MASK)
        b_v = load_unmasked(v, first, inside, ok, BT, E, BE, EVEN, HAS_MASK)
        b_dk = tl.zeros([BT, BD], tl.float32)
        b_dv = tl.zeros([BT, BE], tl.float32)
        for r in tl.static_range(R):
            own = tl.cast(r, tl.int64)
            b_q = load_queries(heads_on(q, own), first, inside, ok, BT, D, BD, EVEN, HAS_MASK)
            b_do = load_rows(heads_on(g, own), first, inside, BT, E, BE, EVEN)
            b_p, b_sum = block_softmax(
                b_q, b_k, scale, ok, block_size, BT, EVEN, ONE_BLOCK, CAUSAL, PRECISION
            )
            b_p = b_p * (1.0 / b_sum)[:, None]
            b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
            b_level = tl.sum(b_p * b_dp, 1)
            b_ds = (b_p * (b_dp - b_level[:, None]) * scale).to(b_q.dtype)
            b_p_low = b_p.to(b_do.dtype)
            b_dq = tl.dot(b_ds, b_k, input_precision=PRECISION)
            store_rows(heads_on(dq, own), first, b_dq, inside, BT, D, BD, EVEN)
            b_dk = tl.dot(tl.trans(b_ds), b_q, b_dk, input_precision=PRECISION)
            b_dv = tl.dot(tl.trans(b_p_low), b_do, b_dv, input_precision=PRECISION)
        store_rows(dk, first, b_dk, inside, BT, D, BD, EVEN)
        store_rows(dv, first, b_dv, inside, BT, E, BE, EVEN)


class BlockCall(NamedTuple):
    """One call.

    Attributes:
        query: ``[B, H, T, D]``.
        key: ``[B, HK, T, D]``.
        value: ``[B, HK, T, E]``.
        mask: bool ``[B, T]`` or None.
        block_size: Tokens in a block; a block fits a tile.
        scale: Factor of the scores.
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
        _launch(blocks_fwd_kernel, call, call.query.shape[1], "joint_read", p_o=out)
    return out


def attend_blocks_backward(call: BlockCall, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    dq, dk, dv = (torch.empty_like(side) for side in (call.query, call.key, call.value))
    if gradient.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    made = {"p_g": gradient, "p_dq": dq, "p_dk": dk, "p_dv": dv}
    _launch(blocks_bwd_kernel, call, call.key.shape[1], "joint_grad", **made)
    return dq, dk, dv


def _launch(kernel: Any, call: BlockCall, heads: int, walker: str, **others: Tensor) -> None:
    """One launch over all stretches of all (sample, head) pairs.

    Args:
        kernel: What to launch.
        call: What to compute.
        heads: Programs per sample.
        walker: Name of the field of `Sizes` with its tile.
        others: Its tensors besides query, key and value, by their names in the kernel.
    """
    query, key, value, mask = call.query, call.key, call.value, call.mask
    batch, tokens = query.shape[0], query.shape[2]
    tensors = {"p_q": query, "p_k": key, "p_v": value, **others}
    seen = tuple([look_of(tensor) for tensor in (*tensors.values(), mask)])
    options = (call.block_size, call.scale, call.causal)
    kind = (walker, "blocks", query.device, seen, options)
    family = (walker, "blocks", query.device, query.dtype, query.shape[3], value.shape[3])

    def choose() -> Sizes:
        return choose_sizes(query, key, value, batch, key.shape[1], call.block_size)

    def write(chosen: Sizes) -> Recipe:
        tile: Tile = getattr(chosen, walker)
        rows = chosen.block_rows
        # With a mask the first block may begin before the first token.
        reach = tokens if mask is None else tokens + call.block_size - 1
        stretch = tile.stretch(reach, rows, batch * heads, chosen.cores)
        splits = cdiv(reach, stretch)
        values = {
            "T": tokens,
            "H": heads,
            "HK": heads,
            "R": query.shape[1] // key.shape[1],
            "D": query.shape[3],
            "E": value.shape[3],
            "BD": chosen.width,
            "BE": chosen.value_width,
            "scale": call.scale,
            "block_size": call.block_size,
            "tile_tokens": rows,
            "program_tokens": stretch,
            "splits": splits,
            "EVEN": mask is None and tile.tokens == rows and tokens % rows == 0,
            "ONE_BLOCK": tile.tokens == call.block_size,
            "HAS_MASK": mask is not None,
            "CAUSAL": call.causal,
            "PRECISION": precision_of(query, chosen.width),
            **strides_of(False, **tensors),
        }
        before, room = ([], {}) if mask is None else find_gaps(batch, tokens, call.block_size)
        return Recipe([*before, over_tiles(kernel, (splits * batch * heads,), values, tile)], room)

    byte_mask = mask_bytes(mask, query)
    live = {**tensors, "p_mask": byte_mask, "p_starts": byte_mask}
    follow(kind, (*family, call.block_size), live, query.device, choose, write)
