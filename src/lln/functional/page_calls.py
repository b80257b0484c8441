"""Calls with pages: what is missing is chosen.

Dimension legend: as in `lln.checks.call`; P pages per query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.checks.call import Call
from lln.cpu.run import choose_pages as choose_compiled
from lln.eager.infinity import as_nan
from lln.eager.page_choice import Sight, choose_pages
from lln.kernels.pages.page_ops import fused_page_choice
from lln.precision import accumulation_dtype


def with_pages(call: Call, impl: str) -> Call:
    """A dense call with the numbers of its pages in place."""
    return call if isinstance(call.keys, Tensor) else call.replace(keys=choose_for(call, impl))


def choose_for(call: Call, impl: str) -> Tensor:
    """The pages that a dense call asks for by number: ``[B, Hk, T, P]``."""
    query = call.query if call.choice_query is None else call.choice_query
    key = call.key if call.choice_key is None else call.choice_key
    if impl == "triton":
        return fused_page_choice(query, key, call.keys, scale=call.factor, **call.sight)
    if impl == "cpu" and query.numel() and call.keys:
        return choose_compiled(call)
    dtype = accumulation_dtype(query.dtype)
    query, key = (as_nan(side.detach().to(dtype)) for side in (query, key))
    if call.key_mask is not None:
        key = torch.where(call.key_mask[:, None, :, None], key, 0.0)
    # A choice by another width is made by scores of its own, whose order the scale keeps.
    return choose_pages(query, key, call.keys, Sight.of(call), call.factor)
