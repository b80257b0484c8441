"""Turns what the kernels wrote into gradients in the shapes of the inputs.

Dimension legend: see `lln.kernels.lln.launch_bidirectional`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.kernels.summaries.lln_call import Gradients, LLNCall


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


def allocate_gradients(
    call: LLNCall,
    gradient: Tensor,
    runtime: dict[str, Any],
    summaries: int,
    of_alpha: tuple[int, ...] | None,
    of_beta: tuple[int, ...] | None,
    of_mix: tuple[int, ...] | None,
    dv: Tensor | None = None,
) -> Gradients:
    """Allocate the gradients, and add them to ``runtime``, the kernels' arguments.

    ``of_alpha``, ``of_beta`` and ``of_mix`` are the shapes of every program's parts; None = not
    needed, and the pointer of the output's gradient is passed. That of the values belongs into
    ``dv``, which is used if every summary has its own values.
    """
    dq, dk = torch.empty_like(call.query), _per_summary(call.key, summaries)
    if dv is None or dv.shape[1] != summaries:
        dv = _per_summary(call.value, summaries)
    runtime["p_g"], runtime["p_dq"], runtime["p_dk"], runtime["p_dv"] = gradient, dq, dk, dv
    rest: list[Tensor | None] = []
    for name, shape in (("p_dalpha", of_alpha), ("p_dbeta", of_beta), ("p_dmix", of_mix)):
        side = None
        if shape is not None:
            side = torch.empty(shape, dtype=torch.float32, device=gradient.device)
        runtime[name] = gradient if side is None else side
        rest.append(side)
    return dq, dk, dv, rest[0], rest[1], rest[2]


def mix_shape(
    mode: int, query: Tensor, value_width: int, parts: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Shape of dmix as the kernels write it; see `lln.kernels.summaries.lln_call.mix_mode`."""
    rows = query.shape[:3]
    return [None, (*rows, 1), (*rows, value_width), (*parts, value_width)][mode]


def _per_summary(like: Tensor, summaries: int) -> Tensor:
    """Allocate the gradient of key or value per summary head."""
    if like.shape[1] == summaries:
        return torch.empty_like(like)
    return like.new_empty(like.shape[0], summaries, *like.shape[2:])
