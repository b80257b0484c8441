"""From tensors to kernel launches: allocate, choose the plan, pass pointers and strides.

Dimension legend: B batch, H query heads, Hk key heads, SH summary heads, T queries, S keys,
D head width, E value width. R = H / SH query heads share a summary; KG = SH / Hk summaries share a
key head (when β differs within a group).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from lln.errors import BackendUnavailableError
from lln.kernels import backward as bwd
from lln.kernels import forward as fwd
from lln.kernels.shapes import output_like, summary_heads
from lln.kernels.tuning import Plan, make_plan, smaller

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Settings:
    """What a call computes, beside its tensors.

    Attributes:
        alpha: Used where ``alpha_tensor`` is None.
        beta: Used where ``beta_tensor`` is None.
        mix: Used where ``mix_tensor`` is None.
        block_size: Of the diagonal part; 0 = none.
        scale: Of the diagonal part's scores.
        dropout_p: Probability to drop a key.
        seed: Of the dropped keys.
    """

    alpha: float
    beta: float
    mix: float
    block_size: int
    scale: float
    dropout_p: float
    seed: int


# How many times the plan of a kind of call had to shrink to fit the chip.
_shrunk: dict[tuple[object, ...], int] = {}


def _fit(kind: str, run: Callable[[Plan], _Result], plan: Plan, query: Tensor) -> _Result:
    """Run with the plan, or with the largest smaller one whose kernels fit the device."""
    call = (kind, query.device, query.dtype, plan.width, plan.value_width, plan.block_rows)
    for _ in range(_shrunk.get(call, 0)):
        plan = smaller(plan) or plan
    while True:
        try:
            return run(plan)
        except OutOfResources as error:
            less = smaller(plan)
            if less is None:
                raise BackendUnavailableError(
                    f"impl='triton' finds no tile that fits this GPU at head width "
                    f"{query.shape[-1]}; use impl='eager'."
                ) from error
            plan = less
            _shrunk[call] = _shrunk.get(call, 0) + 1


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    mix: Tensor | None,
    settings: Settings,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[B, H, T, E]``, log-mass ``[B, SH, D]``, centroid ``[B, SH, D, E]``."""
    slots = summary_heads(query, key, beta)
    plan = make_plan(query, key, value, query.shape[0] * slots, settings.block_size)
    tensors = (query, key, value, alpha, beta, mask, mix)
    kind = "attend with blocks" if settings.block_size else "attend"
    return _fit(kind, lambda plan: _attend(*tensors, settings, save, plan), plan, query)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    mix: Tensor | None,
    settings: Settings,
    save: bool,
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, width = query.shape
    keys, value_width = value.shape[2:]
    slots = summary_heads(query, key, beta)
    out = output_like(query, value_width)
    summary_dtype = torch.float32 if value.dtype == torch.float32 else value.dtype
    saved = (batch, slots, width) if save or not plan.short else (0, slots, width)
    log_mass = query.new_empty(saved, dtype=torch.float32)
    centroid = value.new_empty((*saved, value_width), dtype=summary_dtype)
    if out.numel() == 0 or keys == 0:
        return out.zero_(), log_mass.fill_(0), centroid.zero_()
    sizes = {
        "R": heads // slots,
        "KG": slots // key.shape[1],
        "D": width,
        "E": value_width,
        "BD": plan.width,
        "BE": plan.value_width,
        "PRECISION": _precision(query),
    }
    flags = {
        "EVEN": _is_even(plan, settings.block_size, mask, tokens, keys),
        "HAS_MASK": mask is not None,
        "HAS_DROPOUT": settings.dropout_p > 0,
    }
    quiet = {"QUIET": mask is not None and tokens == keys}
    diag = {
        "HAS_DIAG": settings.block_size > 0,
        "ONE_BLOCK": plan.joint_read.tokens == settings.block_size,
        "MIX": _mix_kind(mix, settings.block_size),
        "CAUSAL": False,
    }
    alpha_flat, beta_flat, mask_bytes = _flat(alpha, query), _flat(beta, query), _bytes(mask, query)
    mix_full, mix_strides = _mix_of(mix, out)
    reader = plan.joint_read if settings.block_size else plan.read
    tile_tokens = plan.block_rows if settings.block_size else plan.read.tokens
    block_size = max(settings.block_size, 1)
    strides = (*query.stride(), *key.stride(), *value.stride(), *out.stride(), *mix_strides)
    with _on(query):
        if plan.short:
            fwd.short_fwd_kernel[(batch * slots,)](
                query, key, value, out, mix_full, mask_bytes, alpha_flat, beta_flat, log_mass,
                centroid, settings.alpha, settings.beta, settings.mix, settings.scale, block_size,
                settings.seed, settings.dropout_p, tile_tokens, tokens, keys, slots, *strides,
                BK=plan.summarise.tokens, BQ=reader.tokens, STAGES=reader.stages,
                HAS_ALPHA=alpha is not None, HAS_BETA=beta is not None, SAVE=save,
                num_warps=reader.warps, **sizes, **flags, **diag, **quiet,
            )  # fmt: skip
            return out, log_mass, centroid
        _summarise(
            key, value, beta_flat, mask_bytes, log_mass, centroid, settings, plan,
            beta is not None, sizes, flags,
        )  # fmt: skip
        stretch = reader.stretch(tokens, tile_tokens, batch * heads, plan.cores)
        fwd.read_kernel[(triton.cdiv(tokens, stretch), batch * heads)](
            query, key, value, out, mix_full, mask_bytes, alpha_flat, log_mass, centroid,
            settings.alpha, settings.mix, settings.scale, block_size, settings.seed,
            settings.dropout_p, tile_tokens, stretch, tokens, keys, heads, *strides,
            BT=reader.tokens, STAGES=reader.stages, HAS_ALPHA=alpha is not None,
            num_warps=reader.warps, **sizes, **flags, **diag, **quiet,
        )  # fmt: skip
    return out, log_mass, centroid


def _summarise(
    key, value, beta_flat, mask_bytes, log_mass, centroid, settings, plan, has_beta, sizes, flags
):
    batch, slots, width = log_mass.shape
    keys, value_width = value.shape[2:]
    tile = plan.summarise
    stretch = tile.stretch(keys, tile.tokens, batch * slots, plan.cores)
    splits = triton.cdiv(keys, stretch)
    part = (batch * slots, splits, plan.width)
    peak, mass = key.new_empty((2, *part), dtype=torch.float32)
    total = key.new_empty((*part, plan.value_width), dtype=torch.float32)
    own = {name: sizes[name] for name in sizes if name != "R"}
    fwd.summarise_kernel[(splits, batch * slots)](
        key, value, mask_bytes, beta_flat, peak, mass, total, settings.beta, settings.seed,
        settings.dropout_p, keys, slots, stretch,
        *key.stride(), *value.stride(), BT=tile.tokens, STAGES=tile.stages, HAS_BETA=has_beta,
        num_warps=tile.warps,
        **own, **flags,
    )  # fmt: skip
    rows = min(8, plan.width)
    fwd.merge_kernel[(plan.width // rows, batch * slots)](
        peak, mass, total, log_mass, centroid, splits, D=width, E=value_width, BD=plan.width,
        BE=plan.value_width, ROWS=rows, num_warps=4,
    )  # fmt: skip


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    mix: Tensor | None,
    log_mass: Tensor,
    centroid: Tensor,
    settings: Settings,
    alpha_grad: bool,
    beta_grad: bool,
    mix_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, and (empty unless asked for) of alpha, beta and mix."""
    slots = log_mass.shape[1]
    plan = make_plan(query, key, value, query.shape[0] * slots, settings.block_size)
    tensors = (gradient, query, key, value, alpha, beta, mask, mix, log_mass, centroid)
    asked = (alpha_grad, beta_grad, mix_grad)
    kind = "backward with blocks" if settings.block_size else "backward"
    return _fit(kind, lambda plan: _attend_backward(*tensors, settings, *asked, plan), plan, query)


def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    mask: Tensor | None,
    mix: Tensor | None,
    log_mass: Tensor,
    centroid: Tensor,
    settings: Settings,
    alpha_grad: bool,
    beta_grad: bool,
    mix_grad: bool,
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, heads, tokens, width = query.shape
    key_heads, keys, value_width = value.shape[1:]
    slots = log_mass.shape[1]
    shared, group = heads // slots, slots // key_heads
    if query.numel() == 0 or value.numel() == 0:
        sides = (query, key, value, alpha, beta, mix)
        return tuple(query.new_zeros(0) if t is None else torch.zeros_like(t) for t in sides)
    dq = torch.empty_like(query)
    dk, dv = _per_summary(key, slots), _per_summary(value, slots)
    diag_on = settings.block_size > 0
    walker = plan.joint_grad if diag_on else plan.key_grad
    rows = plan.block_rows if diag_on else walker.tokens
    stretch = plan.query_grad.stretch(tokens, plan.query_grad.tokens, batch * heads, plan.cores)
    key_stretch = walker.stretch(keys, rows, batch * slots, plan.cores)
    splits = 1 if plan.short else triton.cdiv(tokens, stretch)
    key_splits = 1 if plan.short else triton.cdiv(keys, key_stretch)
    float32 = {"dtype": torch.float32}
    dalpha = query.new_empty((batch, heads, splits) if alpha_grad else (0,), **float32)
    dbeta = query.new_empty((batch, slots, key_splits) if beta_grad else (0,), **float32)
    mode = _mix_mode(mix, shared) if mix_grad and mix is not None else 0
    mix_shape = {
        0: (0,),
        1: (batch, heads, tokens, 1),
        2: (batch, heads, tokens, value_width),
        3: (batch, heads, key_splits, value_width),
    }[mode]
    dmix = query.new_empty(mix_shape, **float32)
    sizes = {
        "R": shared,
        "D": width,
        "E": value_width,
        "BD": plan.width,
        "BE": plan.value_width,
        "HAS_ALPHA": alpha is not None,
        "EVEN": _is_even(plan, settings.block_size, mask, tokens, keys),
        "MIX": _mix_kind(mix, settings.block_size),
        "PRECISION": _precision(query),
        "QUIET": mask is not None and tokens == keys,
    }
    both = {
        "KG": group,
        "HAS_BETA": beta is not None,
        "BETA_GRAD": beta_grad,
        "MIX_GRAD": mode,
        "ONE_BLOCK": plan.joint_read.tokens == settings.block_size,
        "HAS_MASK": mask is not None,
        "HAS_DROPOUT": settings.dropout_p > 0,
        "CAUSAL": False,
    }
    alpha_flat, beta_flat, mask_bytes = _flat(alpha, query), _flat(beta, query), _bytes(mask, query)
    mix_full, mix_strides = _mix_of(mix, gradient)
    numbers = (
        settings.alpha, settings.beta, settings.mix, settings.scale, max(settings.block_size, 1),
        settings.seed, settings.dropout_p, plan.block_rows,
    )  # fmt: skip
    ins = (*query.stride(), *key.stride(), *value.stride(), *gradient.stride())
    outs = (*dq.stride(), *dk.stride(), *dv.stride(), *mix_strides)
    with _on(query):
        if plan.short:
            bwd.short_bwd_kernel[(batch * slots,)](
                query, key, value, gradient, dq, dk, dv, mix_full, dmix, mask_bytes, alpha_flat,
                beta_flat, dalpha, dbeta, log_mass, centroid, *numbers, tokens, keys, slots,
                *ins, *outs, BK=plan.key_grad.tokens, BQ=plan.query_grad.tokens,
                BJ=plan.joint_grad.tokens, STAGES=walker.stages, ALPHA_GRAD=alpha_grad,
                num_warps=walker.warps, **sizes, **both,
            )  # fmt: skip
            return _finish(dq, dk, dv, dalpha, dbeta, dmix, key, value, alpha, beta, mix, group)
        part = (batch * heads, splits, plan.width)
        shift_parts = query.new_empty(part, **float32)
        dc_parts = query.new_empty((*part, plan.value_width), **float32)
        bwd.query_bwd_kernel[(splits, batch * heads)](
            query, gradient, dq, mix_full, mask_bytes, alpha_flat, dalpha, log_mass, centroid,
            shift_parts, dc_parts, settings.alpha, settings.mix, stretch, tokens, heads,
            *query.stride(), *gradient.stride(), *dq.stride(), *mix_strides,
            BT=plan.query_grad.tokens, STAGES=plan.query_grad.stages, ALPHA_GRAD=alpha_grad,
            num_warps=plan.query_grad.warps, **sizes,
        )  # fmt: skip
        shift = torch.empty_like(log_mass)
        dc = centroid.new_empty(batch, slots, value_width, width)
        part_rows = min(8, plan.value_width)
        bwd.gather_kernel[(plan.value_width // part_rows, batch * slots)](
            shift_parts, dc_parts, shift, dc, shared * splits, D=width, E=value_width,
            BD=plan.width, BE=plan.value_width, ROWS=part_rows, num_warps=4,
        )  # fmt: skip
        bwd.key_bwd_kernel[(key_splits, batch * slots)](
            query, key, value, gradient, dq, dk, dv, mix_full, dmix, mask_bytes, alpha_flat,
            beta_flat, dbeta, log_mass, centroid, shift, dc, *numbers, key_stretch, tokens,
            keys, slots, *ins, *outs, BT=walker.tokens, STAGES=walker.stages,
            num_warps=walker.warps, **sizes, **both,
        )  # fmt: skip
    return _finish(dq, dk, dv, dalpha, dbeta, dmix, key, value, alpha, beta, mix, group)


def _finish(dq, dk, dv, dalpha, dbeta, dmix, key, value, alpha, beta, mix, group):
    """Sum what was computed per summary or per program into the shapes of the inputs."""
    if group > 1:
        dk, dv = (
            side.unflatten(1, (-1, group)).sum(2).to(like.dtype)
            for side, like in ((dk, key), (dv, value))
        )
    if dalpha.numel() and alpha is not None:
        dalpha = dalpha.sum(-1)[..., None, None].sum_to_size(alpha.shape).to(alpha.dtype)
    if dbeta.numel() and beta is not None:
        dbeta = dbeta.sum(-1)[..., None, None].sum_to_size(beta.shape).to(beta.dtype)
    if dmix.numel() and mix is not None:
        if mix.shape[2] == 1:
            dmix = dmix.sum(2, keepdim=True)
        dmix = dmix.sum_to_size(mix.shape).to(mix.dtype)
    return dq, dk, dv, dalpha, dbeta, dmix


def _mix_kind(mix: Tensor | None, block_size: int) -> int:
    """How mix comes: 0 no diagonal part, 1 a number, 2 a value a row, 3 a row and channel."""
    if not block_size:
        return 0
    if mix is None:
        return 1
    return 2 if mix.shape[3] == 1 else 3


def _is_even(plan: Plan, block_size: int, mask: Tensor | None, tokens: int, keys: int) -> bool:
    """Whether no tile of any pass is partly empty."""
    tiles = [plan.summarise, plan.read, plan.query_grad, plan.key_grad]
    if block_size:
        tiles += [plan.joint_read, plan.joint_grad]
    if mask is not None or (block_size and plan.joint_read.tokens != plan.block_rows):
        return False
    largest = max(tile.tokens for tile in tiles)
    return tokens % largest == 0 and keys % largest == 0


def _mix_mode(mix: Tensor, shared: int) -> int:
    """How dmix is written: 1 a value a token, 2 a token and channel, 3 a channel."""
    if mix.shape[3] == 1:
        return 1
    return 3 if mix.shape[2] == 1 and shared == 1 else 2


def _per_summary(like: Tensor, slots: int) -> Tensor:
    """Room for the gradient of key or value, one a summary head."""
    if like.shape[1] == slots:
        return torch.empty_like(like)
    return like.new_empty(like.shape[0], slots, *like.shape[2:])


def _flat(scale: Tensor | None, query: Tensor) -> Tensor:
    """α or β as ``[B · heads]``; a stand-in pointer where there is none."""
    if scale is None:
        return query
    return scale.expand(query.shape[0], -1, 1, 1).flatten().float().contiguous()


def _bytes(mask: Tensor | None, query: Tensor) -> Tensor:
    return query if mask is None else mask.contiguous().view(torch.uint8)


def _mix_of(mix: Tensor | None, out: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    if mix is None:
        return out, (0, 0, 0, 0)
    full = mix.expand(out.shape)
    return full, full.stride()


def _precision(query: Tensor) -> str:
    return "ieee" if query.dtype == torch.float32 else "tf32"


def _on(tensor: Tensor):
    """Launch on the tensor's device, whatever device is current."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else torch.inference_mode(False)
