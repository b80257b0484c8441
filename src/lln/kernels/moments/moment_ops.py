"""Moments, α and β by the kernels: `fused_moments` and its operator.

Dimension legend: B batch, H query heads, Hk key heads, D head width, n packed sequences.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lln.kernels.launching.operators import operator
from lln.kernels.launching.shapes import within_reach
from lln.matching.curves import spread_curve
from lln.tracing import is_watched


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
    rest = (key_mask, bounds, criterion, longest)
    if is_watched(query):
        return match(query.detach(), key.detach(), *rest)
    # No detach needed: autograd does not see kernels.
    return statistics(query, key, *rest)


def statistics(query: Tensor, *rest: Any) -> Tensor:
    """The same, from the arguments of `match`."""
    from lln.kernels.moments import launch_moments

    key, key_mask, bounds, criterion, longest = rest
    curve = curve_of(query.shape[-1], criterion)
    return launch_moments.match(query, key, key_mask, bounds, curve, longest)


# Never traced: a compiled call goes through the operator.
curve_of = cache(spread_curve)


def _fake(
    query: Tensor, key: Tensor, key_mask: Tensor | None, bounds: Tensor | None, *_: object
) -> Tensor:
    samples = query.shape[0] if bounds is None else bounds.shape[0] - 1
    return query.new_empty((5, samples, query.shape[1], 1, 1), dtype=torch.float32)


match = operator(
    "match",
    "Tensor query, Tensor key, Tensor? key_mask, Tensor? bounds, str criterion, int longest",
    statistics,
    _fake,
)
