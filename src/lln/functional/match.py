"""Moments and matched temperatures α and β, by the implementation that was chosen.

Both implementations give the statistics of `lln.matching.moments`; the kernel reads q and k once.

Dimension legend: as in `lln.checks.call`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from lln.checks.call import Call
from lln.cpu.compiled_matching import compiled_temperatures
from lln.kernels.moments.moment_ops import fused_moments
from lln.matching.moments import (
    Moments,
    head_moments,
    head_temperatures,
    matched,
    packed_moments,
    tensor_moments,
)


def with_temperatures(call: Call, impl: str) -> Call:
    """A call without exact keys, or with ``matching="paper"``, with α and β in place."""
    if call.alpha is not None or not call.has_temperatures:
        return call
    inputs, matching = (call.query, call.key), call.matching
    if call.bounds is None:
        alpha, beta = match_inputs(*inputs, matching, call.key_mask, impl)
    else:
        alpha, beta = match_packed(*inputs, call.bounds, call.longest or 0, matching, impl)
    return call.replace(alpha=alpha, beta=beta)


def match_inputs(
    query: Tensor, key: Tensor, matching: str, key_mask: Tensor | None, impl: str
) -> tuple[Tensor, Tensor]:
    """α and β for an entry point's ``matching``: ``[B, H, 1, 1]``; one value for ``"paper"``.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, S, D]``.
        matching: ``"variance"``, ``"entropy"`` or ``"paper"``.
        key_mask: bool ``[B, S]`` or None.
        impl: The implementation chosen: ``"triton"`` uses the kernel, ``"cpu"`` the compiled
            passes, and ``"reference"`` measures in float64.
    """
    query, key = _measured(query, key, impl)
    if matching == "paper":
        return matched(tensor_moments, query, key, key_mask, criterion=matching)
    if impl == "triton":
        results = fused_moments(query, key, key_mask, None, matching, 0)
        return results[0], results[1]
    if impl == "cpu":
        return compiled_temperatures(query, key, key_mask, matching)
    return head_temperatures(query, key, key_mask, matching)


def _measured(query: Tensor, key: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    """What an implementation measures: the reference in float64."""
    return (query.double(), key.double()) if impl == "reference" else (query, key)


def match_packed(
    query: Tensor, key: Tensor, cu_seqlens: Tensor, longest: int, matching: str, impl: str
) -> tuple[Tensor, Tensor]:
    """`match_inputs` of packed sequences: ``[n, H, 1, 1]``, or one value for ``"paper"``.

    Inputs are ``[T, H, D]``; ``longest`` is the length of the longest sequence, or more.
    """
    if matching != "paper" and impl == "cpu":
        return _match_in_turn(query, key, cu_seqlens, matching)
    if matching != "paper" and impl != "triton":
        query, key = _measured(query, key, impl)
        return matched(packed_moments, query, key, cu_seqlens.long(), criterion=matching)
    query, key = query.transpose(0, 1)[None], key.transpose(0, 1)[None]
    if matching == "paper":
        return match_inputs(query, key, matching, None, impl)
    results = fused_moments(query, key, None, cu_seqlens, matching, longest)
    return results[0], results[1]


def _match_in_turn(
    query: Tensor, key: Tensor, cu_seqlens: Tensor, matching: str
) -> tuple[Tensor, Tensor]:
    """α and β of packed sequences by compiled passes; 1 where there are no tokens."""
    alpha = query.new_ones(cu_seqlens.shape[0] - 1, query.shape[1], 1, 1, dtype=torch.float32)
    beta = alpha.clone()
    for index, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        if start < end:
            own_query, own_key = (side[start:end].transpose(0, 1)[None] for side in (query, key))
            found = compiled_temperatures(own_query, own_key, None, matching)
            alpha[index], beta[index] = found[0][0], found[1][0]
    return alpha, beta


def measure_heads(query: Tensor, key: Tensor, key_mask: Tensor | None, impl: str) -> Moments:
    """`lln.matching.moments.head_moments`, by the kernel if it was chosen."""
    if impl != "triton":
        query, key = _measured(query, key, impl)
        return head_moments(query, key, key_mask)
    results = fused_moments(query, key, key_mask, None, "variance", 0)
    _, _, query_variance, key_variance, flat = results.flatten(2)
    if key_mask is None:
        keys = query_variance.new_full((query.shape[0], 1), key.shape[2])
    else:
        keys = key_mask.sum(-1, keepdim=True, dtype=torch.float32)
    return Moments(query_variance, key_variance, keys, flat > 0)
