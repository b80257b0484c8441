"""Checks that only attention to pages needs.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, r width, P pages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.checks.arguments import check_count
from lln.checks.call import Call
from lln.checks.tensors import check_tensor, shape_of, wrong_device
from lln.errors import InvalidInputError


def check_last_queries(query: Tensor, key: Tensor, what: str) -> None:
    """Refuse more queries than keys, whose last tokens the queries of a causal call are."""
    if query.shape[-2] > key.shape[-2]:
        raise InvalidInputError(
            f"{what} takes the queries of a causal call as the last of the keys' tokens, got T = "
            f"{query.shape[-2]} and S = {key.shape[-2]}; give the keys of all tokens up to the "
            "last query."
        )


def check_pages(call: Call) -> None:
    """Refuse sizes that are none, numbers of pages or tensors to choose by of other shapes."""
    check_count("sinks", call.sinks, 0)
    check_count("page_size", call.page_size)
    _check_numbers(call)
    choice: Any = (call.choice_query, call.choice_key)
    if choice[0] is choice[1] is None:
        return
    for name, side, other in zip(("query", "key"), choice, (call.query, call.key), strict=True):
        check_tensor(f"the {name} of choice", side)
        if side.dim() != other.dim() or side.shape[:-1] != other.shape[:-1]:
            raise InvalidInputError(
                f"the {name} of choice must have the shape of {name} up to its width, got "
                f"{shape_of(side)} and {shape_of(other)}."
            )
        if not side.is_floating_point() or side.device != other.device:
            raise InvalidInputError(
                f"the {name} of choice must hold floating-point numbers on the device of {name}, "
                f"got {side.dtype} on {side.device}."
            )
    if choice[0].shape[-1] != choice[1].shape[-1]:
        raise InvalidInputError(
            f"choice must hold queries and keys of one width, got {choice[0].shape[-1]} and "
            f"{choice[1].shape[-1]}."
        )


def _check_numbers(call: Call) -> None:
    pages = call.keys
    if not isinstance(pages, Tensor):
        check_count("pages", pages, 0)
        return
    check_tensor("pages", pages, "a number, or pages in an int32 or int64 tensor")
    if pages.dtype not in (torch.int32, torch.int64):
        raise InvalidInputError(f"pages must be a number, int32 or int64, got {pages.dtype}.")
    if call.bounds is not None:
        raise InvalidInputError(
            "pages of packed sequences must be a number, got a tensor; call page_attention once "
            "per sequence to give pages."
        )
    batch, heads, tokens = call.query.shape[0], call.key.shape[1], call.query.shape[2]
    if pages.dim() != 4 or tuple(pages.shape[:3]) != (batch, heads, tokens):
        raise InvalidInputError(
            f"pages must be numbers [B, Hk, T, P] = [{batch}, {heads}, {tokens}, P] as "
            f"lln.choose_pages returns them, got shape {shape_of(pages)}."
        )
    if pages.device != call.query.device:
        raise wrong_device("pages", pages, call.query.device)
