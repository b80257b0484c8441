"""Attention to a window, sinks and chosen pages: operators and gradients.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width, E value
width, P pages per query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lln.kernels.launching.operators import Operation, call, operator, with_gradients
from lln.kernels.launching.shapes import output_like, within_reach
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

    Queries ``[B, H, T, r]`` and keys ``[B, Hk, S, r]`` are those by which pages are scored; window,
    sinks, pages' size and mask are those of a `lln.kernels.pages.launch_page_choice.Near`. The last
    query is the last key's. Of the scores' factor only its sign decides.
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


def fused_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    *,
    window: int,
    sinks: int,
    page_size: int,
    key_mask: Tensor | None,
    is_causal: bool,
    scale: float | None = None,
) -> Tensor:
    """Softmax over window, sinks and chosen pages: ``[B, H, T, E]`` in the dtype of query.

    ``indices`` are ``[B, Hk, T, P]``, as `fused_page_choice` returns them: no page twice; -1 =
    none. Without a scale it is 1/√D; everything else is as there.
    """
    query, key, value = within_reach(query), within_reach(key), within_reach(value)
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
    indices = indices.detach().to(torch.int32).contiguous()
    numbers = (window, min(sinks, key.shape[2]), page_size, is_causal, factor)
    return call(_OPERATION, attend_pages, query, key, value, indices, key_mask, *numbers)


def _pages_call(inputs: Sequence[Any]) -> Any:
    from lln.kernels.pages.launch_page_choice import Near
    from lln.kernels.pages.launch_pages import PagesCall

    query, key, value, indices, mask, *numbers, scale = inputs
    return PagesCall(query, key, value, indices, Near(mask, *numbers), scale)


def _attend(*inputs: Any) -> tuple[Tensor, ...]:
    from lln.kernels.pages import launch_pages

    return launch_pages.attend_pages(_pages_call(inputs))


def _gradients(
    gradients: Sequence[Tensor], inputs: Sequence[Any], kept: Sequence[Tensor], _: Any
) -> tuple[Tensor, ...]:
    from lln.kernels.pages import launch_pages

    lists = launch_pages.PageLists(*kept[2:])
    given, gradient = _pages_call(inputs), within_reach(gradients[0])
    return launch_pages.page_gradients(given, kept[0], kept[1], lists, gradient)


def _fake(*inputs: Any) -> tuple[Tensor, ...]:
    from lln.kernels.pages.launch_pages import list_shapes

    query, value = inputs[0], inputs[2]
    shapes = list_shapes(_pages_call(inputs))
    lists = [query.new_empty(shape, dtype=torch.int32) for shape in shapes]
    norm = query.new_empty(query.shape[:3], dtype=torch.float32)
    return output_like(query, value.shape[-1]), norm, *lists


# Kept: the output, the logarithms of the normalisers, and the queries of every page.
_OPERATION = Operation(
    5, _attend, _gradients, of=(0, 1, 2), kept=slice(0, 7), alike=lambda *_: (0, 1, 2)
)
attend_pages = with_gradients(
    "attend_pages",
    "Tensor query, Tensor key, Tensor value, Tensor indices, Tensor? key_mask, int window, "
    "int sinks, int page_size, bool causal, float scale",
    _OPERATION,
    _fake,
    results=7,
)
