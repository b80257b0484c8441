"""Products of many small matrices, with the right operand always laid out row by row.

Some CPU libraries multiply a batch of small matrices thirty times slower when the right operand is
a transposed view (seen with oneDNN on ARM). Scores q·kᵀ have that form, and so has half of every
product's backward. Copying the operand first costs next to nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.tracing import is_compiling, is_transformed


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` for batches of equal shape; differentiable any number of times."""
    if left.device.type != "cpu" or is_compiling() or is_transformed():
        return left @ right
    return _Product.apply(left, right)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.save_for_forward(left, right)
        return left @ right.contiguous()

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        left, right = ctx.saved_tensors
        along_left, along_right = tangents
        out = torch.zeros_like(left @ right)
        if along_left is not None:
            out = out + along_left @ right
        if along_right is not None:
            out = out + left @ along_right
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (gradient,) = gradients
        left, right = ctx.saved_tensors
        to_left, to_right = ctx.needs_input_grad
        return (
            multiply(gradient, right.mT) if to_left else None,
            multiply(left.mT, gradient) if to_right else None,
        )
