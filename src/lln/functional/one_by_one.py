"""Packed sequences as dense calls: all as one sample, or one call for each.

Dimension legend: as in `lln.checks.call`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln.checks.call import Call

# Of every sequence.
NUMBERS = ("alpha", "beta", "offset")
# Of every token, where they are there.
CHOICES = ("choice_query", "choice_key")


def as_sample(call: Call) -> Call:
    """Packed ``[T, H, D]`` as the one sample ``[1, H, T, D]``."""
    query, key, value = (side.transpose(0, 1)[None] for side in call.qkv)
    choices = {
        name: None if (side := getattr(call, name)) is None else side.transpose(0, 1)[None]
        for name in CHOICES
    }
    mix = call.mix
    if isinstance(mix, Tensor):
        mix = mix.reshape((1,) * (3 - mix.dim()) + tuple(mix.shape)).transpose(0, 1)[None]
    return call.replace(query=query, key=key, value=value, mix=mix, **choices)


def no_tokens(call: Call) -> Tensor:
    """The output ``[0, H, E]`` for no tokens, still connected to the inputs for autograd."""
    query, key, value = call.qkv
    zero = key.sum() * value.sum()
    for side in (call.alpha, call.beta, call.offset):
        if side is not None:
            zero = zero * (side.sum() if isinstance(side, Tensor) else side)
    rows = query.sum(-1, keepdim=True).expand(-1, -1, value.shape[-1])
    return (rows * zero).to(query.dtype)


def one_by_one(call: Call, attend: Callable[[Call], Tensor]) -> Tensor:
    """A packed call of at least one token, with a dense call ``[1, H, T, E]`` per sequence.

    Reads the bounds.
    """
    assert call.bounds is not None
    whole, outs = as_sample(call), []
    lengths = call.bounds.diff().tolist()
    # Split, because every slice would add a gradient of the whole length; copied, because views
    # that are split off forbid the caller to change the whole afterwards.
    sides = [_copied(side).split(lengths, 2) for side in whole.qkv]
    mixes: Any = [whole.mix] * len(lengths)
    if isinstance(whole.mix, Tensor) and whole.mix.shape[2] > 1:
        mixes = _copied(whole.mix).split(lengths, 2)
    chosen_by = {
        name: side.split(lengths, 2)
        for name in CHOICES
        if (side := getattr(whole, name)) is not None
    }
    for index, (query, key, value, mix) in enumerate(zip(*sides, mixes, strict=True)):
        if lengths[index] == 0:
            continue
        own = {name: of_sequence(getattr(call, name), index) for name in NUMBERS}
        own |= {"query": query, "key": key, "value": value, "mix": mix}
        own |= {name: parts[index] for name, parts in chosen_by.items()}
        dense = whole.replace(**own, bounds=None, longest=None)
        outs.append(attend(dense)[0].transpose(0, 1))
    return torch.cat(outs)


def _copied(side: Tensor) -> Tensor:
    """Head by head and row by row, as the products read it."""
    return side.clone(memory_format=torch.contiguous_format)


def of_sequence(side: Any, index: int) -> Any:
    """α, β or the offset ``[n, H, 1, 1]`` of one packed sequence."""
    if not isinstance(side, Tensor) or side.dim() < 4 or side.shape[0] == 1:
        return side
    return side[index : index + 1]
