"""What a rank of several computes with exact keys, by the kernels.

Three steps, between which ranks talk to each other (`lln.parallel`): the mean queries of its
groups, its best keys for the groups of all ranks, and the attention of its own queries. Nothing of
it is an operator: how many rows a rank fetches depends on the choice, which no compiler can trace.

Dimension legend: B batch, H query heads, Hk key heads, SH summary heads, T tokens, S ≥ T rows, D
head width, E value width, n blocks, G groups, A groups of the whole sequence, K keys per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lln.kernels.keys.keys_ops import folded
from lln.kernels.launching.kernel_arguments import tensor_or_number
from lln.kernels.launching.operators import Operation, launched
from lln.kernels.launching.shapes import within_reach


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
    choice = _choice()
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
    choice = _choice()
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
    return launched(_OPERATION, *tensors, *numbers)


def _attend(*inputs: Any) -> tuple[Tensor, ...]:
    call = _call(inputs)
    return _launches().read_keys(call, call.outside.summary)


def _gradients(
    gradients: Sequence[Tensor], inputs: Sequence[Any], saved: Sequence[Tensor], _: Any
) -> tuple[Tensor | None, ...]:
    call = _call(inputs)
    gradient, summary = within_reach(gradients[0]), call.outside.summary
    found = _launches().exact_keys_gradients(call, gradient, *saved, *summary)
    dq, dk, dv, dalpha, doffset, *of_summary = found
    scalars = (folded(dalpha, call.alpha), folded(doffset, call.offset))
    return dq, dk, dv, *scalars, *of_summary


_OPERATION = Operation(11, _attend, _gradients, of=tuple(range(8)), kept=slice(3))


def _call(inputs: Sequence[Any]) -> Any:
    from lln.kernels.keys.keys_call import KeysCall, Outside

    query, key, value, alpha, offset, log_mass, centroid, centre, chosen, mask, held = inputs[:11]
    alpha_number, offset_number, block_size, group_size, scale, number = inputs[11:]
    summary = (log_mass.contiguous(), centroid.to(value.dtype).contiguous(), centre.contiguous())
    tensors = (query, key, value, alpha, None, offset, chosen, mask)
    # β is in the log-masses already.
    factors = (alpha_number, 0.0, offset_number)
    outside = Outside(*summary, held, number)
    return KeysCall(*tensors, *factors, block_size, group_size, scale, outside)


def _short(gaps: Tensor | None) -> Tensor | None:
    return None if gaps is None else gaps.to(torch.int32)


@cache
def _choice() -> Any:
    """Imported when first needed, because it imports Triton."""
    from lln.kernels.keys import launch_choice

    return launch_choice


@cache
def _launches() -> Any:
    """Likewise."""
    from lln.kernels.keys import launch_keys

    return launch_keys
