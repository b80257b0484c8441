"""Fused block-diagonal attention as PyTorch operators, as `lln.kernels.ops` has those of LLN.

Dimension legend: B batch, H query heads, Hk key heads, T tokens, D head width, E value width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lln.kernels.limits import widest_block_value
from lln.kernels.ops import once_differentiable
from lln.kernels.shapes import output_like, within_reach
from lln.tracing import is_watched

if TYPE_CHECKING:
    from lln.kernels.triton.blocks import BlockCall

# query, key, value, key_mask, then block_size, scale, causal.
_TENSORS, _NUMBERS = 4, 3


def _call(*arguments: Any) -> BlockCall:
    from lln.kernels.triton.blocks import BlockCall

    return BlockCall(*arguments)


@torch.library.custom_op("lln::attend_blocks", mutates_args=())
def attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    block_size: int,
    scale: float,
    causal: bool,
) -> Tensor:
    """Softmax attention inside blocks of tokens."""
    from lln.kernels.triton import blocks

    return blocks.attend_blocks(_call(query, key, value, key_mask, block_size, scale, causal))


@attend_blocks.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return output_like(query, value.shape[-1])


@torch.library.custom_op("lln::attend_blocks_backward", mutates_args=())
def attend_blocks_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    block_size: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    from lln.kernels.triton import blocks

    call = _call(query, key, value, key_mask, block_size, scale, causal)
    return blocks.attend_blocks_backward(call, within_reach(gradient))


@attend_blocks_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS])
    ctx.numbers = inputs[_TENSORS:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    grads = attend_blocks_backward(gradient, *ctx.saved_tensors, *ctx.numbers)
    return (*grads, None, *(None,) * _NUMBERS)


attend_blocks.register_autograd(_backward, setup_context=_save)


class _AttendBlocks(torch.autograd.Function):
    """`attend_blocks` without the price of an operator."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        from lln.kernels.triton import blocks

        _save(ctx, inputs, inputs[0])
        return blocks.attend_blocks(_call(*inputs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        from lln.kernels.triton import blocks

        call = _call(*ctx.saved_tensors, *ctx.numbers)
        grads = blocks.attend_blocks_backward(call, within_reach(grad_outputs[0]))
        return (*grads, None, *(None,) * _NUMBERS)


def fused_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None,
    block_size: int,
    scale: float,
    is_causal: bool,
) -> Tensor:
    """Block-diagonal attention by the kernel: ``[B, H, T, E]`` in the dtype of query.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, T, D]``.
        value: ``[B, Hk, T, E]``.
        key_mask: bool ``[B, T]`` or None.
        block_size: Tokens in a block; see `lln.kernels.limits.blocks_fit`.
        scale: Of the scores.
        is_causal: Whether a token sees only itself and earlier tokens of its block.
    """
    query, key, value = within_reach(query), within_reach(key), within_reach(value)
    attend = attend_blocks if is_watched(query) else _AttendBlocks.apply
    numbers = (block_size, scale, is_causal)
    most = widest_block_value(query, block_size)
    if value.shape[-1] <= most:
        return attend(query, key, value, key_mask, *numbers)
    # Every channel of the output is a sum over the same channel of the values.
    parts = value.split(most, -1)
    return torch.cat([attend(query, key, part, key_mask, *numbers) for part in parts], -1)
