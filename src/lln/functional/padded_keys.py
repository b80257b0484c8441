"""Packed calls with exact keys by the kernels, which take dense samples with a key mask.

Sequences of similar length are padded to one batch and run as a dense call does. Blocks are
counted from the first valid token, so they are those of the packed sequence. What a dense call
matches and chooses it matches and chooses for every sample, so each sequence gets its own.

Dimension legend: as in `lln.checks.call`; b sequences in a group, L tokens of its longest,
G groups of queries, K keys per group of queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lln.checks.bounds import read_bounds
from lln.checks.call import Call
from lln.eager.padding import Padding, pad_sequences
from lln.functional.key_calls import complete
from lln.functional.match import with_temperatures
from lln.functional.one_by_one import NUMBERS
from lln.kernels.launching.limits import MAX_GRID
from lln.observers import announce_call, is_observed


class PaddedCall(NamedTuple):
    """A packed call as dense ones.

    Attributes:
        packed: The call itself, with the temperatures that all sequences share.
        padding: Where its tokens went.
        groups: A completed dense call for every group of sequences.
    """

    packed: Call
    padding: Padding
    groups: list[Call]

    def as_completed(self) -> Call:
        """The packed call with α, β, the offset and the chosen keys of the groups.

        An empty sequence has neither: its α and β are 1, as for moments without any spread.
        """
        packed = self.packed
        joined = {
            name: self._joined([getattr(group, name) for group in self.groups], fill)
            if getattr(packed, name) is None
            else getattr(packed, name)
            for name, fill in (("alpha", 1.0), ("beta", 1.0), ("offset", 0.0))
        }
        return packed.replace(**joined, keys=self._indices())

    def _joined(self, parts: list[Tensor], fill: float) -> Tensor:
        """``[b, H, 1, 1]`` of every group → ``[n, H, 1, 1]``."""
        joined, empty = self.padding.join(parts), self.padding.restored.empty
        return joined if empty is None else joined.index_fill(0, empty, fill)

    def _indices(self) -> Tensor:
        """The chosen keys as packed calls number them, int64 ``[H, G, K]``.

        A group without any query has none.
        """
        packed, bounds = self.packed, self.packed.bounds
        assert bounds is not None
        assert isinstance(packed.keys, int)
        size, rows = packed.block_size, packed.block_size // packed.group_size
        tokens, heads, _ = packed.query.shape
        sequences = bounds.shape[0] - 1
        blocks = [0, *((bounds.diff() + size - 1) // size).cumsum(0).tolist()]
        shape = (heads, (tokens // size + sequences) * rows, min(packed.keys, tokens))
        found = torch.full(shape, -1, dtype=torch.int64, device=packed.query.device)
        for group, own in zip(self.padding.groups, self.groups, strict=True):
            chosen = own.keys.long()
            own_tokens = zip(group.sequences, group.lengths, strict=True)
            for sample, (sequence, length) in enumerate(own_tokens):
                first, count = blocks[sequence] * rows, -(-length // packed.group_size)
                here = chosen[sample, :, :count]
                here = torch.where(here < 0, -1, here + bounds[sequence])
                found[:, first : first + count, : here.shape[2]] = here
        return found


def attend_padded(call: Call, impl: str, attend: Callable[[Call], Tensor]) -> Tensor:
    """``[T, H, E]`` of a packed call with at least one token; waits for the bounds' values.

    ``impl`` matches and chooses, ``attend`` computes dense calls in which nothing is missing.
    """
    padded = pad_call(call, impl)
    if is_observed():
        announce_call(padded.as_completed())
    return padded.padding.unpad([attend(group) for group in padded.groups])


def pad_call(call: Call, impl: str) -> PaddedCall:
    """Lay out a packed call with at least one token as dense ones, and complete those."""
    assert call.bounds is not None
    assert isinstance(call.keys, int)
    tokens, heads, _ = call.query.shape
    padding = pad_sequences(
        read_bounds(call.bounds, tokens),
        call.block_size,
        # The kernels have the heads of all samples along an axis of their grids.
        max(1, MAX_GRID // (heads + call.key.shape[1])),
        call.query.device,
    )
    if call.matching == "paper":
        # One statistic over the tokens of all sequences.
        call = with_temperatures(call, impl)
    sides = zip(*(padding.pad(side) for side in call.qkv), strict=True)
    numbers = zip(*(padding.divide(getattr(call, name)) for name in NUMBERS), strict=True)
    groups = []
    for group, (query, key, value), own in zip(padding.groups, sides, numbers, strict=True):
        parts = dict(zip(NUMBERS, own, strict=True)) | {"query": query, "key": key, "value": value}
        dense = call.replace(**parts, key_mask=group.mask, bounds=None, longest=None)
        groups.append(complete(dense, impl))
    return PaddedCall(call, padding, groups)
