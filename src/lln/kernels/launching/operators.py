"""The kernels have gradients, but no second derivative."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


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


def operator(name: str, arguments: str, results: int = 1) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as the operator ``lln::name`` that returns ``results`` tensors."""
    returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    return torch.library.custom_op(
        f"lln::{name}", mutates_args=(), schema=f"({arguments}) -> {returned}"
    )
