"""Attention without kernels: plain PyTorch, or the N×N reference.

Inputs are already checked and α, β known. Arithmetic runs in the accumulation dtype.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width,
E value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln import reference
from lln.eager.causal import causal_attention
from lln.eager.diagonal import block_diagonal
from lln.eager.dropout import drop_keys
from lln.eager.infinity import as_nan
from lln.eager.key_attention import COPIED, attend_keys, slots_of_blocks, slots_of_heads
from lln.eager.key_blocks import dense_blocks
from lln.eager.summary import read_heads, summarise_heads
from lln.precision import accumulation_dtype
from lln.tracing import is_untraced_on_cpu

# Larger numbers in padded queries are treated as garbage, not as queries.
_PADDING_LIMIT = 1e18


def long_range(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    key_mask: Tensor | None,
    **options: Any,
) -> Tensor:
    """LLN attention in the dtype of query."""
    sides = (query, key, value, alpha, beta, key_mask)
    return _run(_long_range, sides, key_mask, options)


def short_range(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, **options: Any
) -> Tensor:
    """Block-diagonal attention in the dtype of query."""
    return _run(_short_range, (query, key, value, key_mask), key_mask, options)


def both_ranges(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    key_mask: Tensor | None,
    mix: float | Tensor,
    **options: Any,
) -> Tensor:
    """LLN and block-diagonal attention combined, in the dtype of query."""
    sides = (query, key, value, alpha, beta, key_mask, mix)
    return _run(_both_ranges, sides, key_mask, options)


def exact_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    offset: float | Tensor,
    indices: Tensor,
    key_mask: Tensor | None,
    **options: Any,
) -> Tensor:
    """Attention over own block, chosen keys and slots, in the dtype of query.

    Indices hold only keys that a group may see, or -1.
    """
    sides = (query, key, value, alpha, beta, offset, indices, key_mask)
    return _run(_exact_keys, sides, key_mask, options)


def _run(
    attend: Callable[..., Tensor],
    sides: tuple[Any, ...],
    key_mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """One call; ``sides`` are its tensor arguments, starting with query, key and value."""
    query, key, value, *rest = sides
    wide = widen(query, key, value, key_mask, options.pop("dropout_p", 0.0))
    out = attend(*wide, *rest, **options)
    return out if out.dtype == query.dtype else out.to(query.dtype)


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
    if key_mask is not None and query.shape[2] == key.shape[2]:
        # A NaN in a padded query, or a number that overflows when multiplied by α, may show in its
        # own row; but in the backward pass 0 · NaN would reach the gradient of every key.
        padding = ~key_mask[:, None, :, None]
        query = torch.where(padding & ~(query.abs() < _PADDING_LIMIT), 0.0, query)
    return query, key, drop_keys(value, dropout_p)


def _long_range(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    key_mask: Tensor | None,
    *,
    is_causal: bool,
    impl: str,
    walks: bool = False,
) -> Tensor:
    """LLN attention in the accumulation dtype."""
    heads = query.shape[1]
    if impl != "reference" and not is_causal:
        return read_heads(query, alpha, *summarise_heads(key, value, beta, key_mask))
    key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    dtype = torch.float64 if impl == "reference" else query.dtype
    alpha, beta = (repeat_temperature(scale, heads, dtype) for scale in (alpha, beta))
    if impl != "reference":
        if query.shape[2] == 0:
            return (query * alpha) @ (key * beta).mT @ value
        return causal_attention(query, key, value, alpha, beta, key_mask, walks=walks)
    keep = _kept_pairs(query, key, key_mask, is_causal)
    return reference.lln_attention(query, key, value, alpha, beta, keep=keep)


def _short_range(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    *,
    block_size: int,
    scale: float | None,
    is_causal: bool,
    impl: str,
) -> Tensor:
    """Block-diagonal attention in the accumulation dtype."""
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    if impl == "reference":
        keep = _kept_pairs(query, key, key_mask, is_causal)
        return reference.block_diagonal_attention(
            query, key, value, block_size, keep=keep, scale=scale
        )
    return block_diagonal(
        query, key, value, block_size, scale=scale, key_mask=key_mask, is_causal=is_causal
    )


def _both_ranges(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    key_mask: Tensor | None,
    mix: float | Tensor,
    *,
    block_size: int,
    scale: float | None,
    is_causal: bool,
    impl: str,
    walks: bool = False,
) -> Tensor:
    """LLN and block-diagonal attention combined, in the accumulation dtype."""
    how: dict[str, Any] = {"is_causal": is_causal, "impl": impl}
    long_range = _long_range(query, key, value, alpha, beta, key_mask, walks=walks, **how)
    how |= {"block_size": block_size, "scale": scale}
    return join(long_range, _short_range(query, key, value, key_mask, **how), mix)


def _exact_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    offset: float | Tensor,
    indices: Tensor,
    key_mask: Tensor | None,
    *,
    block_size: int,
    group_size: int,
    scale: float | None,
    is_causal: bool,
    impl: str,
    reading: str = COPIED,
) -> Tensor:
    """Attention over own block, chosen keys and slots, in the accumulation dtype."""
    batch, heads, tokens, _ = query.shape
    grouped_key, grouped_value = key, value
    key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    dtype = torch.float64 if impl == "reference" else query.dtype
    numbers = (alpha, beta, offset)
    alpha, repeated_beta, offset = (repeat_temperature(side, heads, dtype) for side in numbers)
    if impl == "reference":
        keep = _kept_pairs(query, key, key_mask, is_causal)
        exact = reference.exact_pairs(
            indices, tokens, block_size, group_size, keep=keep, is_causal=is_causal
        )
        rest = _earlier_blocks(query, key_mask, block_size) if is_causal else keep
        return reference.lln_keys_attention(
            query,
            key,
            value,
            alpha,
            repeated_beta,
            exact,
            offset,
            keep=keep,
            rest=rest,
            scale=scale,
        )
    count = indices.shape[2] // (block_size // group_size)
    blocks = dense_blocks(batch, tokens, block_size, key_mask, query.device, count)
    alpha, block_beta, offset = (
        side.unsqueeze(2) if isinstance(side, Tensor) else side
        for side in (alpha, repeated_beta, offset)
    )
    if is_causal:
        slots = slots_of_blocks(key, value, block_beta, blocks, key_mask, None, is_causal)
    else:
        slots = slots_of_heads(grouped_key, grouped_value, beta, key_mask, heads)
    options: dict[str, Any] = {"key_mask": key_mask, "is_causal": is_causal, "scale": scale}
    options |= {"group_size": group_size, "are_seen": True, "reading": reading}
    return attend_keys(query, key, value, alpha, slots, offset, indices, blocks, **options)


def _earlier_blocks(query: Tensor, key_mask: Tensor | None, block_size: int) -> Tensor:
    """Which pairs a causal summary holds, keys of earlier blocks: bool ``[B, 1, T, T]``."""
    batch, _, tokens, _ = query.shape
    home = dense_blocks(batch, tokens, block_size, key_mask, query.device).home[:, None]
    earlier = home.unsqueeze(-2) < home.unsqueeze(-1)
    return earlier if key_mask is None else earlier & key_mask[:, None, None]


def repeat_temperature(scale: float | Tensor, heads: int, dtype: torch.dtype) -> float | Tensor:
    """A number, or ``[1 or B, 1 or H, 1, 1]`` in ``dtype``: per key head becomes per query head."""
    if not isinstance(scale, Tensor):
        return scale
    scale = scale.to(dtype)
    scale = scale.reshape((1,) * (4 - scale.dim()) + tuple(scale.shape))
    return scale if scale.shape[1] == 1 else repeat_heads(scale, heads)


def _kept_pairs(
    query: Tensor, key: Tensor, key_mask: Tensor | None, is_causal: bool
) -> Tensor | None:
    """The bool mask ``[B, 1, T, S]`` of the reference."""
    keep = (
        None if key_mask is None else key_mask[:, None, None, :].expand(-1, 1, query.shape[2], -1)
    )
    if not is_causal:
        return keep
    earlier = reference.causal_keep(query.shape[2], query.device)
    return earlier if keep is None else keep & earlier
