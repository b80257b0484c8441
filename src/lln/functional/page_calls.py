"""Calls with pages: what is missing is chosen.

Dimension legend: as in `lln.checks.call`; P pages per query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.checks.call import Call
from lln.eager.infinity import as_nan
from lln.eager.page_choice import Sight, choose_pages
from lln.eager.page_step import choose_step
from lln.kernels.pages.page_ops import fused_page_choice
from lln.precision import accumulation_dtype

# How plain PyTorch goes about a step of decoding: `Prepared.how`.
STEP = "the last token alone"


def with_pages(call: Call, impl: str, is_step: bool = False) -> Call:
    """A dense call with the numbers of its pages in place."""
    if isinstance(call.keys, Tensor):
        return call
    return call.replace(keys=choose_for(call, impl, is_step))


def choose_for(call: Call, impl: str, is_step: bool = False) -> Tensor:
    """The pages that a dense call asks for by number: ``[B, Hk, T, P]``.

    ``is_step`` lets plain PyTorch choose for the last token alone (`lln.eager.page_step`).
    """
    query = call.query if call.choice_query is None else call.choice_query
    key = call.key if call.choice_key is None else call.choice_key
    if impl == "triton":
        return fused_page_choice(query, key, call.keys, scale=call.factor, **call.sight)
    if is_step:
        return choose_step(query.detach(), key.detach(), call.keys, Sight.of(call), call.factor)
    dtype = accumulation_dtype(query.dtype)
    query, key = query.detach().to(dtype), as_nan(key.detach().to(dtype))
    if call.key_mask is not None:
        key = torch.where(call.key_mask[:, None, :, None], key, 0.0)
    # A choice by another width is made by scores of its own, whose order the scale keeps.
    return choose_pages(query, key, call.keys, Sight.of(call), call.factor)
