"""The fused kernels as PyTorch operators: schemas, fakes and gradients.

Registered through ``torch.library``, so that ``torch.compile``, CUDA graphs, activation
checkpointing and ``opcheck`` know them. `run` decides whether a call needs them. Triton
is imported when a kernel first runs, never here.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width,
E value width, SH summary heads (H if β differs within a group of query heads, else Hk), n packed
sequences.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lln.kernels.launching.operators import operator
from lln.kernels.launching.shapes import output_like, summary_heads, within_reach

if TYPE_CHECKING:
    from lln.kernels.summaries.lln_call import Gradients

# The arguments of every operator. Those of a call are the fields of `lln_call.Call`.
_INPUTS = "Tensor query, Tensor key, Tensor value"
_CALL_TENSORS = (
    f"{_INPUTS}, Tensor? alpha, Tensor? beta, Tensor? key_mask, Tensor? mix, Tensor? bounds"
)
_CALL_NUMBERS = (
    "float alpha_number, float beta_number, float mix_number, int block_size, float scale, "
    "float dropout_p, int seed, bool causal, int longest"
)
_SUMMARY = "Tensor log_mass, Tensor centroid"
_ASKED = "bool alpha_grad, bool beta_grad, bool mix_grad"
TENSORS, NUMBERS = _CALL_TENSORS.count(",") + 1, _CALL_NUMBERS.count(",") + 1


@cache
def _launches() -> tuple[Any, Any, Any]:
    """The launch modules (causal and bidirectional) and `LLNCall`; imported when first needed."""
    from lln.kernels.causal import launch_causal
    from lln.kernels.lln import launch_bidirectional
    from lln.kernels.summaries.lln_call import LLNCall

    return launch_causal, launch_bidirectional, LLNCall


def forward(
    arguments: tuple[Any, ...], save: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output, and with ``save`` the summary, for the arguments of `attend`.

    Args:
        arguments: Those of a call.
        save: Whether a backward pass follows.
        out: Where to write the output; None = a new tensor.
    """
    causal, other, kind = _launches()
    call = kind(*arguments)
    return (causal if call.causal else other).attend(call, save, out)


def gradients(
    gradient: Tensor,
    arguments: tuple[Any, ...],
    log_mass: Tensor | None,
    centroid: Tensor | None,
    asked: tuple[bool, bool, bool],
    dv: Tensor | None = None,
) -> Gradients:
    """Gradients of query, key, value, and of alpha, beta, mix where they are needed.

    ``dv`` is where to write the values' gradient, unless query heads that share values have to be
    summed first; None = a new tensor.
    """
    causal, other, kind = _launches()
    call = kind(*arguments)
    launch = causal if call.causal else other
    return launch.attend_backward(call, within_reach(gradient), log_mass, centroid, asked, dv)


@operator("attend", f"{_CALL_TENSORS}, {_CALL_NUMBERS}")
def attend(*arguments: Any) -> Tensor:
    """LLN attention (with the diagonal part if block_size > 0), saving nothing for a backward."""
    return forward(arguments, save=False)[0]


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return output_like(query, value.shape[-1])


@operator("attend_saving", f"{_CALL_TENSORS}, {_CALL_NUMBERS}", results=3)
def attend_saving(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same, with the summary: log-mass ``[B, SH, D]`` and centroid ``[B, SH, D, E]``.

    A causal call has no such summary: both are empty.
    """
    out, log_mass, centroid = forward(arguments, save=True)
    if log_mass is None or centroid is None:
        log_mass, centroid = _empty_summary(*arguments, samples=0)
    return out, log_mass, centroid


@attend_saving.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, _, value, *_, bounds = arguments[:TENSORS]
    samples = query.shape[0] if bounds is None else bounds.shape[0] - 1
    is_causal = arguments[-2]
    summary = _empty_summary(*arguments, samples=0 if is_causal else samples)
    return output_like(query, value.shape[-1]), *summary


def _empty_summary(
    query: Tensor, key: Tensor, value: Tensor, _: Any, beta: Tensor | None, *__: Any, samples: int
) -> tuple[Tensor, Tensor]:
    shape = (samples, summary_heads(query, key, beta), query.shape[-1])
    log_mass = query.new_empty(shape, dtype=torch.float32)
    return log_mass, value.new_empty((*shape, value.shape[-1]))


@operator(
    "attend_backward",
    f"Tensor gradient, {_CALL_TENSORS}, {_SUMMARY}, {_CALL_NUMBERS}, {_ASKED}",
    results=6,
)
def attend_backward(gradient: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, alpha, beta, mix; the last three empty unless needed."""
    tensors, summary, numbers = rest[:TENSORS], rest[TENSORS : TENSORS + 2], rest[TENSORS + 2 : -3]
    found = gradients(gradient, (*tensors, *numbers), summary[0], summary[1], rest[-3:])
    # An operator must return tensors, and no tensor twice.
    return tuple(_none(gradient) if side is None else side for side in found)


@attend_backward.register_fake
def _(gradient: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    query, key, value, alpha, beta, _, mix, _, log_mass, _ = rest[: TENSORS + 2]
    asked = zip((alpha, beta, mix), rest[-3:], strict=True)
    extra = [
        side.new_empty(side.shape) if wanted and side is not None else _none(query)
        for side, wanted in asked
    ]
    is_causal = rest[-5]
    slots = query.shape[1] if is_causal else log_mass.shape[1]
    shared = slots == key.shape[1]
    dk, dv = (torch.empty_like(t) if shared else t.new_empty(t.shape) for t in (key, value))
    return torch.empty_like(query), dk, dv, *extra


def _none(like: Tensor) -> Tensor:
    return like.new_empty((0,), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:TENSORS], *output[1:])
    ctx.numbers = inputs[TENSORS:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if gradient is None:
        return (None,) * (TENSORS + NUMBERS)
    asked = asked_gradients(ctx)
    found = attend_backward(gradient, *ctx.saved_tensors, *ctx.numbers, *asked)
    alpha, beta, mix = (
        side if wanted else None for side, wanted in zip(found[3:], asked, strict=True)
    )
    return *found[:3], alpha, beta, None, mix, None, *(None,) * NUMBERS


def asked_gradients(ctx: Any) -> tuple[bool, bool, bool]:
    """Whether the backward pass needs the gradients of alpha, beta and mix."""
    needs = ctx.needs_input_grad
    return needs[3], needs[4], needs[6]


attend_saving.register_autograd(_backward, setup_context=_save)
