"""Launches as operations of PyTorch: schemas, fakes and gradients, made in one way.

Ordinary calls use an ``autograd.Function``: an operator with a Python gradient costs 0.2 ms before
it starts, more than the kernels take. Under a compiler, a transform or a dispatch mode, calls go
through operators, registered with ``torch.library``, so that ``torch.compile``, CUDA graphs,
activation checkpointing and ``opcheck`` know them. The kernels have gradients, but no second
derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.tracing import is_watched


class Operation(NamedTuple):
    """What computes an operation and its gradients.

    Attributes:
        tensors: How many of the inputs are tensors (or None); they come first.
        launch: Its results for its inputs: a tensor, or a tuple of them.
        differentiate: Gradients, or None, of the inputs in ``of``. It gets the gradients of the
            outputs, all inputs, the results that were kept, and whether each of those in
            ``on_demand`` is wanted.
        of: Places of the inputs that have gradients.
        on_demand: Places of those that are computed only where somebody needs them.
        outputs: How many results have gradients; they come first, and callers get no others.
        kept: Which results `differentiate` reads.
        alike: From inputs and kept results to the places of the inputs whose gradients lie in
            memory as they do; other gradients are contiguous.
    """

    tensors: int
    launch: Callable[..., Any]
    differentiate: Callable[..., Sequence[Tensor | None]]
    of: tuple[int, ...]
    on_demand: tuple[int, ...] = ()
    outputs: int = 1
    kept: slice = slice(0)
    alike: Callable[[Sequence[Any], Sequence[Any]], tuple[int, ...]] = lambda *_: ()


def once_differentiable(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """Refuse to differentiate the gradients again: the kernels have no second derivative.

    PyTorch's own decorator refuses only if dO needs a gradient. Otherwise the gradients would be
    treated as constants, and a penalty on them would silently train nothing.
    """

    @wraps(backward)
    def first(ctx: Any, *gradients: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        with torch.no_grad():
            found = backward(ctx, *gradients)
        message = b"lln's fused kernels have no second derivative; use impl='eager'."
        refuse = torch._C._functions.DelayedError(message, len(found))  # pyright: ignore
        return refuse(*[None if side is None else side.detach().requires_grad_() for side in found])

    return first


def operator(
    name: str, inputs: str, launch: Callable[..., Any], fake: Callable[..., Any], results: int = 1
) -> Any:
    """Register a function as the operator ``lln::name``, which returns so many tensors.

    ``inputs`` are its arguments as a schema has them, ``launch`` computes it, and ``fake`` makes
    results of the same shapes, types and strides, without values.
    """
    returned = "Tensor" if results == 1 else f"({_listed('Tensor', results)})"
    schema = f"({inputs}) -> {returned}"
    made = torch.library.custom_op(f"lln::{name}", launch, mutates_args=(), schema=schema)
    made.register_fake(fake)
    return made


def with_gradients(
    name: str,
    inputs: str,
    operation: Operation,
    fake: Callable[..., Any],
    results: int = 1,
    backward_name: str | None = None,
) -> Any:
    """Register an operation as ``lln::name``, and its gradients as another operator.

    The second, ``name_backward`` if it has no name of its own, takes the gradients of the outputs,
    all inputs, the results that were kept, and whether each gradient on demand is wanted. For the
    other arguments see `operator`.
    """
    _, _, compute, of, on_demand, outputs, kept, alike = operation
    count, tensors = inputs.count(",") + 1, operation.tensors
    keeps = len(range(results)[kept])
    before, behind = outputs + count, outputs + count + keeps

    def parts_of(arguments: Sequence[Any]) -> tuple[Sequence[Any], ...]:
        given, saved = arguments[outputs:before], arguments[before:behind]
        return arguments[:outputs], given, saved, arguments[behind:]

    def launch_backward(*arguments: Any) -> Any:
        gradients, given, saved, asked = parts_of(arguments)
        places, found = alike(given, saved), compute(gradients, given, saved, asked)
        # An operator must return tensors, and no tensor twice.
        return tuple(
            _none(given) if side is None else side if place in places else side.contiguous()
            for place, side in zip(of, found, strict=True)
        )

    def fake_backward(*arguments: Any) -> Any:
        _, given, saved, asked = parts_of(arguments)
        unwanted = {place for place, wanted in zip(on_demand, asked, strict=True) if not wanted}
        places = alike(given, saved)
        found = []
        for place in of:
            side = given[place]
            if side is None or place in unwanted:
                found.append(_none(given))
            else:
                like = torch.empty_like(side) if place in places else side.new_empty(side.shape)
                found.append(like)
        return tuple(found)

    schema = [_listed("Tensor gradient", outputs, numbered=True), inputs]
    schema += [_listed("Tensor kept", keeps, numbered=True)] if keeps else []
    schema += [_listed("bool asked", len(on_demand), numbered=True)] if on_demand else []
    backward = operator(
        backward_name or f"{name}_backward", ", ".join(schema), launch_backward, fake_backward,
        results=len(of),
    )  # fmt: skip

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        made = output if results > 1 else (output,)
        ctx.save_for_backward(*inputs[:tensors], *made[kept])
        ctx.numbers = inputs[tensors:]
        ctx.mark_non_differentiable(*made[outputs:])

    def differentiate(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        given, saved = ctx.saved_tensors[:tensors], ctx.saved_tensors[tensors:]
        asked = [ctx.needs_input_grad[place] for place in on_demand]
        found = backward(*gradients[:outputs], *given, *ctx.numbers, *saved, *asked)
        there: list[Any] = [None] * count
        for place, side in zip(of, found, strict=True):
            if given[place] is not None and ctx.needs_input_grad[place]:
                there[place] = side
        return tuple(there)

    made = operator(name, inputs, operation.launch, fake, results)
    made.register_autograd(differentiate, setup_context=save)
    return made


def call(operation: Operation, registered: Any, *inputs: Any) -> Any:
    """The outputs, through the operator where the call is traced."""
    if not is_watched(inputs[0]):
        return launched(operation, *inputs)
    found = registered(*inputs)
    if isinstance(found, Tensor):
        return found
    return found[0] if operation.outputs == 1 else found[: operation.outputs]


def launched(operation: Operation, *inputs: Any) -> Any:
    """The outputs, with gradients and without an operator."""
    tensors, numbers = inputs[: operation.tensors], inputs[operation.tensors :]
    return _Launched.apply(operation, numbers, *tensors)


class _Launched(torch.autograd.Function):
    """An operation without an operator's overhead; the numbers come as one argument."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        operation, numbers, *tensors = inputs
        found = operation.launch(*tensors, *numbers)
        results = (found,) if isinstance(found, Tensor) else found
        ctx.save_for_backward(*tensors, *results[operation.kept])
        ctx.operation, ctx.numbers = operation, numbers
        ctx.set_materialize_grads(operation.outputs > 1)
        return results[0] if operation.outputs == 1 else results[: operation.outputs]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        operation, needs = ctx.operation, ctx.needs_input_grad[2:]
        there: list[Any] = [None] * (operation.tensors + 2)
        if grad_outputs[0] is None:
            return tuple(there)
        saved = ctx.saved_tensors
        given = (*saved[: operation.tensors], *ctx.numbers)
        asked = [needs[place] for place in operation.on_demand]
        kept = saved[operation.tensors :]
        found = operation.differentiate(grad_outputs, given, kept, asked)
        for place, side in zip(operation.of, found, strict=True):
            there[place + 2] = side
        return tuple(there)


def _listed(what: str, count: int, *, numbered: bool = False) -> str:
    return ", ".join(f"{what}{place}" if numbered else what for place in range(count))


def _none(inputs: Sequence[Any]) -> Tensor:
    """In place of a gradient that is not there."""
    return inputs[0].new_empty((0,), dtype=torch.float32)
