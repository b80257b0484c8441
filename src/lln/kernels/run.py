"""Calls of the kernels: seeds, slices of wide values, and autograd.

Ordinary calls use an ``autograd.Function``: an operator with a Python gradient costs 0.2 ms before
it starts, more than the kernels take. Under a compiler, a transform or a dispatch mode, calls go
through the operators of `lln.kernels.ops`.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width,
E value width, n packed sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lln.eager.dropout import drop_keys
from lln.kernels import ops, slices
from lln.kernels.once import once_differentiable
from lln.kernels.shapes import within_reach
from lln.tracing import is_capturing, is_watched


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: float | Tensor,
    beta: float | Tensor,
    value_width: int,
    key_mask: Tensor | None = None,
    mix: float | Tensor = 1.0,
    block_size: int = 0,
    scale: float = 1.0,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    bounds: Tensor | None = None,
    longest: int = 0,
    added: slices.AddedBlocks | None = None,
) -> Tensor:
    """LLN attention by the kernels: ``[B, H, T, E]`` in the dtype of query.

    Args:
        query: ``[B, H, T, D]``; packed sequences come as one sample.
        key: ``[B, Hk, S, D]``.
        value: ``[B, Hk, S, E]``.
        alpha: A number or a tensor that broadcasts to ``[B, H, 1, 1]`` (packed: ``[n, H, 1, 1]``).
        beta: Likewise, or to ``[B, Hk, 1, 1]``.
        value_width: Channels of the values per launch; wider ones are read in slices.
        key_mask: bool ``[B, S]``.
        mix: A number or a tensor that broadcasts to ``[B, H, T, E]``.
        block_size: Tokens in a block of the diagonal part; 0 = no diagonal part.
        scale: Factor of the diagonal part's scores.
        dropout_p: Probability to drop a key.
        is_causal: Whether row i sees keys 0 … i only.
        bounds: Integers ``[n + 1]``, the bounds of packed sequences.
        longest: Length of the longest packed sequence, or more; 0 = not packed.
        added: A diagonal part to add in place, in ordinary calls.
    """
    query, key, value = within_reach(query), within_reach(key), within_reach(value)
    if dropout_p > 0 and is_capturing():
        # The seed is a constant in a CUDA graph: every replay would drop the same keys.
        value, dropout_p = drop_keys(value, dropout_p), 0.0
    alpha_t, alpha_number = tensor_or_number(alpha, query.shape[1])
    # With one β for all heads, the query heads of a group can share a summary of keys and values.
    beta_t, beta_number = tensor_or_number(beta, key.shape[1])
    mix_t, mix_number = tensor_or_number(mix, None)
    seed = int(torch.randint(0, 2**31 - 1, ()).item()) if dropout_p > 0 else 0
    numbers = (alpha_number, beta_number, mix_number, block_size, scale, dropout_p, seed)
    numbers = (*numbers, is_causal, longest)
    if value.shape[-1] <= value_width and added is None:
        return _attend(query, key, value, alpha_t, beta_t, key_mask, mix_t, bounds, *numbers)
    tensors = (query, key, value, alpha_t, beta_t, key_mask, mix_t, bounds)
    if is_watched(query):
        parts = slices.cut(tensors, value_width)
        return torch.cat([_attend(*part, *numbers) for _, part in parts], -1)
    return slices.attend(tensors, numbers, value_width, added)


def fused_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None,
    block_size: int,
    scale: float,
    is_causal: bool,
    value_width: int,
) -> Tensor:
    """Block-diagonal attention by its own kernel: ``[B, H, T, E]`` in the dtype of query.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, T, D]``.
        value: ``[B, Hk, T, E]``.
        key_mask: bool ``[B, T]`` or None.
        block_size: Tokens in a block; see `lln.kernels.limits.blocks_fit`.
        scale: Factor of the scores.
        is_causal: Whether a token sees only itself and earlier tokens of its block.
        value_width: Channels of the values per launch.
    """
    query, key, value = within_reach(query), within_reach(key), within_reach(value)
    attend = ops.attend_blocks if is_watched(query) else _AttendBlocks.apply
    numbers = (block_size, scale, is_causal)
    if value.shape[-1] <= value_width:
        return attend(query, key, value, key_mask, *numbers)
    # In slices, because an output channel depends only on the same channel of the values.
    parts = value.split(value_width, -1)
    return torch.cat([attend(query, key, part, key_mask, *numbers) for part in parts], -1)


def fused_moments(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    bounds: Tensor | None,
    criterion: str,
    longest: int,
) -> Tensor:
    """α, β, σq², σk² and whether a spread is zero, by the kernel: ``[5, B or n, H, 1, 1]``."""
    query, key = within_reach(query), within_reach(key)
    if is_watched(query):
        return ops.match(query.detach(), key.detach(), key_mask, bounds, criterion, longest)
    # No detach needed: autograd does not see kernels.
    return ops.statistics(query, key, key_mask, bounds, criterion, longest)


def fused_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_mass: Tensor,
    centroid: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add one token to the summary and read it, by the kernel: output, log-mass, centroid."""
    alpha_t, alpha_number = tensor_or_number(alpha, query.shape[1])
    beta_t, beta_number = tensor_or_number(beta, log_mass.shape[1])
    decode = ops.decode if is_watched(query) else ops.append_and_read
    sides = (query, key, value, log_mass, centroid, alpha_t, beta_t)
    return decode(*sides, alpha_number, beta_number)


def tensor_or_number(side: float | Tensor, heads: int | None) -> tuple[Tensor | None, float]:
    """A 4-D tensor or None, and a number; the kernels use the number if the tensor is None.

    Args:
        side: α, β or mix.
        heads: Repeat a single value for this many heads; None = do not repeat.
    """
    if not isinstance(side, Tensor):
        return None, float(side)
    side = side if side.dim() == 4 else side.reshape((1,) * (4 - side.dim()) + side.shape)
    return side.expand(-1, heads, 1, 1) if heads is not None and side.shape[1] == 1 else side, 1.0


class _Attend(torch.autograd.Function):
    """`lln.kernels.ops.attend_saving` with less overhead.

    The numbers come as one argument, then a `lln.kernels.repeats.Repeat` or None. Both ways save
    the same tensors: when checkpointing repeats a forward, it may be the other one.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, numbers, repeat = inputs
        if repeat is None:
            out, log_mass, centroid = ops.forward((*tensors, *numbers), save=True)
        else:
            out, log_mass, centroid = repeat.attend(tensors, numbers)
        ctx.save_for_backward(*tensors, log_mass, centroid)
        ctx.numbers, ctx.repeat = numbers, repeat
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        (gradient,) = grad_outputs
        if gradient is None:
            return (None,) * (ops.TENSORS + 2)
        *tensors, log_mass, centroid = ctx.saved_tensors
        numbers, repeat = ctx.numbers, ctx.repeat
        if repeat is not None:
            made = repeat.differentiate(gradient, tensors, numbers, (log_mass, centroid))
            if made is not None:
                return *made, *(None,) * (ops.TENSORS - 1)
        asked = ops.asked_gradients(ctx)
        found = ops.gradients(gradient, (*tensors, *numbers), log_mass, centroid, asked)
        if repeat is not None:
            repeat.learn(gradient, tensors, numbers)
        dq, dk, dv, dalpha, dbeta, dmix = found
        return dq, dk, dv, dalpha, dbeta, None, dmix, None, None, None


class _AttendBlocks(torch.autograd.Function):
    """`lln.kernels.ops.attend_blocks` with less overhead."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ops.save_blocks(ctx, inputs, inputs[0])
        return ops.forward_blocks(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        found = ops.gradients_of_blocks(grad_outputs[0], *ctx.saved_tensors, *ctx.numbers)
        return *found, None, *(None,) * ops.BLOCK_NUMBERS


def _attend(*arguments: Any) -> Tensor:
    """One call with or without gradient, through the operator where the call is traced."""
    tensors = arguments[: ops.TENSORS]
    tracked = slices.is_tracked(tensors)
    if is_watched(arguments[0]):
        return ops.attend_saving(*arguments)[0] if tracked else ops.attend(*arguments)
    if not tracked:
        return ops.forward(arguments, save=False)[0]
    return _Attend.apply(*tensors, arguments[ops.TENSORS :], None)


def attend_again(tensors: Sequence[Any], numbers: tuple[Any, ...], repeat: Any) -> Tensor:
    """A call with gradient by the launches of an earlier one (`lln.kernels.repeats`)."""
    return _Attend.apply(*tensors, numbers, repeat)
