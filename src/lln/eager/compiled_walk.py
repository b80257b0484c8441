"""Causal LLN attention on a CPU by compiled passes: the walk of `lln.eager.causal_walk` in C++.

Dimension legend: see `lln.eager.causal_walk`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln.eager import compiled_passes
from lln.eager.block_softmax import by_autograd
from lln.eager.causal_walk import Inputs
from lln.eager.products import per_head
from lln.tracing import is_batched


def walk_compiled(
    inputs: Inputs, guard: float, by_scan: Callable[[Inputs], Tensor]
) -> Tensor | None:
    """Causal attention ``[B, H, T, E]``; None where it is not compiled, or a row has lost digits.

    Args:
        inputs: Of the call; nobody traces it.
        guard: The smallest normaliser of a row that has its digits.
        by_scan: Computes the same with PyTorch's own gradients: second derivatives and batches of
            gradients go through it.
    """
    query, key, value, alpha, beta, key_mask = inputs
    numbers = [side for side in (alpha, beta) if isinstance(side, Tensor)]
    if key_mask is not None or any(side.requires_grad for side in numbers):
        return None
    if query.numel() * value.numel() == 0 or not compiled_passes.suits(query, key, value):
        return None
    alpha, beta = per_head(alpha, query), per_head(beta, query)
    with torch.no_grad():
        found = compiled_passes.forward_causal(query, key, value, alpha, beta, guard)
    if found is None:
        return None
    if not (torch.is_grad_enabled() and any(side.requires_grad for side in (query, key, value))):
        return found[0]

    def again(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return by_scan(Inputs(query, key, value, *inputs[3:]))

    return _CompiledWalk.apply(query, key, value, alpha, beta, found, again)


class _CompiledWalk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, key, value, alpha, beta, (out, norm, shift), again = given
        ctx.save_for_backward(query, key, value, out, norm, shift)
        ctx.numbers, ctx.again = (alpha, beta), again
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        query, key, value, *kept = ctx.saved_tensors
        sides, needs = (query, key, value), ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or is_batched(gradient):
            found = by_autograd(ctx.again, sides, needs, gradient)
        else:
            made = compiled_passes.backward_causal(gradient, *sides, *kept, *ctx.numbers)
            found = [one if need else None for one, need in zip(made, needs, strict=True)]
        return (*found, None, None, None, None)
