"""Dense calls in plain PyTorch, from checked arguments to the output.

α, β, the offset, the indices of exact keys and the numbers of pages are known. Arithmetic runs in
the accumulation dtype.

Dimension legend: as in `lln.checks.call`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.checks.call import Call
from lln.eager.band import attend_window
from lln.eager.causal import causal_attention
from lln.eager.causal_walk import Inputs
from lln.eager.diagonal import block_diagonal
from lln.eager.dropout import drop_keys
from lln.eager.infinity import as_nan
from lln.eager.key_attention import KeyTerms, attend_keys, slots_of_heads
from lln.eager.key_blocks import Groups, dense_blocks
from lln.eager.page_attention import attend_pages
from lln.eager.page_choice import Sight
from lln.eager.summary import read_heads, summarise_heads
from lln.precision import accumulation_dtype
from lln.tracing import is_untraced_on_cpu

# Larger numbers in padded queries are treated as garbage, not as queries.
_PADDING_LIMIT = 1e18


def attend_dense(call: Call, *, walks: bool = False) -> Tensor:
    """``[B, H, T, E]`` in the dtype of query.

    Args:
        call: A dense call.
        walks: See `causal_attention`.
    """
    query, key, value = widen(*call.qkv, call.key_mask, call.dropout_p)
    wide = call.replace(query=query, key=key, value=value)
    if call.kind == "lln":
        out = long_range(wide, walks)
    elif call.kind == "diag":
        out = short_range(wide)
    elif call.kind == "window":
        out = near_range(wide)
    elif call.kind == "pages":
        out = attend_pages(query, key, value, call.keys, Sight.of(call), call.factor)
    elif call.kind == "lln_diag":
        out = join(long_range(wide, walks), short_range(wide), call.mix)
    else:
        out = exact_keys(wide)
    return out.to(call.query.dtype)


def long_range(call: Call, walks: bool = False) -> Tensor:
    """LLN attention of a call in the accumulation dtype."""
    query, key, value = call.qkv
    heads = query.shape[1]
    if not call.is_causal:
        summary = summarise_heads(key, value, call.beta, call.key_mask)
        return read_heads(query, call.alpha, *summary)
    key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    alpha, beta = (repeat_temperature(side, heads, query.dtype) for side in (call.alpha, call.beta))
    if query.shape[2] == 0:
        return (query * alpha) @ (key * beta).mT @ value
    return causal_attention(Inputs(query, key, value, alpha, beta, call.key_mask), walks=walks)


def short_range(call: Call) -> Tensor:
    """Block-diagonal attention of a call in the accumulation dtype."""
    heads = call.query.shape[1]
    key, value = repeat_heads(call.key, heads), repeat_heads(call.value, heads)
    how: dict[str, Any] = {"key_mask": call.key_mask, "is_causal": call.is_causal}
    return block_diagonal(call.query, key, value, call.block_size, scale=call.scale, **how)


def near_range(call: Call, places: Tensor | None = None) -> Tensor:
    """Attention inside a sliding window, of a call in the accumulation dtype."""
    heads = call.query.shape[1]
    key, value = repeat_heads(call.key, heads), repeat_heads(call.value, heads)
    how: dict[str, Any] = {"key_mask": call.key_mask, "is_causal": call.is_causal}
    return attend_window(
        call.query, key, value, call.window, scale=call.factor, places=places, **how
    )


def exact_keys(call: Call) -> Tensor:
    """Attention over own block, chosen keys and slots, of a call in the accumulation dtype.

    Indices hold only keys that a group may see, or -1.
    """
    query, indices, key_mask = call.query, call.keys, call.key_mask
    batch, heads, tokens, _ = query.shape
    key, value = repeat_heads(call.key, heads), repeat_heads(call.value, heads)
    count = indices.shape[2] // (call.block_size // call.group_size)
    blocks = dense_blocks(batch, tokens, call.block_size, key_mask, query.device, count)
    alpha, _, offset = numbers_of_blocks(call, heads, query.dtype)
    groups = Groups(blocks, call.group_size, key_mask)
    slots = slots_of_heads(call.key, call.value, call.beta, key_mask, heads)
    terms = KeyTerms(query, key, value, alpha, offset, slots, groups, call.scale)
    return attend_keys(terms, indices, are_seen=True)


def join(long_range: Tensor, short_range: Tensor, mix: float | Tensor) -> Tensor:
    """Figure 3's sum, with any weight: ``mix · long + (1 − mix) · short``.

    Nobody else may need the short range: its memory may be used for the sum.
    """
    if not isinstance(mix, Tensor):
        tracked = long_range.requires_grad or short_range.requires_grad
        # One pass instead of three.
        if not tracked and is_untraced_on_cpu(long_range, short_range):
            return short_range.lerp_(long_range, float(mix))
        return torch.lerp(short_range, long_range, float(mix))
    mix = mix.to(long_range.dtype)
    return mix * long_range + (1 - mix) * short_range


def repeat_heads(tensor: Tensor, heads: int, dim: int = 1) -> Tensor:
    """Give every query head a copy of its group's key head."""
    if tensor.shape[dim] == heads:
        return tensor
    return tensor.repeat_interleave(heads // tensor.shape[dim], dim)


def widen(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """All three in the accumulation dtype.

    Dropped keys' values and bad padded queries are 0, infinity in queries and keys is NaN.
    """
    query, key, value = widen_inputs(query, key, value, key_mask, dropout_p)
    return as_nan(query), as_nan(key), value


def widen_inputs(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, with infinity as it is."""
    dtype = accumulation_dtype(query.dtype)
    if query.dtype != dtype:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return clean_queries(query, key, key_mask), key, drop_keys(value, dropout_p)


def clean_queries(query: Tensor, key: Tensor, key_mask: Tensor | None) -> Tensor:
    """Queries with zeros in place of what padded ones hold that cannot be computed with."""
    if key_mask is not None and query.shape[2] == key.shape[2]:
        # A NaN in a padded query, or a number that overflows when multiplied by α, may show in its
        # own row; but in the backward pass 0 · NaN would reach the gradient of every key.
        padding = ~key_mask[:, None, :, None]
        query = torch.where(padding & ~(query.abs() < _PADDING_LIMIT), 0.0, query)
    return query


def repeat_temperature(scale: float | Tensor, heads: int, dtype: torch.dtype) -> float | Tensor:
    """A number, or ``[1 or B, 1 or H, 1, 1]`` in ``dtype``: per key head becomes per query head."""
    if not isinstance(scale, Tensor):
        return scale
    scale = scale.to(dtype)
    scale = scale.reshape((1,) * (4 - scale.dim()) + tuple(scale.shape))
    return scale if scale.shape[1] == 1 else repeat_heads(scale, heads)


def numbers_of_blocks(call: Call, heads: int, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """α, β and the offset as blocks take them: numbers, or ``[1 or B, 1 or H, 1, 1, 1]``."""
    sides = [
        repeat_temperature(side, heads, dtype) for side in (call.alpha, call.beta, call.offset)
    ]
    alpha, beta, offset = (
        side.unsqueeze(2) if isinstance(side, Tensor) else side for side in sides
    )
    return alpha, beta, offset
