"""Causal LLN attention on a CPU by compiled passes: the walk of `lln.eager.causal_walk` in C++.

Dimension legend: see `lln.eager.causal_walk`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln.cpu import compiled_passes
from lln.cpu.compiled_passes import PassCall
from lln.eager.causal_walk import Inputs
from lln.eager.products import per_head
from lln.eager.run import repeat_heads
from lln.eager.saved_numbers import by_autograd, save, saved
from lln.tracing import is_batched


def walk_compiled(inputs: Inputs, guard: float, by_torch: Callable[[Inputs], Tensor]) -> Tensor:
    """Causal attention ``[B, H, T, E]``; heads with rows that have lost digits by PyTorch.

    What one sample holds changes nothing in another, not even its rounding.

    Args:
        inputs: Of a call that `compiled_passes` know; key and value may have fewer heads.
        guard: The smallest normaliser of a row that has its digits.
        by_torch: Computes the same with PyTorch, differentiable any number of times.
    """
    query, key, value, alpha, beta, key_mask = inputs
    with torch.no_grad():
        numbers = per_head(alpha, query), per_head(beta, query)
        call = PassCall(query, key, value, *numbers, key_mask=key_mask)
        *found, least = compiled_passes.forward_causal(call)
    # NaN, too, goes the other way, which knows what each row may see of it.
    if not all(number >= guard for number in least.tolist()):
        return _join(inputs, least >= guard, guard, by_torch)
    if not (torch.is_grad_enabled() and any(side.requires_grad for side in (query, key, value))):
        return found[0]

    def again(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return by_torch(Inputs(query, key, value, *inputs[3:]))

    return _CompiledWalk.apply(query, key, value, alpha, beta, key_mask, found, again)


def _join(
    inputs: Inputs, is_held: Tensor, guard: float, by_torch: Callable[[Inputs], Tensor]
) -> Tensor:
    """Heads that are held by the compiled walk, and the others by PyTorch, sample by sample."""
    places, parts = [is_held.nonzero().squeeze(-1)], []
    batch, heads = inputs.query.shape[:2]
    key, value = repeat_heads(inputs.key, heads), repeat_heads(inputs.value, heads)
    inputs = inputs._replace(key=key, value=value)
    if places[0].numel():
        parts.append(walk_compiled(inputs.of_heads(places[0]), guard, by_torch))
    for sample, lost in enumerate(~is_held.view(batch, heads)):
        if lost.any():
            places.append(lost.nonzero().squeeze(-1) + sample * heads)
            parts.append(by_torch(inputs.of_heads(places[-1]).showing_infinity()))
    order = torch.cat(places).argsort()
    return torch.cat(parts)[order].view(batch, heads, *parts[0].shape[2:])


class _CompiledWalk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, key, value, alpha, beta, key_mask, (out, norm, shift), again = given
        save(ctx, (alpha, beta, key_mask), query, key, value, out, norm, shift)
        ctx.again = again
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        alpha, beta, key_mask, query, key, value, *kept = saved(ctx)
        sides, needs = (query, key, value), ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or is_batched(gradient):
            found = by_autograd(ctx.again, sides, needs, gradient)
        else:
            numbers = per_head(alpha, query), per_head(beta, query)
            call = PassCall(*sides, *numbers, key_mask=key_mask)
            made = compiled_passes.backward_causal(call, gradient, *kept)
            found = [one if need else None for one, need in zip(made, needs, strict=True)]
        return (*found, *(None for _ in ctx.needs_input_grad[3:]))
