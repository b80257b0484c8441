"""The fused kernels as PyTorch operators: schemas, fakes and gradients.

Registered through ``torch.library``, so that ``torch.compile``, CUDA graphs, activation
checkpointing and ``opcheck`` know them. Plain eager calls go to the same kernels through an
``autograd.Function`` instead: an operator with a Python gradient costs 0.2 ms before it starts,
more than the kernels take. Triton is imported when a kernel first runs, never here.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width,
E value width, SH summary heads (H if β differs within a group of query heads, else Hk), n packed
sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lln.eager.dropout import drop_keys
from lln.kernels.limits import widest_value
from lln.kernels.shapes import output_like, summary_heads, within_reach
from lln.tracing import is_capturing, is_watched

if TYPE_CHECKING:
    from lln.kernels.call import Gradients

# query, key, value, alpha, beta, key_mask, mix, bounds, then nine numbers: alpha, beta, mix,
# block_size, scale, dropout_p, seed, causal, longest.
_TENSORS, _NUMBERS = 8, 9
_NONE = (None,) * _NUMBERS


@cache
def _kernels() -> tuple[Any, Any, Any]:
    """Launches of causal and of other calls, and what they take; found once, when first needed."""
    from lln.kernels import launch, launch_causal
    from lln.kernels.call import Call

    return launch_causal, launch, Call


def _forward(arguments: tuple[Any, ...], save: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    launch_causal, launch, kind = _kernels()
    call = kind(*arguments)
    return (launch_causal if call.causal else launch).attend(call, save)


def _gradients(
    gradient: Tensor,
    arguments: tuple[Any, ...],
    log_mass: Tensor | None,
    centroid: Tensor | None,
    asked: tuple[bool, bool, bool],
) -> Gradients:
    launch_causal, launch, kind = _kernels()
    call = kind(*arguments)
    module = launch_causal if call.causal else launch
    return module.attend_backward(call, within_reach(gradient), log_mass, centroid, *asked)


@torch.library.custom_op("lln::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    key_mask: Tensor | None,
    mix: Tensor | None,
    bounds: Tensor | None,
    alpha_number: float,
    beta_number: float,
    mix_number: float,
    block_size: int,
    scale: float,
    dropout_p: float,
    seed: int,
    causal: bool,
    longest: int,
) -> Tensor:
    """LLN attention (with the diagonal part if block_size > 0), without what a backward needs."""
    tensors = (query, key, value, alpha, beta, key_mask, mix, bounds)
    numbers = (alpha_number, beta_number, mix_number, block_size, scale, dropout_p, seed)
    return _forward((*tensors, *numbers, causal, longest), save=False)[0]


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return output_like(query, value.shape[-1])


@torch.library.custom_op("lln::attend_saving", mutates_args=())
def attend_saving(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    key_mask: Tensor | None,
    mix: Tensor | None,
    bounds: Tensor | None,
    alpha_number: float,
    beta_number: float,
    mix_number: float,
    block_size: int,
    scale: float,
    dropout_p: float,
    seed: int,
    causal: bool,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, with the summary: log-mass ``[B, SH, D]`` and centroid ``[B, SH, D, E]``.

    A causal call has no such summary: both are empty.
    """
    tensors = (query, key, value, alpha, beta, key_mask, mix, bounds)
    numbers = (alpha_number, beta_number, mix_number, block_size, scale, dropout_p, seed)
    out, log_mass, centroid = _forward((*tensors, *numbers, causal, longest), save=True)
    if log_mass is None or centroid is None:
        nothing = (0, summary_heads(query, key, beta), query.shape[-1])
        log_mass = query.new_empty(nothing, dtype=torch.float32)
        centroid = value.new_empty((*nothing, value.shape[-1]))
    return out, log_mass, centroid


@attend_saving.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    key_mask: Tensor | None,
    mix: Tensor | None,
    bounds: Tensor | None,
    *numbers: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    samples = query.shape[0] if bounds is None else bounds.shape[0] - 1
    if numbers[-2]:
        samples = 0
    saved = (samples, summary_heads(query, key, beta), query.shape[-1])
    return (
        output_like(query, value.shape[-1]),
        query.new_empty(saved, dtype=torch.float32),
        value.new_empty((*saved, value.shape[-1])),
    )


@torch.library.custom_op("lln::attend_backward", mutates_args=())
def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    key_mask: Tensor | None,
    mix: Tensor | None,
    bounds: Tensor | None,
    log_mass: Tensor,
    centroid: Tensor,
    alpha_number: float,
    beta_number: float,
    mix_number: float,
    block_size: int,
    scale: float,
    dropout_p: float,
    seed: int,
    causal: bool,
    longest: int,
    alpha_grad: bool,
    beta_grad: bool,
    mix_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, alpha, beta, mix; the last three empty unless asked for."""
    tensors = (query, key, value, alpha, beta, key_mask, mix, bounds)
    numbers = (alpha_number, beta_number, mix_number, block_size, scale, dropout_p, seed)
    arguments = (*tensors, *numbers, causal, longest)
    asked = (alpha_grad, beta_grad, mix_grad)
    dq, dk, dv, *rest = _gradients(gradient, arguments, log_mass, centroid, asked)
    # An operator returns tensors, and no tensor twice.
    dalpha, dbeta, dmix = (
        query.new_empty((0,), dtype=torch.float32) if side is None else side for side in rest
    )
    return dq, dk, dv, dalpha, dbeta, dmix


@attend_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor | None,
    beta: Tensor | None,
    key_mask: Tensor | None,
    mix: Tensor | None,
    bounds: Tensor | None,
    log_mass: Tensor,
    centroid: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    empty = query.new_empty((0,), dtype=torch.float32)
    asked = zip((alpha, beta, mix), rest[-3:], strict=True)
    extra = [
        torch.empty_like(side) if wanted and side is not None else empty.clone()
        for side, wanted in asked
    ]
    is_causal = rest[-5]
    slots = query.shape[1] if is_causal else log_mass.shape[1]
    shared = slots == key.shape[1]
    dk, dv = (torch.empty_like(t) if shared else t.new_empty(t.shape) for t in (key, value))
    return torch.empty_like(query), dk, dv, extra[0], extra[1], extra[2]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output[1:])
    ctx.numbers = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if gradient is None:
        return (None,) * (_TENSORS + _NUMBERS)
    needs = ctx.needs_input_grad
    asked = needs[3], needs[4], needs[6]
    grads = attend_backward(gradient, *ctx.saved_tensors, *ctx.numbers, *asked)
    return _of_inputs(grads, asked)


def _of_inputs(grads: tuple[Tensor, ...], asked: tuple[bool, bool, bool]) -> tuple[Any, ...]:
    """Gradients in the order of the inputs, None where there is none."""
    alpha, beta, mix = (
        grad if wanted else None for grad, wanted in zip(grads[3:], asked, strict=True)
    )
    return (*grads[:3], alpha, beta, None, mix, None, *_NONE)


attend_saving.register_autograd(_backward, setup_context=_save)


def once_differentiable(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """Let the gradients refuse to be differentiated again; the kernels have no second derivative.

    PyTorch's own decorator refuses only where dO carries a gradient. Elsewhere the gradients would
    pass for constants, and a penalty on them would train nothing without a word.
    """

    @wraps(backward)
    def first(ctx: Any, *gradients: Tensor | None) -> Any:
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return found
        message = b"lln's fused kernels have no second derivative; use impl='eager'."
        refuse = torch._C._functions.DelayedError(message, len(found))  # pyright: ignore
        return refuse(*[None if side is None else side.detach().requires_grad_() for side in found])

    return first


class _Attend(torch.autograd.Function):
    """`attend_saving` without the price of an operator; the numbers come as one argument."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, numbers = inputs
        out, log_mass, centroid = _forward((*tensors, *numbers), save=True)
        ctx.save_for_backward(*tensors, log_mass, centroid)
        ctx.numbers = numbers
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        (gradient,) = grad_outputs
        if gradient is None:
            return (None,) * (_TENSORS + 1)
        needs = ctx.needs_input_grad
        asked = needs[3], needs[4], needs[6]
        *tensors, log_mass, centroid = ctx.saved_tensors
        arguments = (*tensors, *ctx.numbers)
        dq, dk, dv, dalpha, dbeta, dmix = _gradients(gradient, arguments, log_mass, centroid, asked)
        return dq, dk, dv, dalpha, dbeta, None, dmix, None, None


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: float | Tensor,
    beta: float | Tensor,
    key_mask: Tensor | None = None,
    mix: float | Tensor = 1.0,
    block_size: int = 0,
    scale: float = 1.0,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    bounds: Tensor | None = None,
    longest: int = 0,
) -> Tensor:
    """LLN attention by the kernels: ``[B, H, T, E]`` in the dtype of query.

    Args:
        query: ``[B, H, T, D]``; packed sequences come as one sample.
        key: ``[B, Hk, S, D]``.
        value: ``[B, Hk, S, E]``.
        alpha: A number or a tensor that broadcasts to ``[B, H, 1, 1]`` (packed: ``[n, H, 1, 1]``).
        beta: Likewise, or to ``[B, Hk, 1, 1]``.
        key_mask: bool ``[B, S]``.
        mix: A number or a tensor that broadcasts to ``[B, H, T, E]``.
        block_size: Of the diagonal part; 0 = none.
        scale: Of the diagonal part's scores.
        dropout_p: Probability to drop a key.
        is_causal: Whether row i sees keys 0 … i only.
        bounds: Integers ``[n + 1]`` that part the packed sequences.
        longest: No packed sequence is longer; 0 = not packed.
    """
    query, key, value = within_reach(query), within_reach(key), within_reach(value)
    if dropout_p > 0 and is_capturing():
        # A seed is a number: every replay of the graph would drop the same keys.
        value, dropout_p = drop_keys(value, dropout_p), 0.0
    alpha_t, alpha_number = _apart(alpha)
    beta_t, beta_number = _apart(beta)
    mix_t, mix_number = _apart(mix)
    if beta_t is not None and beta_t.shape[1] == 1:
        # One value for all heads: the query heads of a group can share a summary.
        beta_t = beta_t.expand(-1, key.shape[1], 1, 1)
    if alpha_t is not None and alpha_t.shape[1] == 1:
        alpha_t = alpha_t.expand(-1, query.shape[1], 1, 1)
    seed = int(torch.randint(0, 2**31 - 1, ()).item()) if dropout_p > 0 else 0
    numbers = (
        alpha_number,
        beta_number,
        mix_number,
        block_size,
        scale,
        dropout_p,
        seed,
        is_causal,
        longest,
    )
    mix_grad = mix_t is not None and mix_t.requires_grad
    samples = query.shape[0] if bounds is None else bounds.shape[0] - 1
    heads = samples * query.shape[1]
    most = widest_value(query, heads, block_size, is_causal, mix_grad)
    if value.shape[-1] <= most:
        return _call(query, key, value, alpha_t, beta_t, key_mask, mix_t, bounds, *numbers)
    # Every channel of the output is a sum over the same channel of the values: wide values are
    # read in slices, and autograd adds up what the slices say about the rest.
    outs = []
    for start in range(0, value.shape[-1], most):
        part = slice(start, start + most)
        mix_part = mix_t if mix_t is None or mix_t.shape[-1] == 1 else mix_t[..., part]
        tensors = (query, key, value[..., part], alpha_t, beta_t, key_mask, mix_part, bounds)
        outs.append(_call(*tensors, *numbers))
    return torch.cat(outs, -1)


def _call(*arguments: Any) -> Tensor:
    """One call with or without gradient, through the operator where somebody is watching."""
    tensors = arguments[:_TENSORS]
    tracked = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )
    if is_watched(arguments[0]):
        return attend_saving(*arguments)[0] if tracked else attend(*arguments)
    if not tracked:
        return _forward(arguments, save=False)[0]
    return _Attend.apply(*tensors, arguments[_TENSORS:])


def _apart(side: float | Tensor) -> tuple[Tensor | None, float]:
    """A tensor ``[·, ·, ·, ·]`` or None, and a number, of which the kernels take one."""
    if not isinstance(side, Tensor):
        return None, float(side)
    return side if side.dim() == 4 else side.reshape((1,) * (4 - side.dim()) + side.shape), 1.0
