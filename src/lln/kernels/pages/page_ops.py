"""Attention to a window, sinks and chosen pages: operators and gradients.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width, E value
width, P pages per query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.kernels.launching.operators import operator
from lln.kernels.launching.shapes import within_reach
from lln.tracing import is_watched


def fused_page_choice(
    query: Tensor,
    key: Tensor,
    pages: int,
    *,
    window: int,
    sinks: int,
    page_size: int,
    key_mask: Tensor | None,
    is_causal: bool,
    scale: float = 1.0,
) -> Tensor:
    """The pages of every query by their best token: int32 ``[B, Hk, T, P]``, ascending; -1 = none.

    Args:
        query: ``[B, H, T, r]``, the queries by which pages are scored.
        key: ``[B, Hk, S, r]``.
        pages: P.
        window: Tokens on a side that every query sees.
        sinks: First valid tokens that every query sees.
        page_size: Tokens of a page.
        key_mask: bool ``[B, S]`` or None.
        is_causal: Whether a query sees only its own and earlier tokens; the last one is the last
            key's.
        scale: Factor of the scores; only its sign decides.
    """
    query, key = within_reach(query.detach()), within_reach(key.detach())
    if scale <= 0:
        query = query * (0 if scale == 0 else -1)
    numbers = (window, min(sinks, key.shape[2]), page_size, is_causal)
    arguments = (query, key, key_mask, *numbers, pages)
    return choose_pages(*arguments) if is_watched(query) else _choose(*arguments)


def _choose(query: Tensor, key: Tensor, mask: Tensor | None, *numbers: Any) -> Tensor:
    from lln.kernels.pages.launch_page_choice import Near, choose_pages

    return choose_pages(query, key, Near(mask, *numbers[:-1]), numbers[-1])


def _fake_choice(query: Tensor, key: Tensor, _: Tensor | None, *numbers: Any) -> Tensor:
    shape = (query.shape[0], key.shape[1], query.shape[2], numbers[-1])
    return query.new_empty(shape, dtype=torch.int32)


choose_pages = operator(
    "choose_pages",
    "Tensor query, Tensor key, Tensor? key_mask, int window, int sinks, int page_size, "
    "bool causal, int pages",
    _choose,
    _fake_choice,
)
