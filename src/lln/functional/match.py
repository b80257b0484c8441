"""Moments and matched temperatures, by the fused kernel where it runs, else in plain PyTorch.

Both give the statistics of `lln.matching`; the kernel reads q and k once.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width, n packed
sequences.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from lln.eager.workers import cut_heads, over_threads
from lln.kernels.shapes import within_reach
from lln.kernels.sizes import is_interpreted, why_unavailable
from lln.matching.curves import spread_curve
from lln.matching.moments import Moments, head_moments, match_moments, packed_moments, temperatures
from lln.tracing import is_watched

# Where query, key and the key mask can be cut into heads or samples.
_AXES = {"heads": (-3, -3, None), "samples": (-4, -4, -2)}


def match_inputs(
    query: Tensor, key: Tensor, matching: str, key_mask: Tensor | None, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """α and β for an entry point's ``matching``: ``[B, H, 1, 1]``, or one for all of ``"paper"``.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, S, D]``.
        matching: ``"variance"``, ``"entropy"`` or ``"paper"``.
        key_mask: bool ``[B, S]`` or None.
        impl: ``"triton"`` takes the kernel, ``"auto"`` takes it on a GPU where it runs.
    """
    if matching != "paper" and _takes_kernel(query, impl):
        results = fused_moments(query, key, key_mask, None, matching, 0)
        return results[0], results[1]
    if matching == "paper":
        return match_moments(query, key, criterion=matching, scope="tensor", key_mask=key_mask)
    match = partial(match_moments, criterion=matching, scope="head")
    cut = cut_heads(query, key, _AXES)
    if cut is None:
        return match(query, key, key_mask=key_mask)

    def job(index: int) -> tuple[Tensor, Tensor]:
        query_part, key_part, mask = cut.pieces_of((query.detach(), key.detach(), key_mask), index)
        with torch.no_grad():
            return match(query_part, key_part, key_mask=mask)

    found = over_threads([partial(job, index) for index in range(cut.pieces)])
    alpha, beta = (torch.cat(parts, cut.axes[0] or 0) for parts in zip(*found, strict=True))
    return alpha, beta


def match_packed(
    query: Tensor, key: Tensor, cu_seqlens: Tensor, longest: int, matching: str, impl: str
) -> tuple[Tensor, Tensor]:
    """α and β of packed sequences ``[T, H, D]``: ``[n, H, 1, 1]``, or one for all of ``"paper"``.

    Args:
        query: ``[T, H, D]``.
        key: ``[T, Hk, D]``.
        cu_seqlens: ``[n + 1]``.
        longest: No sequence is longer.
        matching: As in `match_inputs`.
        impl: As in `match_inputs`.
    """
    if matching != "paper" and impl == "triton":
        query, key = query.transpose(0, 1)[None], key.transpose(0, 1)[None]
        results = fused_moments(query, key, None, cu_seqlens, matching, longest)
        return results[0], results[1]
    whole = cu_seqlens[[0, -1]] if matching == "paper" else cu_seqlens
    moments = packed_moments(query, key, whole.long(), centred=matching == "paper")
    return temperatures(moments, query.shape[-1], matching)


def measure_heads(query: Tensor, key: Tensor, key_mask: Tensor | None = None) -> Moments:
    """`lln.matching.head_moments`, by the kernel where it runs."""
    if not _takes_kernel(query, "auto"):
        return head_moments(query, key, key_mask)
    results = fused_moments(query, key, key_mask, None, "variance", 0)
    _, _, query_variance, key_variance, flat = results.flatten(2)
    if key_mask is None:
        keys = query_variance.new_full((query.shape[0], 1), key.shape[2])
    else:
        keys = key_mask.sum(-1, keepdim=True, dtype=torch.float32)
    return Moments(query_variance, key_variance, keys, flat > 0)


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
        return match(query.detach(), key.detach(), key_mask, bounds, criterion, longest)
    # Autograd does not see kernels: nothing to detach from.
    return _match(query, key, key_mask, bounds, criterion, longest)


@torch.library.custom_op("lln::match", mutates_args=())
def match(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    bounds: Tensor | None,
    criterion: str,
    longest: int,
) -> Tensor:
    """`fused_moments` as an operator."""
    return _match(query, key, key_mask, bounds, criterion, longest)


@match.register_fake
def _(
    query: Tensor, key: Tensor, key_mask: Tensor | None, bounds: Tensor | None, *_: object
) -> Tensor:
    samples = query.shape[0] if bounds is None else bounds.shape[0] - 1
    return query.new_empty((5, samples, query.shape[1], 1, 1), dtype=torch.float32)


def _match(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    bounds: Tensor | None,
    criterion: str,
    longest: int,
) -> Tensor:
    from lln.kernels.triton import statistics_pass

    return statistics_pass.match(
        query, key, key_mask, bounds, _curve(query.shape[-1], criterion), longest
    )


# Never traced: a compiled call goes through the operator.
_curve = cache(spread_curve)


def _takes_kernel(query: Tensor, impl: str) -> bool:
    if impl != "auto":
        # An entry point has chosen, and what it chose can run.
        return impl == "triton"
    return query.is_cuda and not is_interpreted() and why_unavailable(query) is None
