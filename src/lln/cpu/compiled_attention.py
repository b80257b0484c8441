"""Attention by the compiled passes as a step of autograd.

The passes compute outputs and first gradients. Second derivatives and batches of gradients go
through ``by_torch``, which computes the same with PyTorch's own gradients.

Causal LLN attention is the walk of `lln.eager.causal_walk` in C++.

Dimension legend: see `lln.cpu.compiled_passes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lln.cpu import compiled_passes
from lln.cpu.compiled_passes import Blocks, Exact, PassCall
from lln.eager.causal_walk import Inputs
from lln.eager.products import per_head
from lln.eager.run import repeat_heads
from lln.eager.saved_numbers import by_autograd, save, saved
from lln.tracing import is_batched

# Takes query, key, value, α, β, the offset of exact keys and the keys.
ByTorch = Callable[..., Tensor]


def attend_compiled(
    sides: tuple[Tensor, Tensor, Tensor],
    numbers: tuple[Any, Any, Any],
    key_mask: Tensor | None,
    blocks: Blocks | None,
    by_torch: ByTorch,
    curves: Sequence[bytes] = (),
    exact: Exact | None = None,
) -> Tensor:
    """LLN attention, softmax attention inside blocks, both, or exact keys: ``[B, H, T, E]``.

    Args:
        sides: Query, key and value in float32.
        numbers: α, β and the offset: numbers, one entry, or ``[1 or B, 1 or H, 1, 1]``; gradients
            with exact keys only, which alone read the offset. With ``curves`` the pass itself finds
            the others; blocks alone do not read them.
        key_mask: bool ``[B, S]``, True = attend.
        blocks: The short range, whose tokens are the queries; None = LLN alone. Blocks alone take
            no infinity in queries and keys.
        by_torch: Computes the same.
        curves: As those of `compiled_passes.match`.
        exact: Keys beside those of the blocks; its offset is that of ``numbers``.
    """
    if curves:
        alpha = sides[0].new_empty((*sides[0].shape[:2], 1, 1))
        numbers = alpha, torch.empty_like(alpha), 0.0
    inputs = (*sides, *numbers)
    if torch.is_grad_enabled() and any(getattr(one, "requires_grad", False) for one in inputs):
        return _CompiledAttention.apply(*inputs, key_mask, blocks, exact, curves, by_torch)
    call = _call(inputs, key_mask, blocks, exact)
    if exact is not None:
        return compiled_passes.forward_keys(call)[0]
    return compiled_passes.forward(call, curves=curves)[0]


def _call(
    inputs: Sequence[Any], key_mask: Tensor | None, blocks: Blocks | None, exact: Exact | None
) -> PassCall:
    """What the passes compute, of query, key, value, α, β and the offset."""
    query, key, value, *numbers = inputs
    alpha, beta, offset = (per_head(number, query) for number in numbers)
    exact = None if exact is None else exact._replace(offset=offset)
    return PassCall(query, key, value, alpha, beta, blocks, key_mask, exact)


class _CompiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *inputs, key_mask, blocks, exact, curves, ctx.by_torch = given
        ctx.parts, call = (blocks, exact), _call(inputs, key_mask, blocks, exact)
        if exact is None:
            out, made = compiled_passes.forward(call, True, curves)
        else:
            out, made = compiled_passes.forward_keys(call, True)
        save(ctx, (*inputs[3:], key_mask, *(made or [None])), *inputs[:3])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        alpha, beta, offset, key_mask, kept, *sides = saved(ctx)
        inputs, needs = (*sides, alpha, beta, offset), ctx.needs_input_grad[:6]
        found: Sequence[Tensor | None]
        if torch.is_grad_enabled() or is_batched(gradient):
            found = by_autograd(lambda *given: ctx.by_torch(*given, kept), inputs, needs, gradient)
        else:
            call = _call(inputs, key_mask, *ctx.parts)
            run = compiled_passes.backward if call.exact is None else compiled_passes.backward_keys
            every = run(call, gradient, kept)
            triples = zip(every, inputs, needs, strict=False)
            found = [one.sum_to_size(own.shape) if need else None for one, own, need in triples]
        return (*found, *(None for _ in ctx.needs_input_grad[len(found) :]))


def walk_compiled(inputs: Inputs, guard: float, by_torch: Callable[[Inputs], Tensor]) -> Tensor:
    """Causal attention ``[B, H, T, E]``; heads with rows that have lost digits by PyTorch.

    What one sample holds changes nothing in another, not even its rounding. Key and value may have
    fewer heads. The guard is the smallest normaliser of a row that has its digits; ``by_torch``
    computes the same with PyTorch, differentiable any number of times.
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
