"""What autograd nodes of ours share: how numbers are saved, and gradients by PyTorch's own.

α and β of a node are numbers, or tensors that are saved with the others: a tensor that is kept
anywhere else may be changed in place before the backward pass, and nobody is told that the
gradients are then wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def save(ctx: Any, numbers: Sequence[Any], *tensors: Tensor) -> None:
    """Save them for the backward pass: numbers, tensors or other things, and more tensors."""
    ctx.save_for_backward(*(one if isinstance(one, Tensor) else None for one in numbers), *tensors)
    ctx.numbers = [None if isinstance(one, Tensor) else one for one in numbers]


def saved(ctx: Any) -> list[Any]:
    """The numbers, then the tensors; an error if one of them has been changed since."""
    tensors, count = ctx.saved_tensors, len(ctx.numbers)
    pairs = zip(tensors[:count], ctx.numbers, strict=True)
    return [*(other if tensor is None else tensor for tensor, other in pairs), *tensors[count:]]


def by_autograd(
    attend: Callable[..., Tensor],
    sides: Sequence[Tensor],
    needs: Sequence[bool],
    gradient: Tensor,
) -> list[Tensor | None]:
    """Gradients of ``attend(*sides)``, for the sides that need one; differentiable if asked for."""
    wanted = [side for side, need in zip(sides, needs, strict=True) if need]
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        again = attend(*sides)
    made = iter(torch.autograd.grad(again, wanted, gradient, create_graph=further))
    return [next(made) if need else None for need in needs]
