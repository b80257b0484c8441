"""Attention with exact keys as PyTorch operators, and calls of its kernels with autograd.

A rank of several computes three steps, between which ranks talk to each other (`lln.parallel`): the
mean queries of its groups, its best keys for the groups of all ranks, and the attention of its own
queries. Nothing of it is an operator: how many rows a rank fetches depends on the choice, which no
compiler can trace.

Dimension legend: B batch, H query heads, Hk key heads, SH summary heads, T tokens, D head width,
E value width, S ≥ T rows, n blocks, G groups, A groups of the whole sequence, K keys per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lln.eager.key_blocks import blocks_in
from lln.kernels.launching.kernel_arguments import tensor_or_number
from lln.kernels.launching.operators import Operation, call, launched, operator, with_gradients
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


@cache
def _launches() -> tuple[Any, Any, Any]:
    """The modules that import Triton: of the choice, of the attention, and what a call is."""
    from lln.kernels.keys import keys_call, launch_choice, launch_keys

    return launch_choice, launch_keys, keys_call


def _choose(*arguments: Any) -> Tensor:
    return _launches()[0].choose(*arguments)


def _forward(*inputs: Any) -> tuple[Tensor, ...]:
    _, launches, kinds = _launches()
    return launches.attend_exact_keys(kinds.KeysCall(*inputs))


def _gradients(
    gradients: Sequence[Tensor], inputs: Sequence[Any], saved: Sequence[Tensor], _: Any
) -> tuple[Any, ...]:
    """Gradients of query, key, value, α, β and offset; None for those that are numbers."""
    _, launches, kinds = _launches()
    call, gradient = kinds.KeysCall(*inputs), within_reach(gradients[0])
    dq, dk, dv, *numbers = launches.exact_keys_gradients(call, gradient, *saved)
    tensors = (call.alpha, call.beta, call.offset)
    return dq, dk, dv, *(_folded(*pair) for pair in zip(numbers, tensors, strict=True))


def _folded(gradient: Tensor | None, side: Tensor | None) -> Tensor | None:
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


def fused_means(
    query: Tensor,
    mask: Tensor | None,
    gaps: Tensor | None,
    *,
    blocks: int,
    block_size: int,
    group_size: int,
    flip: bool,
) -> Tensor:
    """The mean query of every group: see `lln.kernels.keys.launch_choice.mean_queries`.

    Mask, gaps and sizes are those of a `lln.kernels.keys.launch_choice.BlockPlace`.
    """
    choice = _launches()[0]
    place = choice.BlockPlace(mask, _short(gaps), block_size, group_size)
    return choice.mean_queries(within_reach(query.detach()), place, blocks, flip)


def fused_candidates(
    mean: Tensor,
    key: Tensor,
    mask: Tensor | None,
    gaps: Tensor | None,
    keys: int,
    *,
    block_size: int,
    group_size: int,
) -> tuple[Tensor, Tensor]:
    """Float32 scores and int32 places of the K best keys for every mean query: ``[B, H, A, K]``.

    Ascending by place; -inf and -1 where there are fewer. Equal scores are taken in the order of
    places. A score is the same whichever other keys are there, so those of ranks can be compared.
    See `lln.kernels.keys.launch_choice.best_keys`; key s lies in block (s + gap) // W of the
    groups.
    """
    if keys == 0:
        found = torch.empty((*mean.shape[:3], 0), dtype=torch.int32, device=mean.device)
        return found.float(), found
    choice = _launches()[0]
    place = choice.BlockPlace(mask, _short(gaps), block_size, group_size)
    tensors = (mean.contiguous(), within_reach(key.detach()))
    found, scores = choice.best_keys(*tensors, place, keys, scored=True)
    return scores, found


def fused_sharded_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    offset: float | Tensor,
    slots: tuple[Tensor, Tensor, Tensor],
    indices: Tensor,
    *,
    key_mask: Tensor | None,
    held: Tensor | int,
    block_size: int,
    group_size: int,
    scale: float | None,
) -> Tensor:
    """Attention over own block, chosen rows and the slots of a given summary: ``[B, H, T, E]``.

    Blocks begin with the first of T > 0 tokens. Key and value have S rows: the tokens, and behind
    them what groups chose, where ``indices`` point (-1 = nowhere). ``slots`` are L - βμ
    ``[B, SH, D]``, C ``[B, SH, D, E]`` and μ ``[B, SH, D]`` in float32, and ``held`` is how many
    keys they stand for, with a mask int ``[B]``. Gradients go to the slots, too. Everything else is
    as in `lln.kernels.keys.keys_ops.fused_keys`.
    """
    query, key, value = within_reach(query), within_reach(key), within_reach(value)
    alpha_t, alpha_number = tensor_or_number(alpha, query.shape[1])
    offset_t, offset_number = tensor_or_number(offset, query.shape[1])
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
    chosen = indices.to(torch.int32).contiguous()
    counts, number = (held.to(torch.int32), 0) if isinstance(held, Tensor) else (None, held)
    tensors = (query, key, value, alpha_t, offset_t, *slots, chosen, key_mask, counts)
    numbers = (alpha_number, offset_number, block_size, group_size, factor, number)
    return launched(_SHARDED, *tensors, *numbers)


def _attend_sharded(*inputs: Any) -> tuple[Tensor, ...]:
    call = _sharded_call(inputs)
    return _launches()[1].read_keys(call, call.outside.summary)


def _gradients_of_sharded(
    gradients: Sequence[Tensor], inputs: Sequence[Any], saved: Sequence[Tensor], _: Any
) -> tuple[Tensor | None, ...]:
    call = _sharded_call(inputs)
    gradient, summary = within_reach(gradients[0]), call.outside.summary
    found = _launches()[1].exact_keys_gradients(call, gradient, *saved, *summary)
    dq, dk, dv, dalpha, doffset, *of_summary = found
    scalars = (_folded(dalpha, call.alpha), _folded(doffset, call.offset))
    return dq, dk, dv, *scalars, *of_summary


_SHARDED = Operation(11, _attend_sharded, _gradients_of_sharded, of=tuple(range(8)), kept=slice(3))


def _sharded_call(inputs: Sequence[Any]) -> Any:
    _, _, kinds = _launches()
    query, key, value, alpha, offset, log_mass, centroid, centre, chosen, mask, held = inputs[:11]
    alpha_number, offset_number, block_size, group_size, scale, number = inputs[11:]
    summary = (log_mass.contiguous(), centroid.to(value.dtype).contiguous(), centre.contiguous())
    tensors = (query, key, value, alpha, None, offset, chosen, mask)
    # β is in the log-masses already.
    factors = (alpha_number, 0.0, offset_number)
    outside = kinds.Outside(*summary, held, number)
    return kinds.KeysCall(*tensors, *factors, block_size, group_size, scale, outside)


def _short(gaps: Tensor | None) -> Tensor | None:
    return None if gaps is None else gaps.to(torch.int32)
