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


def flat(side: Tensor) -> Tensor:
    """``[..., T, D]`` → ``[n, T, D]``, one row after the other in memory."""
    return side.contiguous().flatten(0, -3)


def per_head(number: float | Tensor, query: Tensor) -> float | Tensor:
    """A number as it is; one or ``[1 or B, 1 or H, 1, 1]`` entries for `flat` heads: ``[n, 1, 1]``.

    Args:
        number: α or β.
        query: ``[B, H, T, D]``, whose dtype the result has.
    """
    if not isinstance(number, Tensor):
        return number
    # What changes nothing is not asked for: on short sequences each question is felt.
    if number.dtype != query.dtype:
        number = number.to(query.dtype)
    if number.numel() == 1:
        return number.reshape(1, 1, 1)
    if number.shape[:2] != query.shape[:2]:
        number = number.expand(*query.shape[:2], 1, 1)
    return number.reshape(-1, 1, 1)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``total += left @ right`` without a gradient, ``[n, ·, ·]`` each; returns the total."""
    if _TAKES_TRANSPOSED:
        return total.baddbmm_(left, right)
    total += torch.bmm(left, row_by_row(right))
    return total


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
