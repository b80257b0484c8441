"""The halves of LLN attention with gradients: `fused_summary` and `fused_read`.

As in `run`, ordinary calls use an ``autograd.Function``, and calls under a compiler, a
transform or a dispatch mode go through operators. Wide values go in slices. A call without tokens
is the caller's to answer.

Dimension legend: B batch, H query heads, Hk key heads, SH summary heads, T queries, S keys, D head
width, E value width.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lln.kernels.launching.kernel_arguments import tensor_or_number
from lln.kernels.launching.operators import once_differentiable, operator
from lln.kernels.launching.shapes import output_like, within_reach
from lln.tracing import is_watched

_KEYS = "Tensor key, Tensor value, Tensor? beta, Tensor? key_mask, float beta_number"
_SUMMARY = "Tensor log_mass, Tensor centroid"
_QUERIES = f"Tensor query, Tensor? alpha, {_SUMMARY}, Tensor? mask, float alpha_number"


def fused_summary(
    key: Tensor,
    value: Tensor,
    beta: float | Tensor,
    key_mask: Tensor | None,
    value_width: int,
) -> tuple[Tensor, Tensor]:
    """Log-mass ``[B, SH, D]`` and centroid ``[B, SH, D, E]`` of the keys, in float32.

    Args:
        key: ``[B, Hk, S, D]``.
        value: ``[B, Hk, S, E]``.
        beta: A number or a tensor for 1, Hk or H heads.
        key_mask: bool ``[B, S]`` or None.
        value_width: Channels of the values per launch.
    """
    key, value = within_reach(key), within_reach(value)
    beta_t, number = tensor_or_number(beta, key.shape[1])
    summarise = _summarise if is_watched(key) else _Summarise.apply
    parts = [
        summarise(key, part, beta_t, key_mask, number) for part in value.split(value_width, -1)
    ]
    return parts[0][0], torch.cat([part[1] for part in parts], -1)


def fused_read(
    query: Tensor,
    alpha: float | Tensor,
    log_mass: Tensor,
    centroid: Tensor,
    mask: Tensor | None,
    value_width: int,
) -> Tensor:
    """Every query's softmax over the slots, applied to the centroids: ``[B, H, T, E]``.

    Args:
        query: ``[B, H, T, D]``.
        alpha: A number or a tensor for 1 or H heads.
        log_mass: ``[B, SH, D]``, SH = H or a divisor of it.
        centroid: ``[B, SH, D, E]``.
        mask: bool ``[B, T]``, False = whatever the query holds has no effect; None = all count.
        value_width: Channels of the centroids per launch.
    """
    query = within_reach(query)
    alpha_t, number = tensor_or_number(alpha, query.shape[1])
    read = _read if is_watched(query) else _Read.apply
    parts = [
        read(query, alpha_t, log_mass, part, mask, number)
        for part in centroid.split(value_width, -1)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


@cache
def _launches() -> Any:
    """Imported when first needed, because it imports Triton."""
    from lln.kernels.summaries import launch_summary

    return launch_summary


@operator("summarise", _KEYS, results=2)
def _summarise(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _launches().summarise(*arguments)


@_summarise.register_fake
def _(key: Tensor, value: Tensor, beta: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    heads = key.shape[1] if beta is None else beta.shape[1]
    shape = (key.shape[0], heads, key.shape[3])
    log_mass = key.new_empty(shape, dtype=torch.float32)
    return log_mass, log_mass.new_empty(*shape, value.shape[3])


@operator(
    "summarise_backward",
    f"Tensor dlog_mass, Tensor dcentroid, {_SUMMARY}, {_KEYS}, bool beta_grad",
    results=3,
)
def _summarise_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    dk, dv, dbeta = _launches().summarise_backward(*arguments)
    # An operator must return tensors.
    return dk, dv, dk.new_empty(0) if dbeta is None else dbeta


@_summarise_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    key, value, beta, *_, beta_grad = arguments[4:]
    dbeta = beta.new_empty(beta.shape) if beta_grad else key.new_empty(0)
    return key.new_empty(key.shape), value.new_empty(value.shape), dbeta


def _save_summarise(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.number = inputs
    ctx.save_for_backward(*output, *tensors)


def _backward_of_summarise(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
    beta_grad = ctx.needs_input_grad[2]
    sides = (side.contiguous() for side in gradients)
    dk, dv, dbeta = _summarise_backward(*sides, *ctx.saved_tensors, ctx.number, beta_grad)
    return dk, dv, dbeta if beta_grad else None, None, None


_summarise.register_autograd(_backward_of_summarise, setup_context=_save_summarise)


class _Summarise(torch.autograd.Function):
    """`_summarise` with less overhead."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        found = _launches().summarise(*inputs)
        _save_summarise(ctx, inputs, found)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        sides = (side.contiguous() for side in grad_outputs)
        rest = (*ctx.saved_tensors, ctx.number, ctx.needs_input_grad[2])
        return *_launches().summarise_backward(*sides, *rest), None, None


@operator("read_summary", _QUERIES)
def _read(*arguments: Any) -> Tensor:
    return _launches().read(*arguments)


@_read.register_fake
def _(query: Tensor, _: Any, __: Tensor, centroid: Tensor, *___: Any) -> Tensor:
    return output_like(query, centroid.shape[3])


@operator("read_summary_backward", f"Tensor gradient, {_QUERIES}, bool alpha_grad", results=4)
def _read_backward(gradient: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = _launches().read_backward(within_reach(gradient), *arguments)
    dq, dalpha, dlog_mass, dcentroid = found
    return dq, dq.new_empty(0) if dalpha is None else dalpha, dlog_mass, dcentroid.contiguous()


@_read_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    alpha: Tensor | None,
    log_mass: Tensor,
    centroid: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dalpha = query.new_empty(0) if alpha is None or not rest[-1] else alpha.new_empty(alpha.shape)
    dlog_mass = log_mass.new_empty(log_mass.shape)
    return torch.empty_like(query), dalpha, dlog_mass, centroid.new_empty(centroid.shape)


def _save_read(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.number = inputs
    ctx.save_for_backward(*tensors)


def _backward_of_read(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    alpha_grad = ctx.needs_input_grad[1]
    found = _read_backward(gradient, *ctx.saved_tensors, ctx.number, alpha_grad)
    dq, dalpha, dlog_mass, dcentroid = found
    return dq, dalpha if alpha_grad else None, dlog_mass, dcentroid, None, None


_read.register_autograd(_backward_of_read, setup_context=_save_read)


class _Read(torch.autograd.Function):
    """`_read` with less overhead."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _save_read(ctx, inputs, inputs[0])
        return _launches().read(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        gradient = within_reach(grad_outputs[0])
        rest = (*ctx.saved_tensors, ctx.number, ctx.needs_input_grad[1])
        return *_launches().read_backward(gradient, *rest), None, None
