"""The two halves of LLN attention apart: keys into a summary, queries that read a summary.

`launch_bidirectional` runs both in one call. Here something may happen between them: ranks that
hold parts of a sequence merge their summaries (`lln.parallel`). The kernels are the same; the
summary and its gradients are float32 whatever the inputs, because they travel and are added up.

Dimension legend: B samples, H query heads, Hk key heads, SH summary heads, T queries, S keys, D
head width, E value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.kernels.launching.recipes import Recipe, over_tiles
from lln.kernels.launching.shapes import output_like
from lln.kernels.launching.sizes import Sizes
from lln.kernels.launching.stretches import cdiv
from lln.kernels.summaries import triton_forward as fwd
from lln.kernels.summaries.gradients import beta_gradient, finish_gradients
from lln.kernels.summaries.launch_passes import (
    WHOLE_GRADIENT,
    WHOLE_SUMMARY,
    key_grad_step,
    query_grad_steps,
    summary_shares,
    summary_steps,
)
from lln.kernels.summaries.lln_call import LLNCall, constant_args, launch_call, runtime_args

# Keys into a summary


def _key_call(
    key: Tensor, value: Tensor, beta: Tensor | None, mask: Tensor | None, beta_number: float
) -> LLNCall:
    """In place of queries it has keys: no kernel of this half looks at them."""
    heads = key.shape[1] if beta is None else beta.shape[1]
    stand_in = key[:, :1].expand(-1, heads, -1, -1)
    return LLNCall(stand_in, key, value, beta=beta, mask=mask, beta_number=beta_number)


def summarise(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Log-mass ``[B, SH, D]`` and centroid ``[B, SH, D, E]`` in float32.

    Of key ``[B, Hk, S, D]`` with S > 0, value ``[B, Hk, S, E]``, β ``[·, Hk or H, 1, 1]`` or None,
    key mask or None, β as a number.
    """
    call = _key_call(*arguments)
    value, slots = call.value, call.summary_heads
    shape = (call.samples, slots, call.key.shape[3])
    log_mass = torch.empty(shape, dtype=torch.float32, device=value.device)
    centroid = log_mass.new_empty((*shape, value.shape[3]))
    runtime = runtime_args(call, call.query, slots)
    runtime["p_log_mass"], runtime["p_centroid"] = log_mass, centroid
    launch_call("summarise", call, runtime, slots, _write_summarise)
    return log_mass, centroid


def _write_summarise(call: LLNCall, runtime: dict[str, Any], chosen: Sizes) -> Recipe:
    programs, keys, tile = call.samples * call.summary_heads, call.key.shape[2], chosen.summarise
    widest = max(chosen.width, chosen.value_width)
    values = constant_args(call, chosen, runtime, call.summary_heads, widest)
    shares = summary_shares(chosen)
    stretch = tile.stretch(keys, tile.tokens, programs, chosen.cores, shares, parts=True)
    splits = cdiv(keys, stretch)
    values |= {"program_tokens": stretch, "EVEN": _is_even(call, keys, tile.tokens)}
    return Recipe(*summary_steps(programs, chosen, values, splits))


def summarise_backward(
    dlog_mass: Tensor, dcentroid: Tensor, log_mass: Tensor, centroid: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of key, value and, if asked for, β.

    From those of log-mass and centroid and what `summarise` returned, in float32; then come its
    arguments, and whether β needs a gradient.
    """
    *arguments, beta_grad = rest
    call = _key_call(*arguments)
    key, value, slots = call.key, call.value, call.summary_heads
    dk, dv = (side.new_empty(call.samples, slots, *side.shape[2:]) for side in (key, value))
    runtime = runtime_args(call, call.query, slots)
    runtime |= {"p_log_mass": log_mass, "p_centroid": centroid, "p_dk": dk, "p_dv": dv}
    # The kernel has places for queries and their gradients, for blocks on the diagonal.
    runtime |= {"p_g": value, "p_dq": call.query, "p_dmix": value, "p_dbeta": value}
    runtime["p_shift"] = (dlog_mass - (centroid * dcentroid).sum(-1)).contiguous()
    runtime["p_dc"] = dcentroid.mT.to(value.dtype).contiguous()
    parts = None
    if beta_grad:
        _, programs = _key_stretch(call, call.sizes(slots))
        parts = log_mass.new_empty(call.samples, slots, programs, 3)
        runtime["p_dbeta"] = parts
    launch_call("summarise_backward", call, runtime, slots, _write_key_grad, beta_grad)
    dbeta = None
    if parts is not None:
        # All tokens and slots: what g adds up to where other tokens share the summary.
        total = dlog_mass.sum(-1, dtype=torch.float64)[..., None]
        dbeta = beta_gradient(parts, key.shape[3], total)
    made = finish_gradients(call, (dk, dk, dv, None, dbeta, None), slots // key.shape[1])
    return made[1], made[2], made[4]


def _key_stretch(call: LLNCall, chosen: Sizes) -> tuple[int, int]:
    """Tokens per program, and programs per summary; the same if sizes shrink later."""
    keys, tile = call.key.shape[2], chosen.key_grad
    heads = call.samples * call.summary_heads
    stretch = tile.stretch(keys, tile.tokens, heads, chosen.cores)
    return stretch, cdiv(keys, stretch)


def _write_key_grad(
    call: LLNCall, runtime: dict[str, Any], chosen: Sizes, beta_grad: bool
) -> Recipe:
    slots, keys, tile = call.summary_heads, call.key.shape[2], chosen.key_grad
    stretch, programs = _key_stretch(call, call.sizes(slots))
    values = constant_args(call, chosen, runtime, slots) | WHOLE_GRADIENT
    values |= {"ALPHA_GRAD": False, "BETA_GRAD": beta_grad, "MIX_GRAD": 0, "SPLIT": False}
    values |= {"tile_tokens": tile.tokens, "ONE_BLOCK": False, "program_tokens": stretch}
    values["EVEN"] = _is_even(call, keys, tile.tokens)
    return Recipe([key_grad_step(call.samples * slots, chosen, values, programs)], {})


# Queries that read a summary


def _query_call(
    query: Tensor,
    value: Tensor,
    slots: int,
    alpha: Tensor | None,
    mask: Tensor | None,
    alpha_number: float,
) -> LLNCall:
    """In place of keys it has queries, in place of values something ``[B, H, T, E]``."""
    sides = (query, query[:, :slots], value[:, :slots])
    return LLNCall(*sides, alpha, mask=mask, alpha_number=alpha_number)


def read(
    query: Tensor,
    alpha: Tensor | None,
    log_mass: Tensor,
    centroid: Tensor,
    mask: Tensor | None,
    alpha_number: float,
) -> Tensor:
    """Output ``[B, H, T, E]`` in the dtype of query; see `lln.kernels.summaries.summary_ops`.

    α is ``[·, H, 1, 1]``, or None and then ``alpha_number``; the query has at least one token.
    """
    out, slots = output_like(query, centroid.shape[3]), log_mass.shape[1]
    call = _query_call(query, out, slots, alpha, mask, alpha_number)
    runtime = runtime_args(call, out, slots)
    runtime["p_o"], runtime["p_log_mass"] = out, log_mass.contiguous()
    runtime["p_centroid"] = centroid.to(query.dtype).contiguous()
    launch_call("read", call, runtime, slots, _write_read, slots)
    return out


def _write_read(call: LLNCall, runtime: dict[str, Any], chosen: Sizes, slots: int) -> Recipe:
    (heads, tokens), tile = call.query.shape[1:3], chosen.read
    programs = call.samples * heads
    values = constant_args(call, chosen, runtime, slots, max(chosen.width, chosen.value_width))
    stretch = tile.stretch(tokens, tile.tokens, programs, chosen.cores)
    values |= {"tile_tokens": tile.tokens, "ONE_BLOCK": False, "program_tokens": stretch}
    values |= {"PLAIN": chosen.is_slot_major, "AHEAD": False}
    values["EVEN"] = _is_even(call, tokens, tile.tokens)
    grid = (cdiv(tokens, stretch), programs)
    return Recipe([over_tiles(fwd.read_kernel, grid, values | WHOLE_SUMMARY, tile)], {})


def read_backward(
    gradient: Tensor,
    query: Tensor,
    alpha: Tensor | None,
    log_mass: Tensor,
    centroid: Tensor,
    mask: Tensor | None,
    alpha_number: float,
    alpha_grad: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of query, α (if asked for), log-mass and centroid; the last two in float32.

    The arguments are the gradient of the output, those of `read`, and whether α needs a gradient.
    """
    slots = log_mass.shape[1]
    call = _query_call(query, gradient, slots, alpha, mask, alpha_number)
    low = centroid.to(query.dtype).contiguous()
    dq = torch.empty_like(query)
    shift = torch.empty_like(log_mass, memory_format=torch.contiguous_format)
    dc = shift.new_empty(*shift.shape[:2], centroid.shape[3], shift.shape[2])
    runtime = runtime_args(call, gradient, slots)
    runtime |= {"p_log_mass": log_mass.contiguous(), "p_centroid": low, "p_g": gradient}
    runtime |= {"p_dq": dq, "p_shift": shift, "p_dc": dc, "p_dalpha": gradient}
    parts = None
    if alpha_grad:
        _, programs = _query_stretch(call, call.sizes(slots))
        parts = shift.new_empty(call.samples, query.shape[1], programs)
        runtime["p_dalpha"] = parts
    asked = (alpha_grad, slots)
    launch_call(
        "read_backward", call, runtime, slots, _write_query_grad, *asked, others=(gradient,)
    )
    dcentroid = dc.mT
    dlog_mass = shift + (low.float() * dcentroid).sum(-1)
    made = finish_gradients(call, (dq, dq, dq, parts, None, None), 1)
    return dq, made[3], dlog_mass, dcentroid


def _query_stretch(call: LLNCall, chosen: Sizes) -> tuple[int, int]:
    """Tokens per program, and programs per head; the same if sizes shrink later."""
    (heads, tokens), tile = call.query.shape[1:3], chosen.query_grad
    programs, parts = call.samples * heads, not chosen.is_slot_major
    stretch = tile.stretch(tokens, tile.tokens, programs, chosen.cores, parts=parts)
    return stretch, cdiv(tokens, stretch)


def _write_query_grad(
    call: LLNCall, runtime: dict[str, Any], chosen: Sizes, alpha_grad: bool, slots: int
) -> Recipe:
    batch, (heads, tokens), tile = call.samples, call.query.shape[1:3], chosen.query_grad
    stretch, splits = _query_stretch(call, call.sizes(slots))
    values = constant_args(call, chosen, runtime, slots)
    values |= {"ALPHA_GRAD": alpha_grad, "SPLIT": False, "program_tokens": stretch}
    values["EVEN"] = _is_even(call, tokens, tile.tokens)
    return Recipe(*query_grad_steps(batch * heads, chosen, values, splits))


def _is_even(call: LLNCall, tokens: int, tile: int) -> bool:
    return call.mask is None and tokens % tile == 0
