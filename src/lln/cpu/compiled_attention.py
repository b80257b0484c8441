"""Attention by the compiled passes as a step of autograd.

The passes compute outputs and first gradients. Second derivatives and batches of gradients go
through ``by_torch``, which computes the same with PyTorch's own gradients.

Dimension legend: see `lln.cpu.compiled_passes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lln.cpu import compiled_passes
from lln.cpu.compiled_passes import Blocks, PassCall
from lln.eager.products import per_head
from lln.eager.saved_numbers import by_autograd, save, saved
from lln.tracing import is_batched

# Takes query, key, value, α and β.
ByTorch = Callable[[Tensor, Tensor, Tensor, Any, Any], Tensor]


def attend_compiled(
    sides: tuple[Tensor, Tensor, Tensor],
    numbers: tuple[Any, Any],
    key_mask: Tensor | None,
    blocks: Blocks | None,
    by_torch: ByTorch,
    curves: Sequence[bytes] = (),
) -> Tensor:
    """LLN attention, softmax attention inside blocks, or both: ``[B, H, T, E]``.

    Args:
        sides: ``[B, H, T, D]``, ``[B, Hk, S, D]`` and ``[B, Hk, S, E]`` in float32.
        numbers: α and β: numbers, one entry, or ``[1 or B, 1 or H, 1, 1]``; without a gradient.
            With ``curves`` the pass itself finds them; blocks alone do not read them.
        key_mask: bool ``[B, S]``, True = attend.
        blocks: The short range, whose tokens are the queries; None = LLN alone. Blocks alone take
            no infinity in queries and keys.
        by_torch: Computes the same.
        curves: One `compiled_passes.packed_curve`, with a mask one for every sample; if T = S, the
            mask says which queries are measured, too.
    """
    if curves:
        alpha = sides[0].new_empty((*sides[0].shape[:2], 1, 1))
        numbers = alpha, torch.empty_like(alpha)
    if torch.is_grad_enabled() and any(side.requires_grad for side in sides):
        return _CompiledAttention.apply(*sides, *numbers, key_mask, blocks, curves, by_torch)
    numbers = per_head(numbers[0], sides[0]), per_head(numbers[1], sides[0])
    call = PassCall(*sides, *numbers, blocks, key_mask)
    return compiled_passes.forward(call, curves=curves)[0]


class _CompiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, key, value, alpha, beta, key_mask, ctx.blocks, curves, ctx.by_torch = given
        numbers = per_head(alpha, query), per_head(beta, query)
        call = PassCall(query, key, value, *numbers, ctx.blocks, key_mask)
        out, made = compiled_passes.forward(call, True, curves)
        save(ctx, (alpha, beta, key_mask, *(made or [None])), query, key, value)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        alpha, beta, key_mask, summary, *sides = saved(ctx)
        needs = ctx.needs_input_grad[:3]
        found: Sequence[Tensor | None]
        if torch.is_grad_enabled() or is_batched(gradient):

            def again(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                return ctx.by_torch(query, key, value, alpha, beta)

            found = by_autograd(again, sides, needs, gradient)
        else:
            query, key, value = sides
            numbers = per_head(alpha, query), per_head(beta, query)
            call = PassCall(query, key, value, *numbers, ctx.blocks, key_mask)
            every = compiled_passes.backward(call, gradient, summary)
            found = [one if need else None for one, need in zip(every, needs, strict=True)]
        return (*found, *(None for _ in ctx.needs_input_grad[3:]))
