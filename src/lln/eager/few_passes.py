"""LLN attention on a CPU, alone or with blocks of softmax, in few passes over memory.

With one head, e the weights of keys and m their sums per slot (`lln.eager.summary` has the rest),

    e = exp(βk − max)      m = Σ_j e_j      C = eᵀv / m      L = max + log m
    w = softmax(αq + L)    out = w C

and with g the gradient of the output

    dw = g Cᵀ      dC = wᵀ g      dz = w ∘ (dw − rowsum(w ∘ dw))      dq = α dz
    dv = e (dC / m)               dk = β e ∘ (v (dC / m)ᵀ + (Σ_i dz_i − rowsum(C ∘ dC)) / m)

Step by step autograd takes a pass and a new tensor for each operation, and adds up the gradients of
LLN and of the blocks in passes of their own. Here the products of the blocks add to what is there.
`lln.cpu.compiled_passes` does all of this in C++, for ``impl="cpu"``.

Dimension legend: n heads of all samples, T queries, S keys, D head width, E value width, b block
size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lln.cpu import compiled_passes
from lln.cpu.compiled_passes import Blocks
from lln.eager.block_softmax import by_autograd
from lln.eager.products import flat, per_head, row_by_row, scaled_product
from lln.eager.saved_numbers import save, saved
from lln.tracing import is_batched, is_untraced_on_cpu

_softmax_backward = torch.ops.aten._softmax_backward_data.default

# Without MKL blocks are quicker by themselves (`lln.eager.block_flash`).
WITH_BLOCKS = torch.backends.mkl.is_available()


def suits(
    query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, beta: float | Tensor
) -> bool:
    """Whether `attend` knows a call that is not causal and has no mask, in plain PyTorch."""
    sides = (query, key, value, alpha, beta)
    if not (is_untraced_on_cpu(*sides) and query.shape[1] == key.shape[1]):
        return False
    if not all(side.numel() for side in (query, key, value)):
        return False
    numbers = [side for side in (alpha, beta) if isinstance(side, Tensor)]
    return all(side.numel() == 1 or side.dim() == 4 for side in numbers) and not any(
        side.requires_grad or side.numel() > query.shape[0] * query.shape[1] for side in numbers
    )


def takes_blocks(query: Tensor, block_size: int, key_mask: Tensor | None) -> bool:
    """Whether blocks are quicker here than by themselves, without compiled passes."""
    return WITH_BLOCKS and key_mask is None and query.shape[2] % block_size == 0


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    blocks: Blocks | None,
    by_steps: Callable[..., Tensor],
    key_mask: Tensor | None = None,
    is_compiled: bool = False,
) -> Tensor:
    """LLN attention, alone or mixed with blocks: ``[B, H, T, E]``.

    Args:
        query: ``[B, H, T, D]`` in the accumulation dtype.
        key: ``[B, H, S, D]``.
        value: ``[B, H, S, E]``.
        alpha: A number, one entry, or ``[1 or B, 1 or H, 1, 1]``; without a gradient.
        beta: Likewise.
        blocks: The short range, whose tokens are the queries; None = LLN alone.
        by_steps: Computes the same from query, key and value, with PyTorch's own gradients: second
            derivatives and batches of gradients go through it.
        key_mask: bool ``[B, S]``, True = attend, with a key in every sample, for compiled passes.
        is_compiled: Whether compiled passes compute it.
    """
    passes: Passes = (_forward, _backward)
    if is_compiled:
        passes = (compiled_passes.forward, compiled_passes.backward)
    call = (query, key, value, alpha, beta, blocks)
    return _pass(passes, by_steps, call if key_mask is None else (*call, key_mask))


def attend_matched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    curve: bytes,
    blocks: Blocks | None,
    by_steps: Callable[..., Tensor],
) -> Tensor:
    """`attend` with temperatures by moment matching, for calls that `compiled_passes` know.

    Args:
        query: ``[B, H, T, D]`` in float32.
        key: ``[B, H, S, D]``.
        value: ``[B, H, S, E]``.
        curve: `compiled_passes.packed_curve` of this head width and number of keys.
        blocks: As in `attend`.
        by_steps: Likewise; it matches, too.
    """
    alpha = query.new_empty((*query.shape[:2], 1, 1))
    beta = torch.empty_like(alpha)
    passes = (partial(compiled_passes.forward, curves=(curve,)), compiled_passes.backward)
    return _pass(passes, by_steps, (query, key, value, alpha, beta, blocks))


# Forward and backward; each pair understands what its own forward pass has kept.
Passes = tuple[Callable[..., Any], Callable[..., Any]]


def _pass(passes: Passes, by_steps: Callable[..., Tensor], call: tuple[Any, ...]) -> Tensor:
    """The output; ``call`` begins with query, key and value."""
    if torch.is_grad_enabled() and any(side.requires_grad for side in call[:3]):
        return _FewPasses.apply(*call, by_steps, passes)
    query, key, value, alpha, beta, *rest = call
    return passes[0](query, key, value, per_head(alpha, query), per_head(beta, query), *rest)[0]


class _FewPasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, key, value, alpha, beta, *rest, by_steps, (forward, ctx.backward) = given
        numbers = per_head(alpha, query), per_head(beta, query)
        out, made = forward(query, key, value, *numbers, *rest, keeps=True)
        save(ctx, (alpha, beta, *rest), query, key, value, *made)
        ctx.rest, ctx.by_steps = len(rest), by_steps
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        alpha, beta, *others = saved(ctx)
        rest, sides, made = others[: ctx.rest], others[ctx.rest :][:3], others[ctx.rest + 3 :]
        needs = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or is_batched(gradient):
            found = by_autograd(ctx.by_steps, sides, needs, gradient)
        else:
            numbers = per_head(alpha, sides[0]), per_head(beta, sides[0])
            made = ctx.backward(gradient, *sides, *made, *numbers, *rest)
            found = [
                one.view(side.shape) if need else None
                for one, side, need in zip(made, sides, needs, strict=True)
            ]
        return (*found, *(None for _ in ctx.needs_input_grad[3:]))


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    blocks: Blocks | None,
    keeps: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """The output, and, if they are kept, e, m, C, w and the weights of the blocks."""
    q, k, v = flat(query), flat(key), flat(value)
    key_weight = k * beta
    peak = key_weight.amax(-2, keepdim=True)
    key_weight.sub_(peak).exp_()
    mass = key_weight.sum(-2, keepdim=True)
    centroid = torch.bmm(key_weight.mT, v).div_(mass.mT)
    # Memory that nobody needs any more is used again for what follows.
    kept = [key_weight, mass, centroid] if keeps else []
    del key_weight
    weight = (q * alpha).add_(mass.log().add_(peak)).softmax(-1)
    out = torch.bmm(weight, centroid)
    if keeps:
        kept.append(weight)
    del weight
    if blocks is not None:
        q, k, v = (_cut(side, blocks.size) for side in (q, k, v))
        near = scaled_product(q, k.mT, blocks.scale).softmax(-1)
        _cut(out, blocks.size).baddbmm_(near, v, beta=blocks.mix, alpha=1 - blocks.mix)
        if keeps:
            kept.append(near)
    return out.view(*query.shape[:-1], value.shape[-1]), kept


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_weight: Tensor,
    mass: Tensor,
    centroid: Tensor,
    weight: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, ``[n, T or S, D or E]``."""
    *near, alpha, beta, blocks = rest
    q, k, v, g = flat(query), flat(key), flat(value), flat(gradient)
    mix = 1.0 if blocks is None else blocks.mix
    of_weight = scaled_product(g, centroid.mT, mix)
    of_centroid = scaled_product(weight.mT, g, mix)
    to_query = _softmax_backward(of_weight, weight, -1, weight.dtype)
    of_log_mass = to_query.sum(-2, keepdim=True)
    to_query.mul_(alpha)
    per_mass = of_centroid / mass.mT
    to_value = torch.bmm(key_weight, per_mass)
    middle = (centroid * of_centroid).sum(-1).unsqueeze(-2)
    row = of_log_mass.sub_(middle).div_(mass).mul_(beta)
    to_key = torch.bmm(v, row_by_row(per_mass.mul_(beta).mT)).add_(row).mul_(key_weight)
    if blocks is not None:
        q, k, v, g = (_cut(side, blocks.size) for side in (q, k, v, g))
        (near,) = near
        of_near = scaled_product(g, v.mT, 1 - mix)
        of_scores = _softmax_backward(of_near, near, -1, near.dtype)
        _cut(to_query, blocks.size).baddbmm_(of_scores, k, alpha=blocks.scale)
        _cut(to_key, blocks.size).baddbmm_(of_scores.mT, q, alpha=blocks.scale)
        _cut(to_value, blocks.size).baddbmm_(near.mT, g, alpha=1 - mix)
    return to_query, to_key, to_value


def _cut(side: Tensor, size: int) -> Tensor:
    """``[n, T, D]`` → ``[n · T / b, b, D]``."""
    return side.view(-1, size, side.shape[-1])
