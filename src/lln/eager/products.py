"""Products of many small matrices, with the right operand laid out as the CPU's library needs it.

Without MKL a batch of small matrices is multiplied thirty times slower when the right operand is a
transposed view (seen with oneDNN on ARM). Scores q·kᵀ have that form, and so has half of every
product's backward; with OpenBLAS it depends on the process, and the same product takes 1 ms in one
and 7 ms in the next. There the operand is copied first, which costs next to nothing; MKL takes it
as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.tracing import is_compiling, is_transformed

_TAKES_TRANSPOSED = torch.backends.mkl.is_available()


def row_by_row(right: Tensor) -> Tensor:
    """The right operand of a product on a CPU, copied if it has to be."""
    return right if _TAKES_TRANSPOSED else right.contiguous()


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` for batches of equal shape; differentiable any number of times."""
    if _TAKES_TRANSPOSED or left.device.type != "cpu" or is_compiling() or is_transformed():
        return left @ right
    if not (torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)):
        return left @ row_by_row(right)
    return _Product.apply(left, right)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.save_for_forward(left, right)
        return left @ row_by_row(right)

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
            _times_transposed(gradient, right) if to_left else None,
            multiply(left.mT, gradient) if to_right else None,
        )


def _times_transposed(left: Tensor, right: Tensor) -> Tensor:
    """``left @ rightᵀ``, so that the smaller of the two is copied."""
    if left.numel() < right.numel():
        return multiply(right, left.mT).mT
    return multiply(left, right.mT)
