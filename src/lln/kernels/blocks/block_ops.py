"""Block-diagonal attention alone: `fused_blocks`, its operators and its gradients.

Dimension legend: B batch, H query heads, Hk key heads, T tokens, D head width, E value width.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lln.kernels.launching.limits import blocks_fit
from lln.kernels.launching.operators import once_differentiable, operator
from lln.kernels.launching.shapes import output_like, within_reach
from lln.tracing import is_watched

_BLOCKS = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, int block_size, float scale, "
    "bool causal"
)
BLOCK_TENSORS, BLOCK_NUMBERS = 4, 3


@cache
def _block_launches() -> tuple[Any, Any, Any]:
    """The launch modules (of whole blocks in a tile, and tile by tile) and `BlockCall`."""
    from lln.kernels.blocks import launch_blocks, launch_tiled

    return launch_blocks, launch_tiled, launch_blocks.BlockCall


def _launches_of(call: Any) -> Any:
    whole, tiled, _ = _block_launches()
    fits = blocks_fit(call.query, call.block_size, False, call.mask is not None)
    return whole if fits else tiled


def forward_blocks(*arguments: Any) -> Tensor:
    """Output for the arguments of `attend_blocks`."""
    call = _block_launches()[2](*arguments)
    return _launches_of(call).attend_blocks(call)


def gradients_of_blocks(gradient: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    call = _block_launches()[2](*arguments)
    return _launches_of(call).attend_blocks_backward(call, within_reach(gradient))


def add_blocks(tensors: Any, numbers: Any, out: Tensor, mix: float) -> None:
    """Make of ``out`` mix · out + (1 − mix) · blocks.

    Args:
        tensors: Query, key and value.
        numbers: Block size, scale, and whether it is causal.
        out: ``[B, H, T, E]``.
        mix: The weight of what is there.
    """
    _, tiled, kind = _block_launches()
    tiled.add_blocks(kind(*tensors, None, *numbers), out, mix)


def add_block_gradients(
    gradient: Tensor, tensors: Any, numbers: Any, made: tuple[Tensor, ...], mix: float
) -> None:
    """The same with ``made``, the gradients of query, key and value."""
    _, tiled, kind = _block_launches()
    tiled.add_gradients(kind(*tensors, None, *numbers), within_reach(gradient), made, mix)


@operator("attend_blocks", _BLOCKS)
def attend_blocks(*arguments: Any) -> Tensor:
    """Softmax attention inside blocks of tokens."""
    return forward_blocks(*arguments)


@attend_blocks.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return output_like(query, value.shape[-1])


@operator("attend_blocks_backward", f"Tensor gradient, {_BLOCKS}", results=3)
def attend_blocks_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    return gradients_of_blocks(*arguments)


@attend_blocks_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def save_blocks(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep the inputs; the backward recomputes the softmax rows."""
    ctx.save_for_backward(*inputs[:BLOCK_TENSORS])
    ctx.numbers = inputs[BLOCK_TENSORS:]


def _backward_blocks(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    found = attend_blocks_backward(gradient, *ctx.saved_tensors, *ctx.numbers)
    return *found, None, *(None,) * BLOCK_NUMBERS


attend_blocks.register_autograd(_backward_blocks, setup_context=save_blocks)


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
        block_size: Tokens in a block; see `lln.kernels.launching.limits.blocks_fit`.
        scale: Factor of the scores.
        is_causal: Whether a token sees only itself and earlier tokens of its block.
        value_width: Channels of the values per launch.
    """
    query, key, value = within_reach(query), within_reach(key), within_reach(value)
    attend = attend_blocks if is_watched(query) else _AttendBlocks.apply
    numbers = (block_size, scale, is_causal)
    if value.shape[-1] <= value_width:
        return attend(query, key, value, key_mask, *numbers)
    # In slices, because an output channel depends only on the same channel of the values.
    parts = value.split(value_width, -1)
    return torch.cat([attend(query, key, part, key_mask, *numbers) for part in parts], -1)


class _AttendBlocks(torch.autograd.Function):
    """`attend_blocks` with less overhead."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        save_blocks(ctx, inputs, inputs[0])
        return forward_blocks(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        found = gradients_of_blocks(grad_outputs[0], *ctx.saved_tensors, *ctx.numbers)
        return *found, None, *(None,) * BLOCK_NUMBERS
