"""Causal attention from tensors to kernels: stretches, their states, walks and repairs.

Dimension legend: B samples (or packed sequences), H query heads, Hk key heads, T tokens, D head
width, E value width. Every query head walks by itself, so that there are H summaries.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from lln.kernels.call import (
    Call,
    Gradients,
    flat_scale,
    mask_bytes,
    mix_kind,
    mix_mode,
    precision_of,
    strides_of,
)
from lln.kernels.gradients import finish_gradients, mix_shape, parts_of, per_summary
from lln.kernels.launch import summarise_steps
from lln.kernels.recipes import Recipe, Step, follow, places
from lln.kernels.shapes import output_like
from lln.kernels.sizes import Plan, cdiv, make_plan, walk_stretch
from lln.kernels.triton import causal_walks as walks
from lln.kernels.triton.gaps import starts_of

# What a weight is rounded to for a product: float16 has too few exponents for e^{x − max}, so it
# goes through the tensor cores as TF32, which has as many digits.
_LOW = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float32, torch.float32: tl.float32}
# What differences of exponents are formed in.
_EXPONENT = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_EXPONENT[torch.float32] = torch.float64


def attend(call: Call, save: bool) -> tuple[Tensor, None, None]:
    """Output ``[B, H, T, E]``; nothing but the inputs is saved."""
    query, value = call.query, call.value
    out = output_like(query, value.shape[3])
    if out.numel() == 0:
        return out, None, None
    live = _shared(call, out)
    live["out"] = out
    kind = ("causal", call.looks(), call.options())
    family = ("causal", query.device, query.dtype, query.shape[3], value.shape[3], call.block_size)

    def write(plan: Plan) -> Recipe:
        return _write_attend(call, out, live["mix"], plan)

    follow(kind, family, live, query.device, lambda: _plan_of(call), write)
    return out, None, None


def attend_backward(
    call: Call,
    gradient: Tensor,
    log_mass: Tensor | None,
    centroid: Tensor | None,
    alpha_grad: bool,
    beta_grad: bool,
    mix_grad: bool,
) -> Gradients:
    """Gradients of query, key, value, and where asked for of alpha, beta and mix."""
    query, key, value = call.query, call.key, call.value
    heads, width, value_width = query.shape[1], query.shape[3], value.shape[3]
    if query.numel() == 0 or value.numel() == 0:
        return call.no_gradients()
    live = _shared(call, gradient)
    dq = torch.empty_like(query)
    dk, dv = per_summary(key, heads), per_summary(value, heads)
    mode = mix_mode(call.mix, 1) if mix_grad and call.mix is not None else 0
    dalpha = dbeta = dmix = None
    if alpha_grad or beta_grad or mode:
        segments, _ = _segments(call, _plan_of(call))
        parts = (call.samples, heads, segments)
        of_mix = mix_shape(mode, query, value_width, parts)
        asked_of = (parts if alpha_grad else None, parts if beta_grad else None, of_mix)
        dalpha, dbeta, dmix = parts_of(query.device, *asked_of)
    live |= {"gradient": gradient, "dq": dq, "dk": dk, "dv": dv}
    for name, side in (("dalpha", dalpha), ("dbeta", dbeta), ("dmix", dmix)):
        live[name] = gradient if side is None else side
    looks = call.looks(gradient)
    kind = ("causal backward", alpha_grad, beta_grad, mode, looks, call.options())
    family = ("causal backward", query.device, query.dtype, width, value_width, call.block_size)

    def write(chosen: Plan) -> Recipe:
        asked = (alpha_grad, beta_grad, mode)
        first = _plan_of(call)
        return _write_backward(call, gradient, live["mix"], (dq, dk, dv), asked, first, chosen)

    follow(kind, family, live, query.device, lambda: _plan_of(call), write)
    return finish_gradients(call, (dq, dk, dv), dalpha, dbeta, dmix, heads // key.shape[1])


def _shared(call: Call, like: Tensor) -> dict[str, Any]:
    """What both passes fill in."""
    query, key, value = call.query, call.key, call.value
    alpha = flat_scale(call.alpha, call.samples, query)
    beta = call.beta
    if beta is not None and beta.shape[1] != query.shape[1]:
        beta = beta.repeat_interleave(query.shape[1] // beta.shape[1], 1)
    beta = flat_scale(beta, call.samples, query)
    mask = mask_bytes(call.mask, query)
    mix = like if call.mix is None else call.mix.expand(like.shape)
    return {
        "query": query,
        "key": key,
        "value": value,
        "alpha": alpha,
        "beta": beta,
        "mask": mask,
        "mix": mix,
        "bounds": query if call.bounds is None else call.bounds,
        "alpha_number": call.alpha_number,
        "beta_number": call.beta_number,
        "mix_number": call.mix_number,
        "seed": call.seed,
    }


def _plan_of(call: Call) -> Plan:
    heads = call.query.shape[1]
    tensors = (call.query, call.key, call.value)
    return make_plan(*tensors, call.samples, heads, call.block_size, call.longest, causal=True)


def _segments(call: Call, plan: Plan) -> tuple[int, int]:
    """How many stretches a sequence is cut into, and the tokens of one: whole tiles of a walk."""
    programs = call.samples * call.query.shape[1]
    longest = call.reach(call.longest or call.query.shape[2])
    rows = _largest_tile(plan)
    if call.block_size:
        # Tiles that hold whole blocks of an odd size fit no other walk; masks see to the rest.
        whole = plan.block_rows == plan.walk.tokens
        rows = max(rows, plan.block_rows) if whole else plan.block_rows
    stretch = walk_stretch(plan.walk, longest, rows, programs, plan.cores)
    return cdiv(longest, stretch), stretch


def _largest_tile(plan: Plan) -> int:
    tiles = (plan.walk, plan.walk_query, plan.walk_key, plan.summarise)
    return max(tile.tokens for tile in tiles)


def _constants(call: Call, plan: Plan) -> dict[str, object]:
    query = call.query
    tokens = query.shape[2]
    whole = call.mask is None and call.bounds is None and tokens % _largest_tile(plan) == 0
    if call.block_size and plan.block_rows != plan.walk.tokens:
        whole = False
    return {
        "KG": query.shape[1] // call.key.shape[1],
        "D": query.shape[3],
        "E": call.value.shape[3],
        "BD": plan.width,
        "BE": plan.value_width,
        "PRECISION": precision_of(query),
        "LOW": _LOW[query.dtype],
        "EXP": tl.float64 if query.dtype == torch.float32 else tl.float32,
        "EVEN": whole,
        "HAS_ALPHA": call.alpha is not None,
        "HAS_BETA": call.beta is not None,
        "HAS_MASK": call.mask is not None,
        "HAS_DROPOUT": call.dropout_p > 0,
        "QUIET": call.mask is not None,
        "ONE_BLOCK": plan.walk.tokens == call.block_size,
        "MIX": mix_kind(call.mix, call.block_size),
        "PACKED": call.bounds is not None,
        "SHIFTED": call.is_shifted,
    }


def _numbers(call: Call, rows: int, stretch: int) -> list[object]:
    """The kernels' arguments between the tensors and the strides."""
    return [
        *places("alpha_number beta_number mix_number"), call.scale, max(call.block_size, 1),
        *places("seed"), call.dropout_p, rows, stretch, call.query.shape[2], call.query.shape[1],
    ]  # fmt: skip


Room = dict[str, tuple[tuple[int, ...], torch.dtype]]


def _start(
    call: Call, plan: Plan, constants: dict[str, object], segments: int, stretch: int
) -> tuple[list[Step], Room]:
    """The state before every stretch, and where stretches are marked as lost."""
    heads = call.query.shape[1]
    programs = call.samples * heads
    _, before, room = starts_of(call)
    room |= {"lost": ((programs, segments), torch.int32)}
    if segments == 1:
        return before, room | {f"{name}_before": ((1,), torch.float32) for name in _STATE}
    steps, parts = summarise_steps(call, plan, constants, heads, segments, stretch)
    steps = before + steps
    steps.append(_scan("", "_before", programs, segments, plan, constants))
    return steps, room | parts | {f"{name}_before": parts[name] for name in _STATE}


# A state's three tensors; a suffix says which stretches it speaks of.
_STATE = ("peak", "mass", "total")


def _scan(
    own: str, others: str, programs: int, segments: int, plan: Plan, constants: dict[str, object]
) -> Step:
    """From every stretch's own state to that of all before (or, ``_after``, after) it."""
    names = [name + suffix for suffix in (own, others) for name in _STATE]
    rows = min(8, plan.width)
    grid = (plan.width // rows, programs)
    sizes = constants | {"ROWS": rows, "REVERSE": others == "_after"}
    return Step(walks.scan_kernel, grid, [*places(" ".join(names)), segments], sizes, 4)


def _write_attend(call: Call, out: Tensor, mix: Tensor, plan: Plan) -> Recipe:
    segments, stretch = _segments(call, plan)
    constants = _constants(call, plan)
    steps, room = _start(call, plan, constants, segments, stretch)
    rows = plan.block_rows if call.block_size else plan.walk.tokens
    mixed = None if call.mix is None else mix
    arguments = [
        *places(f"query key value out mix mask alpha beta {starts_of(call)[0]}"),
        *places("peak_before mass_before total_before lost"),
        *_numbers(call, rows, stretch),
        *strides_of(call, call.query, call.key, call.value, out, mixed),
    ]
    own = {"BT": plan.walk.tokens, "STAGES": plan.walk.stages, "HAS_STATE": segments > 1}
    grid = (segments, call.samples * call.query.shape[1])
    steps += _twice(walks.causal_fwd_kernel, grid, arguments, constants | own, plan.walk.warps)
    return Recipe(steps, room)


def _twice(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: list[object],
    constants: dict[str, object],
    warps: int,
) -> list[Step]:
    """The fast walk, and the exact one for the stretches it marked as lost."""
    return [
        Step(kernel, grid, arguments, constants | {"EXACT": exact}, warps)
        for exact in (False, True)
    ]


def _write_backward(
    call: Call,
    gradient: Tensor,
    mix: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    asked: tuple[bool, bool, int],
    first_plan: Plan,
    plan: Plan,
) -> Recipe:
    query, key, value = call.query, call.key, call.value
    heads, tokens = query.shape[1:3]
    # dα and dβ have a place for every stretch of the first plan, whatever became of it since.
    segments, stretch = _segments(call, first_plan)
    constants = _constants(call, plan)
    constants |= {"ALPHA_GRAD": asked[0], "BETA_GRAD": asked[1], "MIX_GRAD": asked[2]}
    steps, room = _start(call, plan, constants, segments, stretch)
    mixed = None if call.mix is None else mix
    starts, _, _ = starts_of(call)
    programs = call.samples * heads
    grid = (segments, programs)
    tile = plan.walk_query
    rows = plan.block_rows if call.block_size else tile.tokens
    own = {"BT": tile.tokens, "STAGES": tile.stages, "HAS_STATE": segments > 1}
    per_row = (query.shape[0], heads, tokens)
    room |= {"z": (per_row, _EXPONENT[query.dtype]), "delta": (per_row, torch.float32)}
    arguments = [
        *places(f"query key value gradient dq mix dmix mask alpha beta dalpha {starts}"),
        *places("peak_before mass_before total_before lost z delta"),
        *_numbers(call, rows, stretch),
        *strides_of(call, query, key, value, gradient, grads[0], mixed),
    ]  # fmt: skip
    steps += _twice(walks.causal_query_kernel, grid, arguments, constants | own, tile.warps)
    later = "_before"
    if segments > 1:
        later = "_after"
        room |= {f"{name}{suffix}": room[name] for name in _STATE for suffix in ("_own", later)}
        arguments = [
            *places(f"query gradient mix mask alpha {starts} peak_own mass_own total_own z delta"),
            *places("alpha_number mix_number"), stretch, tokens, heads,
            *strides_of(call, query, gradient, mixed),
        ]  # fmt: skip
        gather = plan.summarise
        sizes = constants | {"BT": gather.tokens, "STAGES": gather.stages}
        steps.append(Step(walks.causal_gather_kernel, grid, arguments, sizes, gather.warps))
        steps.append(_scan("_own", later, programs, segments, plan, constants))
    tile = plan.walk_key
    rows = plan.block_rows if call.block_size else tile.tokens
    own = {"BT": tile.tokens, "STAGES": tile.stages, "HAS_STATE": segments > 1}
    arguments = [
        *places(f"query key value gradient dk dv mix mask alpha beta dbeta {starts}"),
        *places(" ".join(name + later for name in _STATE)), *places("lost z delta"),
        *_numbers(call, rows, stretch),
        *strides_of(call, query, key, value, gradient, grads[1], grads[2], mixed),
    ]  # fmt: skip
    steps += _twice(walks.causal_key_kernel, grid, arguments, constants | own, tile.warps)
    return Recipe(steps, room)
