"""Bidirectional attention from tensors to kernels: allocate, plan, write the recipe.

Dimension legend: B samples (or packed sequences), H query heads, Hk key heads, SH summary heads,
T queries, S keys, D head width, E value width. R = H / SH query heads share a summary; KG = SH / Hk
summaries share a key head (when β differs within a group).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
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
from lln.kernels.gradients import beta_gradient, finish_gradients, mix_shape, parts_of, per_summary
from lln.kernels.recipes import Recipe, Step, follow, places
from lln.kernels.shapes import output_like
from lln.kernels.sizes import Plan, cdiv, make_plan
from lln.kernels.triton import backward as bwd
from lln.kernels.triton import forward as fwd
from lln.kernels.triton import summaries
from lln.kernels.triton.gaps import starts_of


def attend(call: Call, save: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output ``[B, H, T, E]``; to ``save``, log-mass ``[B, SH, D]``, centroid ``[B, SH, D, E]``."""
    query, key, value = call.query, call.key, call.value
    batch, width, value_width = call.samples, query.shape[3], value.shape[3]
    out = output_like(query, value_width)
    log_mass = centroid = None
    if save:
        saved = (batch, call.summary_heads, width)
        log_mass = torch.empty(saved, dtype=torch.float32, device=query.device)
        centroid = torch.empty((*saved, value_width), dtype=value.dtype, device=query.device)
    if out.numel() == 0 or key.shape[2] == 0:
        for made in (log_mass, centroid):
            if made is not None:
                made.zero_()
        return out.zero_(), log_mass, centroid
    alpha = flat_scale(call.alpha, batch, query)
    beta = flat_scale(call.beta, batch, query)
    mask = mask_bytes(call.mask, query)
    mix = out if call.mix is None else call.mix.expand(out.shape)
    live = {
        "query": query,
        "key": key,
        "value": value,
        "out": out,
        "alpha": alpha,
        "beta": beta,
        "mask": mask,
        "mix": mix,
        "bounds": query if call.bounds is None else call.bounds,
        "log_mass": log_mass if save else query,
        "centroid": centroid if save else query,
        "alpha_number": call.alpha_number,
        "beta_number": call.beta_number,
        "mix_number": call.mix_number,
        "seed": call.seed,
    }
    kind = ("attend", save, call.looks(), call.options())
    family = ("attend", query.device, query.dtype, width, value_width, call.block_size)
    follow(
        kind,
        family,
        live,
        query.device,
        lambda: _plan_of(call),
        lambda chosen: _write_attend(call, out, mix, save, chosen),
    )
    return out, log_mass, centroid


def _write_attend(call: Call, out: Tensor, mix: Tensor, save: bool, plan: Plan) -> Recipe:
    query, key, value = call.query, call.key, call.value
    batch, slots = call.samples, call.summary_heads
    heads, tokens, width = query.shape[1:]
    keys, value_width = value.shape[2:]
    blocks = call.block_size > 0
    constants = {
        "R": heads // slots,
        "KG": slots // key.shape[1],
        "D": width,
        "E": value_width,
        "BD": plan.width,
        "BE": plan.value_width,
        "PRECISION": precision_of(query, max(plan.width, plan.value_width)),
        "EVEN": _is_even(plan, call),
        "HAS_ALPHA": call.alpha is not None,
        "HAS_BETA": call.beta is not None,
        "HAS_MASK": call.mask is not None,
        "HAS_DROPOUT": call.dropout_p > 0,
        "QUIET": call.mask is not None and tokens == keys,
        "HAS_DIAG": blocks,
        "ONE_BLOCK": plan.joint_read.tokens == call.block_size,
        "MIX": mix_kind(call.mix, call.block_size),
        "CAUSAL": False,
        "PACKED": call.bounds is not None,
    }
    reader = plan.joint_read if blocks else plan.read
    tile_tokens = plan.block_rows if blocks else plan.read.tokens
    block_size = max(call.block_size, 1)
    starts, before, gaps = starts_of(call)
    strides = strides_of(call, query, key, value, out, None if call.mix is None else mix)
    if plan.short:
        arguments = [
            *places(f"query key value out mix mask alpha beta log_mass centroid {starts}"),
            *places("alpha_number beta_number mix_number"), call.scale, block_size,
            *places("seed"), call.dropout_p, tile_tokens, tokens, keys, slots, *strides,
        ]  # fmt: skip
        own = {"BK": plan.summarise.tokens, "BQ": reader.tokens, "STAGES": reader.stages}
        own["SAVE"] = save
        grid = (batch * slots,)
        step = Step(fwd.short_fwd_kernel, grid, arguments, constants | own, reader.warps)
        return Recipe([*before, step], gaps)
    longest, longest_keys = call.longest or tokens, call.longest or keys
    tile = plan.summarise
    stretch = tile.stretch(longest_keys, tile.tokens, batch * slots, plan.cores)
    splits = cdiv(longest_keys, stretch)
    constants["SHIFTED"] = False
    steps, room = summarise_steps(call, plan, constants, slots, splits, stretch)
    if not save:
        kept = (batch, slots, width)
        room |= {"log_mass": (kept, torch.float32), "centroid": ((*kept, value_width), value.dtype)}
    rows = min(8, plan.width)
    merge = [*places("peak mass total log_mass centroid"), splits]
    grid = (plan.width // rows, batch * slots)
    steps.append(Step(summaries.merge_kernel, grid, merge, constants | {"ROWS": rows}, 4))
    longest = call.reach(longest)
    stretch = reader.stretch(longest, tile_tokens, batch * heads, plan.cores)
    arguments = [
        *places(f"query key value out mix mask alpha log_mass centroid {starts}"),
        *places("alpha_number mix_number"), call.scale, block_size, *places("seed"),
        call.dropout_p, tile_tokens, stretch, tokens, keys, heads, *strides,
    ]  # fmt: skip
    own = {"BT": reader.tokens, "STAGES": reader.stages}
    grid = (cdiv(longest, stretch), batch * heads)
    steps.append(Step(fwd.read_kernel, grid, arguments, constants | own, reader.warps))
    return Recipe(before + steps, gaps | room)


def summarise_steps(
    call: Call, plan: Plan, constants: dict[str, object], slots: int, splits: int, stretch: int
) -> tuple[list[Step], dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Partial summaries ``peak``, ``mass`` and ``total`` of every stretch of keys."""
    key, value = call.key, call.value
    tile = plan.summarise
    starts, _, _ = starts_of(call)
    programs = call.samples * slots
    part = (programs, splits, plan.width)
    room = {
        "peak": (part, torch.float32),
        "mass": (part, torch.float32),
        "total": ((*part, plan.value_width), torch.float32),
    }
    arguments = [
        *places(f"key value mask beta peak mass total {starts} beta_number seed"), call.dropout_p,
        value.shape[2], slots, stretch, *strides_of(call, key, value),
    ]  # fmt: skip
    own = constants | {"BT": tile.tokens, "STAGES": tile.stages}
    return [Step(summaries.summarise_kernel, (splits, programs), arguments, own, tile.warps)], room


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
    slots, heads, width = call.summary_heads, query.shape[1], query.shape[3]
    batch, value_width = call.samples, value.shape[3]
    if query.numel() == 0 or value.numel() == 0:
        return call.no_gradients()
    alpha = flat_scale(call.alpha, batch, query)
    beta = flat_scale(call.beta, batch, query)
    mask = mask_bytes(call.mask, query)
    mix = gradient if call.mix is None else call.mix.expand(gradient.shape)
    dq = torch.empty_like(query)
    dk, dv = per_summary(key, slots), per_summary(value, slots)
    mode = mix_mode(call.mix, heads // slots) if mix_grad and call.mix is not None else 0
    device = query.device
    dalpha = dbeta = dmix = None
    if alpha_grad or beta_grad or mode:
        parts = _cut(call, _plan_of(call), mode)
        of_alpha = (batch, heads, parts.query_programs) if alpha_grad else None
        of_beta = (batch, slots, parts.key_programs, 3) if beta_grad else None
        of_mix = mix_shape(mode, query, value_width, (batch, heads, parts.key_programs))
        dalpha, dbeta, dmix = parts_of(device, of_alpha, of_beta, of_mix)
    live = {
        "query": query,
        "key": key,
        "value": value,
        "gradient": gradient,
        "dq": dq,
        "dk": dk,
        "dv": dv,
        "dalpha": gradient if dalpha is None else dalpha,
        "dbeta": gradient if dbeta is None else dbeta,
        "dmix": gradient if dmix is None else dmix,
        "alpha": alpha,
        "beta": beta,
        "mask": mask,
        "mix": mix,
        "bounds": query if call.bounds is None else call.bounds,
        "log_mass": log_mass,
        "centroid": centroid,
        "alpha_number": call.alpha_number,
        "beta_number": call.beta_number,
        "mix_number": call.mix_number,
        "seed": call.seed,
    }
    kind = ("backward", alpha_grad, beta_grad, mode, call.looks(gradient), call.options())
    family = ("backward", device, query.dtype, width, value_width, call.block_size)

    def write(chosen: Plan) -> Recipe:
        asked = (alpha_grad, beta_grad, mode)
        cut = _cut(call, _plan_of(call), mode)
        return _write_backward(call, gradient, mix, (dq, dk, dv), asked, cut, chosen)

    follow(kind, family, live, device, lambda: _plan_of(call), write)
    if dbeta is not None:
        dbeta = beta_gradient(dbeta, width)
    return finish_gradients(call, (dq, dk, dv), dalpha, dbeta, dmix, slots // key.shape[1])


class _Cut(NamedTuple):
    """How the passes of the backward are split; a plan that shrinks later does not change it."""

    query_programs: int
    key_programs: int
    query_tokens: int
    key_tokens: int


def _is_split(plan: Plan, mode: int) -> bool:
    """Whether the diagonal's gradients have a pass of their own; dmix needs both parts at once."""
    return plan.split_blocks and not mode


def _cut(call: Call, plan: Plan, mode: int) -> _Cut:
    batch, heads, slots = call.samples, call.query.shape[1], call.summary_heads
    tokens, keys = call.longest or call.query.shape[2], call.longest or call.key.shape[2]
    split = _is_split(plan, mode)
    is_joint = call.block_size > 0 and not split
    walker = plan.joint_grad if is_joint else plan.key_grad
    rows = plan.block_rows if is_joint else walker.tokens
    keys = call.reach(keys) if is_joint else keys
    stretch = plan.query_grad.stretch(tokens, plan.query_grad.tokens, batch * heads, plan.cores)
    key_stretch = walker.stretch(keys, rows, batch * slots, plan.cores)
    if plan.short and not split:
        return _Cut(1, 1, stretch, key_stretch)
    return _Cut(cdiv(tokens, stretch), cdiv(keys, key_stretch), stretch, key_stretch)


def _plan_of(call: Call) -> Plan:
    tensors = (call.query, call.key, call.value)
    return make_plan(*tensors, call.samples, call.summary_heads, call.block_size, call.longest)


def _write_backward(
    call: Call,
    gradient: Tensor,
    mix: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    asked: tuple[bool, bool, int],
    cut: _Cut,
    plan: Plan,
) -> Recipe:
    query, key, value = call.query, call.key, call.value
    batch, slots = call.samples, call.summary_heads
    heads, tokens, width = query.shape[1:]
    keys, value_width = value.shape[2:]
    shared = heads // slots
    alpha_grad, beta_grad, mode = asked
    splits, key_splits, stretch, key_stretch = cut
    split = _is_split(plan, mode)
    walker = plan.joint_grad if call.block_size and not split else plan.key_grad
    constants: dict[str, object] = {
        "R": shared,
        "KG": slots // key.shape[1],
        "D": width,
        "E": value_width,
        "BD": plan.width,
        "BE": plan.value_width,
        "PRECISION": precision_of(query),
        "EVEN": _is_even(plan, call),
        "HAS_ALPHA": call.alpha is not None,
        "HAS_BETA": call.beta is not None,
        "HAS_MASK": call.mask is not None,
        "HAS_DROPOUT": call.dropout_p > 0,
        "QUIET": call.mask is not None and tokens == keys,
        "ONE_BLOCK": plan.joint_read.tokens == call.block_size,
        "MIX": mix_kind(call.mix, call.block_size),
        "CAUSAL": False,
        "PACKED": call.bounds is not None,
        "ALPHA_GRAD": alpha_grad,
        "BETA_GRAD": beta_grad,
        "MIX_GRAD": mode,
        "SPLIT": split,
    }
    numbers = [
        *places("alpha_number beta_number mix_number"), call.scale, max(call.block_size, 1),
        *places("seed"), call.dropout_p, plan.block_rows,
    ]  # fmt: skip
    mixed = None if call.mix is None else mix
    starts, before, gaps = starts_of(call)
    strides = strides_of(call, query, key, value, gradient, *grads, mixed)
    if plan.short and not split:
        arguments = [
            *places("query key value gradient dq dk dv mix dmix mask alpha beta dalpha dbeta"),
            *places(f"log_mass centroid {starts}"), *numbers, tokens, keys, slots, *strides,
        ]  # fmt: skip
        own = {
            "BK": plan.key_grad.tokens,
            "BQ": plan.query_grad.tokens,
            "BJ": plan.joint_grad.tokens,
            "STAGES": walker.stages,
        }
        grid = (batch * slots,)
        step = Step(bwd.short_bwd_kernel, grid, arguments, constants | own, walker.warps)
        return Recipe([*before, step], gaps)
    part = (batch * heads, splits, plan.width)
    room = {
        "shift_parts": (part, torch.float32),
        "dc_parts": ((*part, plan.value_width), torch.float32),
        "shift": ((batch, slots, width), torch.float32),
        "dc": ((batch, slots, value_width, width), value.dtype),
    }
    arguments = [
        *places("query gradient dq mix mask alpha dalpha log_mass centroid shift_parts dc_parts"),
        *places("bounds alpha_number mix_number"), stretch, tokens, heads,
        *strides_of(call, query, gradient, grads[0], mixed),
    ]  # fmt: skip
    tile = plan.query_grad
    own = {"BT": tile.tokens, "STAGES": tile.stages}
    grid = (splits, batch * heads)
    steps = [Step(bwd.query_bwd_kernel, grid, arguments, constants | own, tile.warps)]
    rows = min(8, plan.value_width)
    arguments = [*places("shift_parts dc_parts shift dc"), shared * splits]
    grid = (plan.value_width // rows, batch * slots)
    steps.append(Step(bwd.gather_kernel, grid, arguments, constants | {"ROWS": rows}, 4))
    tensors = [
        *places("query key value gradient dq dk dv mix dmix mask alpha beta dbeta"),
        *places(f"log_mass centroid shift dc {starts}"),
    ]
    arguments = [*tensors, *numbers, key_stretch, tokens, keys, slots, *strides]
    own = {"BT": walker.tokens, "STAGES": walker.stages}
    grid = (key_splits, batch * slots)
    alone = {"MIX": 0, "SPLIT": False} if split else {}
    sizes = constants | own | alone
    steps.append(Step(bwd.key_bwd_kernel, grid, arguments, sizes, walker.warps))
    if split:
        tile, longest = plan.joint_grad, call.reach(call.longest or keys)
        stretch = tile.stretch(longest, plan.block_rows, batch * slots, plan.cores)
        arguments = [*tensors, *numbers, stretch, tokens, keys, slots, *strides]
        sizes = constants | {"BT": tile.tokens, "STAGES": tile.stages}
        grid = (cdiv(longest, stretch), batch * slots)
        steps.append(Step(bwd.key_bwd_kernel, grid, arguments, sizes, tile.warps))
    return Recipe(before + steps, gaps | room)


def _is_even(plan: Plan, call: Call) -> bool:
    """Whether no tile of any pass is partly empty and no key is masked."""
    tiles = [plan.summarise, plan.read, plan.query_grad, plan.key_grad]
    if call.block_size:
        tiles += [plan.joint_read, plan.joint_grad]
    if call.mask is not None or call.bounds is not None:
        return False
    if call.block_size and plan.joint_read.tokens != plan.block_rows:
        return False
    largest = max(tile.tokens for tile in tiles)
    return call.query.shape[2] % largest == 0 and call.key.shape[2] % largest == 0
