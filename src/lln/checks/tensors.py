"""Checks that hold for every tensor argument: it is dense and has the right axes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lln.errors import BackendUnavailableError, InvalidInputError

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def shape_of(tensor: Tensor) -> str:
    """The tensor's shape, as error messages print it."""
    return "[" + ", ".join(str(size) for size in tensor.shape) + "]"


def check_recorder() -> None:
    """Refuse to be recorded by ``torch.jit.trace``: values and lengths decide how a call runs."""
    if torch._C._get_tracing_state() is not None:
        raise BackendUnavailableError(
            "torch.jit.trace and torch.onnx.export with dynamo=False record one run, which may be "
            "wrong for other inputs; use torch.export.export, or torch.onnx.export with "
            "dynamo=True."
        )


def check_tensor(name: str, given: object, what: str = "a torch.Tensor") -> None:
    """Refuse anything that is not a tensor, or is not stored as a dense array.

    ``what`` says in words what the argument must be.
    """
    if not isinstance(given, Tensor):
        raise InvalidInputError(f"{name} must be {what}, got {type(given).__name__}.")
    if given.is_nested:
        # Comes first, because nested tensors have no plain shape.
        raise InvalidInputError(
            f"{name} is a nested tensor, which is not supported; give "
            f"torch.nested.to_padded_tensor({name}, 0) and mask the padding."
        )
    if given.layout is not torch.strided:
        raise InvalidInputError(
            f"{name} is a sparse tensor ({given.layout}), which is not supported; give "
            f"{name}.to_dense()."
        )


def wrong_dtype(name: str, dtype: object, fix: str = "") -> InvalidInputError:
    """What to raise for a dtype that attention does not compute in."""
    return InvalidInputError(
        f"{name} must be float64, float32, bfloat16 or float16, got {dtype}{fix}."
    )


def wrong_device(
    name: str, given: Tensor, device: torch.device, owner: str = "query"
) -> InvalidInputError:
    """What to raise for a tensor on another device than its owner's."""
    return InvalidInputError(
        f"{name} must be on the device of {owner}, got {given.device} and {device}."
    )


def missing_axes(name: str, given: Tensor, leads: Iterable[tuple[tuple[int, ...], int]]) -> str:
    """What to add after a shape that only lacks axes of size 1 at its end; else empty.

    Args:
        name: The argument's name.
        given: The tensor.
        leads: Expected shapes without their last axes, and how many axes those are.

    Example:
        >>> missing_axes("alpha", torch.ones(4), [((4,), 2), ((2, 4), 2)])
        '; give alpha.view(4, 1, 1)'
    """
    stem = list(given.shape)
    while stem and stem[-1] == 1:
        stem.pop()
    for lead, ones in leads:
        if tuple(stem) == lead:
            return f"; give {name}.view({', '.join(map(str, (*lead, *(1,) * ones)))})"
    return ""
