"""From tensors to kernel launches: allocate, choose the plan, pass pointers and strides.

Dimension legend: B batch, H query heads, Hk key heads, SH summary heads, T queries, S keys,
D head width, E value width. R = H / SH query heads share a summary; KG = SH / Hk summaries share a
key head (when β differs within a group).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from lln.kernels import backward as bwd
from lln.kernels import forward as fwd
from lln.kernels.tuning import make_plan


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


def summary_heads(query: Tensor, key: Tensor, beta: Tensor | None) -> int:
    """SH: the key heads, unless β tells the query heads of a group apart."""
    if beta is not None and beta.shape[1] == query.shape[1]:
        return query.shape[1]
    return key.shape[1]


def output_like(query: Tensor, width: int) -> Tensor:
    """An empty ``[B, H, T, E]`` in the memory order of query, so that transposing back is free."""
    batch, heads, tokens, _ = query.shape
    if query.stride(1) < query.stride(2):
        return query.new_empty(batch, tokens, heads, width).transpose(1, 2)
    return query.new_empty(batch, heads, tokens, width)


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
    """Forward: output ``[B, H, T, E]``, log-mass ``[B, SH, D]``, centroid ``[B, SH, D, E]``."""
    batch, heads, tokens, width = query.shape
    keys, value_width = value.shape[2:]
    slots = summary_heads(query, key, beta)
    plan = make_plan(query, key, value, batch * slots, settings.block_size, backward=False)
    out = output_like(query, value_width)
    summary_dtype = torch.float32 if value.dtype == torch.float32 else value.dtype
    saved = (batch, slots, width) if save or not plan.short else (0, slots, width)
    log_mass = query.new_empty(saved, dtype=torch.float32)
    centroid = value.new_empty((*saved, value_width), dtype=summary_dtype)
    if out.numel() == 0:
        return out, log_mass.fill_(0), centroid.fill_(0)
    sizes = {
        "R": heads // slots,
        "KG": slots // key.shape[1],
        "D": width,
        "E": value_width,
        "BD": plan.width,
        "BE": plan.value_width,
        "PRECISION": _precision(query),
        "STAGES": plan.stages,
    }
    flags = {
        "HAS_MASK": mask is not None,
        "HAS_DROPOUT": settings.dropout_p > 0,
    }
    diag = {
        "HAS_DIAG": settings.block_size > 0,
        "HAS_MIX": mix is not None,
        "CAUSAL": False,
    }
    alpha_flat, beta_flat, mask_bytes = _flat(alpha, query), _flat(beta, query), _bytes(mask, query)
    mix_full, mix_strides = _mix_of(mix, out)
    query_tile = plan.block_tile if settings.block_size else plan.tile
    tile_tokens = plan.block_rows if settings.block_size else plan.tile
    block_size = max(settings.block_size, 1)
    warps = plan.diag_warps if settings.block_size else plan.warps
    strides = (*query.stride(), *key.stride(), *value.stride(), *out.stride(), *mix_strides)
    with _on(query):
        if plan.short:
            fwd.short_fwd_kernel[(batch * slots,)](
                query, key, value, out, mix_full, mask_bytes, alpha_flat, beta_flat, log_mass,
                centroid, settings.alpha, settings.beta, settings.mix, settings.scale, block_size,
                settings.seed, settings.dropout_p, tile_tokens, tokens, keys, slots, *strides,
                BK=plan.tile, BQ=query_tile, HAS_ALPHA=alpha is not None,
                HAS_BETA=beta is not None, SAVE=save, num_warps=warps, **sizes, **flags, **diag,
            )  # fmt: skip
            return out, log_mass, centroid
        _summarise(
            key, value, beta_flat, mask_bytes, log_mass, centroid, settings, plan,
            beta is not None, sizes, flags,
        )  # fmt: skip
        stretch = _stretch(tokens, plan.program_tokens, tile_tokens)
        fwd.read_kernel[(triton.cdiv(tokens, stretch), batch * heads)](
            query, key, value, out, mix_full, mask_bytes, alpha_flat, log_mass, centroid,
            settings.alpha, settings.mix, settings.scale, block_size, settings.seed,
            settings.dropout_p, tile_tokens, stretch, tokens, keys, heads, *strides,
            BT=query_tile, HAS_ALPHA=alpha is not None, num_warps=warps, **sizes, **flags, **diag,
        )  # fmt: skip
    return out, log_mass, centroid


def _summarise(
    key, value, beta_flat, mask_bytes, log_mass, centroid, settings, plan, has_beta, sizes, flags
):
    batch, slots, width = log_mass.shape
    keys, value_width = value.shape[2:]
    splits = triton.cdiv(keys, _stretch(keys, plan.program_tokens, plan.tile))
    part = (batch * slots, splits, plan.width)
    peak, mass = key.new_empty((2, *part), dtype=torch.float32)
    total = key.new_empty((*part, plan.value_width), dtype=torch.float32)
    own = {name: sizes[name] for name in sizes if name != "R"}
    fwd.summarise_kernel[(splits, batch * slots)](
        key, value, mask_bytes, beta_flat, peak, mass, total, settings.beta, settings.seed,
        settings.dropout_p, keys, slots, _stretch(keys, plan.program_tokens, plan.tile),
        *key.stride(), *value.stride(), BT=plan.tile, HAS_BETA=has_beta, num_warps=plan.warps,
        **own, **flags,
    )  # fmt: skip
    rows = min(16, plan.width)
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
    batch, heads, tokens, width = query.shape
    key_heads, keys, value_width = value.shape[1:]
    slots = log_mass.shape[1]
    shared, group = heads // slots, slots // key_heads
    plan = make_plan(query, key, value, batch * slots, settings.block_size, backward=True)
    dq = torch.empty_like(query)
    dk, dv = _per_summary(key, slots), _per_summary(value, slots)
    diag_on = settings.block_size > 0
    splits = 1 if plan.short else triton.cdiv(tokens, plan.program_tokens)
    key_splits = 1 if plan.short else triton.cdiv(keys, plan.program_tokens)
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
    if query.numel() == 0 or value.numel() == 0:
        zeros = (t.zero_() for t in (dq, dk, dv, dalpha, dbeta, dmix))
        return _finish(*zeros, key, value, alpha, beta, mix, group)
    sizes = {
        "R": shared,
        "D": width,
        "E": value_width,
        "BD": plan.width,
        "BE": plan.value_width,
        "HAS_ALPHA": alpha is not None,
        "HAS_DIAG": diag_on,
        "HAS_MIX": mix is not None,
        "PRECISION": _precision(query),
        "STAGES": plan.stages,
    }
    both = {
        "KG": group,
        "HAS_BETA": beta is not None,
        "BETA_GRAD": beta_grad,
        "MIX_GRAD": mode,
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
    warps = plan.diag_warps if diag_on else plan.warps
    with _on(query):
        if plan.short:
            bwd.short_bwd_kernel[(batch * slots,)](
                query, key, value, gradient, dq, dk, dv, mix_full, dmix, mask_bytes, alpha_flat,
                beta_flat, dalpha, dbeta, log_mass, centroid, *numbers, tokens, keys, slots,
                *ins, *outs, BK=plan.tile // 2, BQ=plan.tile // 2, BJ=plan.block_tile,
                ALPHA_GRAD=alpha_grad, num_warps=warps, **sizes, **both,
            )  # fmt: skip
            return _finish(dq, dk, dv, dalpha, dbeta, dmix, key, value, alpha, beta, mix, group)
        part = (batch * heads, splits, plan.width)
        dl_parts = query.new_empty(part, **float32)
        dc_parts = query.new_empty((*part, plan.value_width), **float32)
        bwd.query_bwd_kernel[(splits, batch * heads)](
            query, gradient, dq, mix_full, alpha_flat, dalpha, log_mass, centroid, dl_parts,
            dc_parts, settings.alpha, settings.mix, plan.program_tokens, tokens, heads,
            *query.stride(), *gradient.stride(), *dq.stride(), *mix_strides, BT=plan.tile // 2,
            ALPHA_GRAD=alpha_grad, num_warps=plan.warps, **sizes,
        )  # fmt: skip
        shift, dc = torch.empty_like(log_mass), torch.empty_like(centroid)
        rows = min(16, plan.width)
        bwd.gather_kernel[(plan.width // rows, batch * slots)](
            dl_parts, dc_parts, centroid, shift, dc, shared * splits, D=width, E=value_width,
            BD=plan.width, BE=plan.value_width, ROWS=rows, num_warps=4,
        )  # fmt: skip
        tile = plan.block_tile if diag_on else plan.tile // 2
        bwd.key_bwd_kernel[(key_splits, batch * slots)](
            query, key, value, gradient, dq, dk, dv, mix_full, dmix, mask_bytes, alpha_flat,
            beta_flat, dbeta, log_mass, centroid, shift, dc, *numbers, plan.program_tokens, tokens,
            keys, slots, *ins, *outs, BT=tile, num_warps=warps, **sizes, **both,
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


def _mix_mode(mix: Tensor, shared: int) -> int:
    """How dmix is written: 1 a value a token, 2 a token and channel, 3 a channel."""
    if mix.shape[3] == 1:
        return 1
    return 3 if mix.shape[2] == 1 and shared == 1 else 2


def _stretch(tokens: int, program_tokens: int, align: int) -> int:
    """Tokens of a program, a whole number of tiles."""
    return min(-(-program_tokens // align) * align, -(-tokens // align) * align)


def _per_summary(like: Tensor, slots: int) -> Tensor:
    """Room for the gradient of key or value, one a summary head."""
    if like.shape[1] == slots:
        return torch.empty_like(like)
    return like.new_empty(like.shape[0], slots, *like.shape[2:])


def _flat(scale: Tensor | None, query: Tensor) -> Tensor:
    """α or β as ``[B · heads]``; a stand-in pointer where there is none."""
    if scale is None:
        return query
    return scale.expand(query.shape[0], -1, 1, 1).reshape(-1).float()


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
