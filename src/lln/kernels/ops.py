"""The fused kernels as PyTorch operators: schemas, fakes and gradients.

Registered through ``torch.library``, so that ``torch.compile``, CUDA graphs, activation
checkpointing and ``opcheck`` know them. `lln.kernels.run` decides whether a call needs them. Triton
is imported when a kernel first runs, never here.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width,
E value width, SH summary heads (H if β differs within a group of query heads, else Hk), n packed
sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lln.kernels.limits import blocks_fit
from lln.kernels.shapes import output_like, summary_heads, within_reach
from lln.matching.curves import spread_curve

if TYPE_CHECKING:
    from lln.kernels.call import Gradients

# The arguments of every operator. Those of a call are the fields of `lln.kernels.call.Call`.
_INPUTS = "Tensor query, Tensor key, Tensor value"
_CALL_TENSORS = (
    f"{_INPUTS}, Tensor? alpha, Tensor? beta, Tensor? key_mask, Tensor? mix, Tensor? bounds"
)
_CALL_NUMBERS = (
    "float alpha_number, float beta_number, float mix_number, int block_size, float scale, "
    "float dropout_p, int seed, bool causal, int longest"
)
_SUMMARY = "Tensor log_mass, Tensor centroid"
_BLOCKS = f"{_INPUTS}, Tensor? key_mask, int block_size, float scale, bool causal"
_ASKED = "bool alpha_grad, bool beta_grad, bool mix_grad"
TENSORS, NUMBERS = _CALL_TENSORS.count(",") + 1, _CALL_NUMBERS.count(",") + 1
BLOCK_TENSORS, BLOCK_NUMBERS = 4, 3


def operator(name: str, arguments: str, results: int = 1) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as the operator ``lln::name`` that returns ``results`` tensors."""
    returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    return torch.library.custom_op(
        f"lln::{name}", mutates_args=(), schema=f"({arguments}) -> {returned}"
    )


@cache
def _launches() -> tuple[Any, Any, Any]:
    """The launch modules (causal and bidirectional) and `Call`; imported when first needed."""
    from lln.kernels import launch, launch_causal
    from lln.kernels.call import Call

    return launch_causal, launch, Call


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


@cache
def _block_launches() -> tuple[Any, Any, Any]:
    """The launch modules (of whole blocks in a tile, and tile by tile) and `BlockCall`."""
    from lln.kernels import launch_tiled
    from lln.kernels.triton import blocks

    return blocks, launch_tiled, blocks.BlockCall


def _launches_of(call: Any) -> Any:
    whole, tiled, _ = _block_launches()
    fits = blocks_fit(call.query, call.block_size, False, call.mask is not None)
    return whole if fits else tiled


def forward_blocks(*arguments: Any) -> Tensor:
    """Output for the arguments of `attend_blocks`."""
    call = _block_launches()[2](*arguments)
    return _launches_of(call).attend_blocks(call)


def gradients_of_blocks(gradient: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    call = _block_launches()[2](*arguments)
    return _launches_of(call).attend_blocks_backward(call, within_reach(gradient))


def add_blocks(tensors: Any, numbers: Any, out: Tensor, mix: float) -> None:
    """Make of ``out`` mix · out + (1 − mix) · blocks.

    Args:
        tensors: Query, key and value.
        numbers: Block size, scale, and whether it is causal.
        out: ``[B, H, T, E]``.
        mix: The weight of what is there.
    """
    _, tiled, kind = _block_launches()
    tiled.add_blocks(kind(*tensors, None, *numbers), out, mix)


def add_block_gradients(
    gradient: Tensor, tensors: Any, numbers: Any, made: tuple[Tensor, ...], mix: float
) -> None:
    """The same with ``made``, the gradients of query, key and value."""
    _, tiled, kind = _block_launches()
    tiled.add_gradients(kind(*tensors, None, *numbers), within_reach(gradient), made, mix)


@operator("attend_blocks", _BLOCKS)
def attend_blocks(*arguments: Any) -> Tensor:
    """Softmax attention inside blocks of tokens."""
    return forward_blocks(*arguments)


@attend_blocks.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return output_like(query, value.shape[-1])


@operator("attend_blocks_backward", f"Tensor gradient, {_BLOCKS}", results=3)
def attend_blocks_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    return gradients_of_blocks(*arguments)


@attend_blocks_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def save_blocks(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep the inputs; the backward recomputes the softmax rows."""
    ctx.save_for_backward(*inputs[:BLOCK_TENSORS])
    ctx.numbers = inputs[BLOCK_TENSORS:]


def _backward_blocks(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    found = attend_blocks_backward(gradient, *ctx.saved_tensors, *ctx.numbers)
    return *found, None, *(None,) * BLOCK_NUMBERS


attend_blocks.register_autograd(_backward_blocks, setup_context=save_blocks)


def statistics(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    bounds: Tensor | None,
    criterion: str,
    longest: int,
) -> Tensor:
    """α, β, σq², σk² and whether a spread is zero: ``[5, B or n, H, 1, 1]``."""
    from lln.kernels.triton import statistics_pass

    curve = curve_of(query.shape[-1], criterion)
    return statistics_pass.match(query, key, key_mask, bounds, curve, longest)


# Never traced: a compiled call goes through the operator.
curve_of = cache(spread_curve)


@operator(
    "match",
    "Tensor query, Tensor key, Tensor? key_mask, Tensor? bounds, str criterion, int longest",
)
def match(*arguments: Any) -> Tensor:
    """`statistics` as an operator."""
    return statistics(*arguments)


@match.register_fake
def _(
    query: Tensor, key: Tensor, key_mask: Tensor | None, bounds: Tensor | None, *_: object
) -> Tensor:
    samples = query.shape[0] if bounds is None else bounds.shape[0] - 1
    return query.new_empty((5, samples, query.shape[1], 1, 1), dtype=torch.float32)


def append_and_read(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-mass and centroid after one token, from the arguments of `decode`."""
    from lln.kernels.triton.decode import decode as launch

    return launch(*arguments)


@operator(
    "decode",
    f"{_INPUTS}, {_SUMMARY}, Tensor? alpha, Tensor? beta, float alpha_number, float beta_number",
    results=3,
)
def decode(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`append_and_read` as an operator."""
    return append_and_read(*arguments)


@decode.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, log_mass: Tensor, centroid: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    out = query.new_empty(*query.shape[:3], value.shape[3])
    return out, torch.empty_like(log_mass), torch.empty_like(centroid)
