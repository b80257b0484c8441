"""The N×N reference as a way: matrices in float64, for every kind of attention.

Dimension legend: as in `lln.checks.call`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lln import reference
from lln.checks.call import Call
from lln.eager.run import join, repeat_heads, repeat_temperature, widen
from lln.functional.one_by_one import NUMBERS, as_sample, of_sequence, one_by_one
from lln.functional.page_calls import with_pages
from lln.functional.way import ATTENTIONS, Prepared, Way


class Reference(Way):
    """N×N matrices in float64: what every other way is compared with."""

    name = "the reference"
    impl = "reference"
    kinds = (*ATTENTIONS, "moments", "temperatures")
    is_automatic = False

    def describe(self, prepared: Prepared) -> str:
        """A sentence on what computes a prepared call."""
        return "The N×N reference computes the call in float64."

    def attend_packed(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_packed`."""
        if call.kind == "lln_keys":
            return _keys_one_by_one(call)
        return one_by_one(call, lambda own: self.attend_dense(own, prepared))

    def attend_dense(self, call: Call, prepared: Prepared) -> Tensor:
        """See `Way.attend_dense`."""
        return _attend(with_pages(call, self.impl) if call.kind == "pages" else call)


def _attend(call: Call) -> Tensor:
    query, key, value = widen(*call.qkv, call.key_mask, call.dropout_p)
    heads = query.shape[1]
    key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    alpha, beta, offset = (
        repeat_temperature(side, heads, torch.float64)
        for side in (call.alpha, call.beta, call.offset)
    )
    sides, keep = (query, key, value), _kept_pairs(call)
    options: dict[str, Any] = {"keep": keep, "scale": call.scale}
    if call.kind == "pages":
        pages = repeat_heads(call.keys, heads)
        options["keep"] = reference.page_pairs(pages, key.shape[2], **call.sight)
        out = reference.softmax_attention(*sides, **options)
    elif call.kind == "lln_keys":
        form = (query.shape[2], call.block_size, call.group_size)
        exact = reference.exact_pairs(call.keys, *form, keep=keep)
        out = reference.lln_keys_attention(*sides, alpha, beta, exact, offset, **options)
    elif call.kind == "window":
        options["is_causal"] = call.is_causal
        out = reference.window_attention(*sides, call.window, **options)
    else:
        parts = []
        if call.kind != "diag":
            parts.append(reference.lln_attention(*sides, alpha, beta, keep=keep))
        if call.kind != "lln":
            parts.append(reference.block_diagonal_attention(*sides, call.block_size, **options))
        out = parts[0] if len(parts) == 1 else join(parts[0], parts[1], call.mix)
    return out.to(call.query.dtype)


def _kept_pairs(call: Call) -> Tensor | None:
    """Which pairs count: bool ``[B, 1, T, S]``; None = all. Pages say it themselves."""
    if call.kind == "pages":
        return None
    tokens, mask = call.query.shape[2], call.key_mask
    keep = None if mask is None else mask[:, None, None, :].expand(-1, 1, tokens, -1)
    if not call.is_causal:
        return keep
    earlier = reference.causal_keep(tokens, call.query.device)
    return earlier if keep is None else keep & earlier


def _keys_one_by_one(call: Call) -> Tensor:
    """Packed sequences ``[T, H, E]`` with exact keys, whose indices are counted from the first."""
    assert call.bounds is not None
    whole, rows = as_sample(call), call.block_size // call.group_size
    outs, block = [], 0
    for number, (start, end) in enumerate(pairwise(call.bounds.tolist())):
        count = -(-(end - start) // call.block_size)
        chosen = call.keys[None, :, block * rows : (block + count) * rows]
        chosen = torch.where((chosen >= start) & (chosen < end), chosen - start, -1)
        block += count
        own = {name: of_sequence(getattr(call, name), number) for name in NUMBERS}
        query, key, value = (side[:, :, start:end] for side in whole.qkv)
        own |= {"query": query, "key": key, "value": value}
        dense = whole.replace(**own, keys=chosen, bounds=None, longest=None)
        outs.append(_attend(dense)[0].transpose(0, 1))
    return torch.cat(outs)
