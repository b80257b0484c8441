"""Attention with exact keys as PyTorch operators, and calls of its kernels with autograd.

As in `run`, ordinary calls use an ``autograd.Function``; a compiler, a transform or a
dispatch mode gets the operators.

Dimension legend: B batch, H query heads, Hk key heads, SH summary heads, T tokens, D head width,
E value width, G groups, K keys per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lln.eager.key_blocks import blocks_in
from lln.kernels.launching.kernel_arguments import tensor_or_number
from lln.kernels.launching.operators import Operation, call, operator, with_gradients
from lln.kernels.launching.shapes import output_like, summary_heads, within_reach
from lln.tracing import is_watched

# The arguments of a call are the fields of `lln.kernels.keys.keys_call.KeysCall`.
_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? alpha, Tensor? beta, Tensor? offset, "
    "Tensor indices, Tensor? key_mask"
)
_NUMBERS = (
    "float alpha_number, float beta_number, float offset_number, int block_size, int group_size, "
    "float scale"
)


def fused_choice(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    keys: int,
    *,
    block_size: int,
    group_size: int,
    flip: bool,
) -> Tensor:
    """The chosen keys by mean queries, by the kernels: int32 ``[B, H, G, K]``."""
    query, key = within_reach(query.detach()), within_reach(key.detach())
    arguments = (query, key, key_mask, min(keys, query.shape[2]), block_size, group_size, flip)
    return choose_keys(*arguments) if is_watched(query) else _choose(*arguments)


def fused_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    offset: float | Tensor,
    indices: Tensor,
    *,
    key_mask: Tensor | None,
    block_size: int,
    group_size: int,
    scale: float | None,
) -> Tensor:
    """Attention over own block, chosen keys and slots, by the kernels: ``[B, H, T, E]``.

    The arguments are those of a `lln.kernels.keys.keys_call.KeysCall`; α, β and the offset are
    numbers, or broadcast to ``[B, H, 1, 1]``, β also to ``[B, Hk, 1, 1]``. Indices hold only keys
    that a group may see. Without a scale it is 1/√D.
    """
    query, key, value = within_reach(query), within_reach(key), within_reach(value)
    alpha_t, alpha_number = tensor_or_number(alpha, query.shape[1])
    beta_t, beta_number = tensor_or_number(beta, key.shape[1])
    offset_t, offset_number = tensor_or_number(offset, query.shape[1])
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
    chosen = indices.to(torch.int32).contiguous()
    tensors = (query, key, value, alpha_t, beta_t, offset_t, chosen, key_mask)
    numbers = (alpha_number, beta_number, offset_number, block_size, group_size, factor)
    return call(_ATTEND, attend_keys, *tensors, *numbers)


def _choose(*arguments: Any) -> Tensor:
    from lln.kernels.keys.launch_choice import choose

    return choose(*arguments)


def _forward(*inputs: Any) -> tuple[Tensor, ...]:
    from lln.kernels.keys.keys_call import KeysCall
    from lln.kernels.keys.launch_keys import attend_exact_keys

    return attend_exact_keys(KeysCall(*inputs))


def _gradients(
    gradients: Sequence[Tensor], inputs: Sequence[Any], saved: Sequence[Tensor], _: Any
) -> tuple[Any, ...]:
    """Gradients of query, key, value, α, β and offset; None for those that are numbers."""
    from lln.kernels.keys.keys_call import KeysCall
    from lln.kernels.keys.launch_keys import exact_keys_gradients

    call = KeysCall(*inputs)
    dq, dk, dv, *numbers = exact_keys_gradients(call, within_reach(gradients[0]), *saved)
    tensors = (call.alpha, call.beta, call.offset)
    return dq, dk, dv, *(folded(*pair) for pair in zip(numbers, tensors, strict=True))


def folded(gradient: Tensor | None, side: Tensor | None) -> Tensor | None:
    """The gradient ``[B, heads, 1, 1]`` summed to the shape of α, β or the offset."""
    if gradient is None or side is None:
        return None
    if side.shape[1] not in (1, gradient.shape[1]):
        gradient = gradient.unflatten(1, (side.shape[1], -1)).sum(2)
    return gradient.sum_to_size(side.shape).to(side.dtype)


def _fake_choice(query: Tensor, _: Tensor, key_mask: Tensor | None, *numbers: Any) -> Tensor:
    keys, block_size, group_size, _ = numbers
    blocks = blocks_in(query.shape[2], block_size, key_mask is not None)
    shape = (*query.shape[:2], blocks * (block_size // group_size), keys)
    return query.new_empty(shape, dtype=torch.int32)


choose_keys = operator(
    "choose_keys",
    "Tensor query, Tensor key, Tensor? key_mask, int keys, int block_size, int group_size, "
    "bool flip",
    _choose,
    _fake_choice,
)


def _fake_attention(*inputs: Any) -> tuple[Tensor, ...]:
    query, key, value, _, beta, _, _, key_mask, *rest = inputs
    block_size, group_size = rest[-3:-1]
    blocks = blocks_in(query.shape[2], block_size, key_mask is not None)
    levels = (*query.shape[:2], blocks * (block_size // group_size))
    slots = (query.shape[0], summary_heads(query, key, beta), query.shape[-1])
    return (
        output_like(query, value.shape[-1]),
        query.new_empty(query.shape[:3], dtype=torch.float32),
        query.new_empty(levels, dtype=torch.float32),
        query.new_empty(slots, dtype=torch.float32),
        value.new_empty((*slots, value.shape[-1])),
        query.new_empty(slots, dtype=torch.float32),
    )


# The results are those of `lln.kernels.keys.launch_keys.attend_exact_keys`.
_ATTEND = Operation(
    _TENSORS.count(",") + 1, _forward, _gradients, of=(0, 1, 2, 3, 4, 5), kept=slice(6),
    alike=lambda *_: (0, 1, 2),
)  # fmt: skip
attend_keys = with_gradients(
    "attend_keys", f"{_TENSORS}, {_NUMBERS}", _ATTEND, _fake_attention, results=6
)
