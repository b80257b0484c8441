"""Turns what the kernels wrote into gradients in the shapes of the inputs.

Dimension legend: see `lln.kernels.lln.launch_bidirectional`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lln.kernels.launching.recipes import Recipe
from lln.kernels.summaries.lln_call import (
    Gradients,
    LLNCall,
    launch_call,
    mix_mode,
    runtime_args,
)


def finish_gradients(call: LLNCall, made: Gradients, group: int) -> Gradients:
    """Sum what was computed per summary or per program into the shapes of the inputs."""
    dq, dk, dv, dalpha, dbeta, dmix = made
    if group > 1:
        dk, dv = (
            side.unflatten(1, (-1, group)).sum(2).to(like.dtype)
            for side, like in ((dk, call.key), (dv, call.value))
        )
    if dalpha is not None and call.alpha is not None:
        dalpha = _total(dalpha).sum_to_size(call.alpha.shape).to(call.alpha.dtype)
    if dbeta is not None and call.beta is not None:
        dbeta = _total(dbeta)
        if dbeta.shape[1] > call.beta.shape[1] > 1:
            dbeta = dbeta.unflatten(1, (call.beta.shape[1], -1)).sum(2)
        dbeta = dbeta.sum_to_size(call.beta.shape).to(call.beta.dtype)
    if dmix is not None and call.mix is not None:
        if call.mix.shape[2] == 1:
            dmix = dmix.sum(2, keepdim=True)
        dmix = dmix.sum_to_size(call.mix.shape).to(call.mix.dtype)
    return dq, dk, dv, dalpha, dbeta, dmix


def beta_gradient(sums: Tensor, width: int, total: float | Tensor = 0.0) -> Tensor:
    """Every head's dβ ``[B, H, 1]`` from what its programs summed ``[B, H, programs, 3]``.

    These are Σ g·k, Σ g and the weighted sum of k. dβ = Σ g·k over tokens and slots (of the
    summary), and the sum of all g, ``total`` ``[B, H, 1]``, is known without rounding (0 where
    these are all keys of the sequence), so that dβ = Σ g·(k − c) + c·Σ g for any c. With c the mean
    of k weighted as in the slots, rounding errors common to all g count less.
    """
    product, residue, weighted = sums.sum(2, keepdim=True, dtype=torch.float64).unbind(-1)
    return product - (residue - total) * weighted / width


def _total(parts: Tensor) -> Tensor:
    """Sum the programs' parts of a head's gradient in float64: few results, many terms each."""
    return parts.sum(-1, dtype=torch.float64)[..., None, None]


def launch_gradients(
    name: str,
    call: LLNCall,
    gradient: Tensor,
    summaries: int,
    wanted: tuple[bool, bool, bool],
    dv: Tensor | None,
    parts_of: Callable[[int], tuple[tuple[int, ...], ...]],
    write: Callable[..., Recipe],
    **saved: Tensor | None,
) -> Gradients:
    """Gradients of query, key, value, and of alpha, beta and mix where wanted.

    ``parts_of`` says the shapes of every program's parts of dα and dβ, and the programs that dmix
    has parts of, for how dmix is written (`mix_mode`). That of the values belongs into ``dv``,
    which is used if every summary has its own values; ``saved`` are more arguments by the names of
    the places. The pointer of the output's gradient is passed for gradients that are not needed.
    """
    (alpha_grad, beta_grad, mix_grad), query, value = wanted, call.query, call.value
    if query.numel() == 0 or value.numel() == 0:
        return call.no_gradients()
    runtime = runtime_args(call, gradient, summaries) | saved
    dq, dk = torch.empty_like(query), _per_summary(call.key, summaries)
    dv_out = dv
    if dv is None or dv.shape[1] != summaries:
        dv = _per_summary(value, summaries)
    runtime |= {"p_g": gradient, "p_dq": dq, "p_dk": dk, "p_dv": dv}
    mode = 0
    if mix_grad and call.mix is not None:
        mode = mix_mode(call.mix, query.shape[1] // summaries)
    shapes: list[tuple[int, ...] | None] = [None, None, None]
    if alpha_grad or beta_grad or mode:
        of_alpha, of_beta, parts = parts_of(mode)
        rows, width = query.shape[:3], value.shape[3]
        of_mix = [None, (*rows, 1), (*rows, width), (*parts, width)][mode]
        shapes = [of_alpha if alpha_grad else None, of_beta if beta_grad else None, of_mix]
    rest: list[Tensor | None] = []
    for place, shape in zip(("p_dalpha", "p_dbeta", "p_dmix"), shapes, strict=True):
        side = None
        if shape is not None:
            side = torch.empty(shape, dtype=torch.float32, device=gradient.device)
        runtime[place] = gradient if side is None else side
        rest.append(side)
    asked = (alpha_grad, beta_grad, mode)
    launch_call(name, call, runtime, summaries, write, *asked, others=(gradient, dv_out))
    dalpha, dbeta, dmix = rest
    if dbeta is not None and dbeta.dim() == 4:
        dbeta = beta_gradient(dbeta, query.shape[3])
    made = dq, dk, dv, dalpha, dbeta, dmix
    return finish_gradients(call, made, summaries // call.key.shape[1])


def _per_summary(like: Tensor, summaries: int) -> Tensor:
    """Allocate the gradient of key or value per summary head."""
    if like.shape[1] == summaries:
        return torch.empty_like(like)
    return like.new_empty(like.shape[0], summaries, *like.shape[2:])
