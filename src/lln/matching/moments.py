"""Moment matching: which α, β make LLN attention as concentrated as softmax attention.

Eq. (10): α = s/σq and β = s/σk. σq and σk are measured here; `lln.matching.curves` gives s.

Dimension legend: B batch, H heads, T queries, S keys, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lln.matching.curves import SPREAD_FLOOR, matched_spread
from lln.precision import accumulation_dtype
from lln.tracing import is_untraced_on_cpu, values_are_readable

# Entries whose squares are added in one row, in a vector's few accumulators: with more of them
# rounding grows, with fewer PyTorch's norm takes twice as long.
ROW = 1024


class Moments(NamedTuple):
    """The statistics that matching needs, in float32 or wider, without gradient.

    Attributes:
        query_variance: ``[B, H]``, σq² = mean of q² (uncentred: the mean of q affects softmax
            attention).
        key_variance: ``[B, H]``, σk² = mean over features of the variance over tokens (centred:
            the mean of k cancels in softmax attention).
        keys: ``[B, 1]``, number of valid keys.
        degenerate: bool ``[B, H]``, True where a spread is zero to rounding; matching then falls
            back to α = β = 1.
    """

    query_variance: Tensor
    key_variance: Tensor
    keys: Tensor
    degenerate: Tensor


def head_moments(query: Tensor, key: Tensor, key_mask: Tensor | None = None) -> Moments:
    """Statistics of every sample and head: ``[B, H]`` each."""
    width, groups = query.shape[-1], query.shape[1] // max(key.shape[1], 1)
    query, key = query.detach(), key.detach()
    if key_mask is None and is_untraced_on_cpu(query, key):
        with np.errstate(all="ignore"):
            *sums, queries, keys = _plain_sums(query, key)
        counts = (np.full((query.shape[0], 1), number, sums[0].dtype) for number in (queries, keys))
        return Moments(*on_few_numbers(moments_of_sums, (*sums, *counts), width, groups))
    query_mask = key_mask if key_mask is not None and query.shape[2] == key.shape[2] else None
    queries, of_query, keys, mean, of_key = sums_of_heads(query, key, query_mask, key_mask)
    sums = (of_query, of_key, (mean * mean).mean((-1, -2)), queries, keys)
    return Moments(*on_few_numbers(moments_of_sums, sums, width, groups))


def sums_of_heads(
    query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, ...]:
    """Number and squares of the queries; number, mean and squares around it of the keys."""
    dtype = accumulation_dtype(query.dtype)
    query, key = query.detach().to(dtype), key.detach().to(dtype)
    mean = token_mean(key, key_mask)
    return (
        count_tokens(query, query_mask),
        sum_of_squares(query, query_mask),
        count_tokens(key, key_mask),
        mean,
        sum_of_squares(key, key_mask, mean),
    )


def head_temperatures(
    query: Tensor, key: Tensor, key_mask: Tensor | None, criterion: str
) -> tuple[Tensor, Tensor]:
    """`temperatures` of `head_moments`, which stay NumPy arrays where nobody traces the call."""
    width, groups = query.shape[-1], query.shape[1] // max(key.shape[1], 1)
    if key_mask is None and is_untraced_on_cpu(query, key):
        # Infinity in the inputs shows in the result.
        with np.errstate(all="ignore"):
            sums = _plain_sums(query.detach(), key.detach())
            found: Any = moments_of_sums(np, *sums, width=width, groups=groups)
            found = _spreads(np, *found, head_width=width, criterion=criterion)
        if all(np.isfinite(side).all() for side in found):
            alpha, beta = (torch.from_numpy(side[..., None, None]) for side in found)
            return alpha, beta
    return matched(head_moments, query, key, key_mask, criterion=criterion)


def _plain_sums(query: Tensor, key: Tensor) -> tuple[Any, ...]:
    """What `moments_of_sums` takes: NumPy arrays, and two plain numbers of tokens.

    Keys are read twice, not three times: Σ(k − μ)² = Σk² − S·μ². In a head whose mean is larger
    than its spread this would lose digits, and its keys are centred first.
    """
    dtype = accumulation_dtype(query.dtype)
    if query.dtype != dtype:
        query, key = query.to(dtype), key.to(dtype)
    queries, (keys, width) = query.shape[2], key.shape[2:]
    mean = key.sum(-2).numpy() / max(keys, 1)
    of_query, of_key = _squares_of_rows(query), _squares_of_rows(key)
    of_mean = np.square(mean).sum(-1)
    middle = of_mean * keys
    around, is_safe = of_key - middle, 2 * middle <= of_key
    if not is_safe.all():
        centre = torch.from_numpy(mean)[:, :, None]
        around = np.where(is_safe, around, sum_of_squares(key, None, centre).numpy())
    return of_query, around, of_mean / width, queries, keys


def _squares_of_rows(tensor: Tensor) -> Any:
    """Sum of the squares of all tokens, ``[B, H]``, as a NumPy array."""
    tokens, width = tensor.shape[2:]
    if tensor.stride()[2:] == (width, 1):
        together = math.gcd(tokens, max(ROW // width, 1))
        tensor = tensor.view(*tensor.shape[:2], tokens // together, together * width)
    # NumPy adds the rows in pairs.
    return np.square(torch.linalg.vector_norm(tensor, dim=-1).numpy()).sum(-1)


def moments_of_sums(
    xp: Any,
    query_squares: Any,
    key_squares: Any,
    mean_size: Any,
    queries: Any,
    keys: Any,
    width: int,
    groups: int,
) -> tuple[Any, ...]:
    """`Moments` from sums of squares and the mean square of the mean key, ``[B, H or Hk]``.

    Numbers of tokens are ``[B, 1]``, or one number each.
    """
    query_variance = query_squares / (_at_least(queries, 1) * width)
    key_variance = key_squares / (_at_least(keys, 1) * width)
    key_size = key_variance + mean_size
    if groups > 1:
        repeat = xp.repeat if xp is np else xp.repeat_interleave
        key_variance, key_size = repeat(key_variance, groups, 1), repeat(key_size, groups, 1)
    floor = SPREAD_FLOOR**2
    degenerate = query_variance < floor * _at_least(query_variance, 1.0)
    degenerate = degenerate | (key_variance < floor * _at_least(key_size, 1.0))
    return query_variance, key_variance, keys, degenerate


def _at_least(side: Any, least: float) -> Any:
    """The entries of an array or a tensor, or a number; ``least`` where they are smaller."""
    if isinstance(side, Tensor):
        return side.clamp_min(least)
    return np.maximum(side, least) if isinstance(side, np.ndarray) else max(side, least)


def on_few_numbers(function: Callable[..., Any], sides: Sequence[Any], *rest: Any) -> Any:
    """``function(module, *arrays, *rest)`` with NumPy on a CPU where values can be read.

    Dozens of operations on a few numbers: PyTorch takes five times as long to start each of them.

    Args:
        function: Takes ``numpy`` or ``torch``, then arrays or tensors; returns a tuple of them.
        sides: NumPy arrays, or tensors of one device, without gradients.
        rest: Passed on.
    """
    first = sides[0]
    if isinstance(first, Tensor):
        if first.device.type != "cpu" or not values_are_readable(first):
            return function(torch, *sides, *rest)
        sides = [side.numpy() for side in sides]
    with np.errstate(all="ignore"):
        found = function(np, *sides, *rest)
    return tuple(torch.from_numpy(np.ascontiguousarray(side)) for side in found)


def tensor_moments(query: Tensor, key: Tensor, key_mask: Tensor | None = None) -> Moments:
    """The authors' statistic: one unbiased standard deviation of the whole tensor; ``[1, 1]``."""
    dtype = accumulation_dtype(query.dtype)
    query, key = query.detach().to(dtype), key.detach().to(dtype)
    keys = count_tokens(key, key_mask).mean(0, keepdim=True)
    query_mask = key_mask if key_mask is not None and query.shape[2] == key.shape[2] else None
    query_variance, query_mean = _tensor_variance(query, query_mask)
    key_variance, key_mean = _tensor_variance(key, key_mask)
    sizes = query_variance + query_mean.square(), key_variance + key_mean.square()
    return Moments(
        query_variance, key_variance, keys, is_degenerate(query_variance, key_variance, *sizes)
    )


def packed_moments(query: Tensor, key: Tensor, cu_seqlens: Tensor) -> Moments:
    """Statistics of every packed sequence and head: ``[n, H]`` each.

    Args:
        query: ``[T, H, D]``.
        key: ``[T, Hk, D]``.
        cu_seqlens: int64 ``[n + 1]``.
    """
    dtype = accumulation_dtype(query.dtype)
    query, key = query.detach().to(dtype), key.detach().to(dtype)
    key = key.repeat_interleave(query.shape[1] // max(key.shape[1], 1), 1)
    sequences = cu_seqlens.shape[0] - 1
    token = torch.arange(query.shape[0], device=query.device)
    home = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    keys = cu_seqlens.diff().to(dtype).unsqueeze(-1)
    count = keys.clamp_min(1)

    def per_sequence(rows: Tensor) -> Tensor:
        return rows.new_zeros(sequences, *rows.shape[1:]).index_add(0, home, rows)

    mean = per_sequence(key) / count.unsqueeze(-1)
    query_variance = per_sequence(query.square().mean(-1)) / count
    key_variance = per_sequence((key - mean[home]).square().mean(-1)) / count
    key_size = key_variance + mean.square().mean(-1)
    return Moments(
        query_variance,
        key_variance,
        keys,
        is_degenerate(query_variance, key_variance, query_variance, key_size),
    )


def matched(
    measure: Callable[..., Moments], query: Tensor, key: Tensor, *rest: Any, criterion: str
) -> tuple[Tensor, Tensor]:
    """`temperatures` of ``measure(query, key, *rest)``, in float64 where squares overflow."""
    found = temperatures(measure(query, key, *rest), query.shape[-1], criterion)
    if found[0].dtype != torch.float64 and values_are_readable(found[0]):
        lost = ~(found[0].isfinite() & found[1].isfinite())
        if lost.any():
            wide = matched(measure, query.double(), key.double(), *rest, criterion=criterion)
            for side, again in zip(found, wide, strict=True):
                side[lost] = again[lost].to(side.dtype)
    return found


def temperatures(moments: Moments, head_width: int, criterion: str) -> tuple[Tensor, Tensor]:
    """Eq. (10): α = s/σq, β = s/σk, shaped ``[B, H, 1, 1]``; 1 where the moments are degenerate."""
    alpha, beta = on_few_numbers(_spreads, moments, head_width, criterion)
    return alpha[..., None, None], beta[..., None, None]


def _spreads(
    xp: Any,
    query_variance: Any,
    key_variance: Any,
    keys: Any,
    degenerate: Any,
    head_width: int,
    criterion: str,
) -> tuple[Any, Any]:
    """α and β of `Moments`, in their shape; the number of keys may be one number."""
    # Whether there is any can be asked of an array only; a traced tensor has no answer.
    is_any = xp is torch or degenerate.any()
    if is_any:
        query_variance = xp.where(degenerate, 1.0, query_variance)
        key_variance = xp.where(degenerate, 1.0, key_variance)
    spread = matched_spread(query_variance * key_variance, head_width, keys, criterion)
    alpha, beta = spread / xp.sqrt(query_variance), spread / xp.sqrt(key_variance)
    if is_any:
        alpha, beta = xp.where(degenerate, 1.0, alpha), xp.where(degenerate, 1.0, beta)
    return alpha, beta


def count_tokens(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Number of valid tokens of every sample, ``[B, 1]``."""
    if mask is None:
        return tensor.new_full((tensor.shape[0], 1), tensor.shape[2])
    return mask.sum(-1, keepdim=True, dtype=tensor.dtype)


def sum_of_squares(tensor: Tensor, mask: Tensor | None, centre: Tensor | None = None) -> Tensor:
    """Sum of the squares of the valid tokens, less the centre ``[B, H, 1, D]``: ``[B, H]``."""
    if tensor.device.type == "cpu" and values_are_readable(tensor):
        # One pass per token and nothing as large as the tensor in between: five times faster.
        if centre is None:
            sizes = torch.linalg.vector_norm(tensor, dim=-1)
        else:
            exact = "donot_use_mm_for_euclid_dist"
            sizes = torch.cdist(tensor, centre, compute_mode=exact).squeeze(-1)
        squares = sizes.square()
    else:
        squares = (tensor if centre is None else tensor - centre).square().sum(-1)
    if mask is not None:
        squares = torch.where(mask[:, None], squares, 0.0)
    # Tokens are added in pairs; all entries at once in a norm would round a thousand times more.
    return squares.sum(-1)


def token_mean(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the valid tokens, ``[B, H, 1, D]``."""
    if mask is None:
        return tensor.sum(-2, keepdim=True) / max(tensor.shape[-2], 1)
    tensor = torch.where(mask[:, None, :, None], tensor, 0.0)
    return tensor.sum(-2, keepdim=True) / count_tokens(tensor, mask).clamp_min(1)[..., None, None]


def _tensor_variance(tensor: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Unbiased variance of all valid entries ``[1, 1]``, zero for fewer than two; their mean."""
    if mask is None:
        keep = torch.ones((), dtype=torch.bool, device=tensor.device).expand(tensor.shape)
    else:
        keep = mask[:, None, :, None].expand(tensor.shape)
    count = keep.sum(dtype=tensor.dtype)
    mean = torch.where(keep, tensor, 0.0).sum() / count.clamp_min(1)
    total = torch.where(keep, tensor - mean, 0.0).square().sum()
    return (total / (count - 1).clamp_min(1)).reshape(1, 1), mean


def is_degenerate(
    query_variance: Tensor, key_variance: Tensor, query_size: Tensor, key_size: Tensor
) -> Tensor:
    """Where a spread is no larger than the rounding error of entries with that mean square.

    NaN and infinity count as healthy, so that they show in the result: hence ``<``, not ``<=``.
    """
    floor = SPREAD_FLOOR**2
    pairs = ((query_variance, query_size), (key_variance, key_size))
    first, second = (variance < floor * size.clamp_min(1.0) for variance, size in pairs)
    return first | second
