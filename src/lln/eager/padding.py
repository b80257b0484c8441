"""Packed sequences as padded samples, for code that takes dense tensors with a key mask.

Sequences of similar length form a group, a batch that is padded to the longest of them. Tokens are
moved by picking rows, and their gradients by picking rows the other way: nothing is added up, so
bits repeat on every device. The lengths have to be known on the host.

Dimension legend: T packed tokens, P places in all groups, n packed sequences, b sequences in a
group, L tokens of its longest, H heads, D width.
"""

from __future__ import annotations

from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Picks(NamedTuple):
    """Which rows to take.

    Attributes:
        rows: int ``[R]``, the row for every place.
        empty: int, the places that are zero instead; None = there are none.
    """

    rows: Tensor
    empty: Tensor | None


class Group(NamedTuple):
    """Sequences that are padded to one length.

    Attributes:
        sequences: Their numbers, ascending.
        lengths: How many tokens each has.
        longest: L.
        mask: bool ``[b, L]``, which places hold a token; None = all do.
    """

    sequences: list[int]
    lengths: list[int]
    longest: int
    mask: Tensor | None


class Padding(NamedTuple):
    """The groups, and the way of tokens and sequences there and back.

    Attributes:
        groups: Every sequence that has tokens is in one of them.
        inward: For every place of all groups, one after the other, its token.
        outward: For every token its place; None, as for ``inward`` = it is where it was.
        ordered: For every sample of all groups its sequence.
        restored: For every sequence its sample; empty ones have none.
    """

    groups: list[Group]
    inward: Picks | None
    outward: Picks | None
    ordered: Picks
    restored: Picks

    def pad(self, packed: Tensor) -> list[Tensor]:
        """``[T, H, D]`` → ``[b, H, L, D]`` of every group; zero where there is no token."""
        places = packed if self.inward is None else take(packed, self.inward, self.outward)
        shapes = [(len(group.sequences), group.longest) for group in self.groups]
        # A view that is split off would forbid the caller to change the whole afterwards.
        parts = [places]
        if len(shapes) > 1:
            parts = places.split([count * longest for count, longest in shapes])
        return [
            part.unflatten(0, shape).transpose(1, 2)
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def unpad(self, padded: list[Tensor]) -> Tensor:
        """``[b, H, L, E]`` of every group → ``[T, H, E]``."""
        places = _joined([side.transpose(1, 2).flatten(0, 1) for side in padded])
        return places if self.outward is None else take(places, self.outward, self.inward)

    def divide(self, side: Any) -> list[Any]:
        """A number, or ``[n, …]`` → ``[b, …]`` of every group; what all share stays as it is."""
        if not isinstance(side, Tensor) or side.dim() < 4 or side.shape[0] == 1:
            return [side] * len(self.groups)
        counts = [len(group.sequences) for group in self.groups]
        return list(take(side, self.ordered, self.restored).split(counts))

    def join(self, parts: list[Tensor]) -> Tensor:
        """``[b, …]`` of every group → ``[n, …]``; zero for empty sequences."""
        return take(_joined(parts), self.restored, self.ordered)


def take(side: Tensor, there: Picks, back: Picks | None) -> Tensor:
    """Rows of a tensor; ``back`` is what picks their gradients."""
    assert back is not None
    return _Take.apply(side, there, back)


class _Take(torch.autograd.Function):
    """Rows by index; autograd's own gradient of that adds in any order on a GPU."""

    @staticmethod
    def forward(ctx: Any, side: Tensor, there: Picks, back: Picks) -> Tensor:
        ctx.ways = (there, back)
        rows = side.index_select(0, there.rows)
        return rows if there.empty is None else rows.index_fill_(0, there.empty, 0.0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        there, back = ctx.ways
        return _Take.apply(grad_outputs[0], back, there), None, None


def pad_sequences(bounds: list[int], block_size: int, most: int, device: torch.device) -> Padding:
    """Lay out packed sequences, of which one has tokens, as samples padded by `group_sequences`."""
    lengths = [end - start for start, end in pairwise(bounds)]
    groups = [
        _group(sequences, lengths, device)
        for sequences in group_sequences(lengths, block_size, most)
    ]
    order = list(chain.from_iterable(group.sequences for group in groups))
    widths = [group.longest for group in groups for _ in group.sequences]
    begins = [0, *accumulate(widths)]
    sample = {sequence: number for number, sequence in enumerate(order)}
    missing = [sequence for sequence, length in enumerate(lengths) if length == 0]
    ordered = Picks(torch.tensor(order, device=device), None)
    restored = Picks(
        torch.tensor([sample.get(sequence, 0) for sequence in range(len(lengths))], device=device),
        torch.tensor(missing, device=device) if missing else None,
    )
    tokens, places = bounds[-1], begins[-1]
    if len(groups) == 1 and places == tokens:
        return Padding(groups, None, None, ordered, restored)
    inward = _ranges([bounds[sequence] for sequence in order], widths, device)
    gaps = [width - lengths[sequence] for width, sequence in zip(widths, order, strict=True)]
    ends = [begin + lengths[sequence] for begin, sequence in zip(begins, order, strict=False)]
    empty = _ranges(ends, gaps, device) if any(gaps) else None
    present = [sequence for sequence, length in enumerate(lengths) if length]
    outward = _ranges(
        [begins[sample[sequence]] for sequence in present],
        [lengths[sequence] for sequence in present],
        device,
    )
    # Behind the end of a sequence other tokens follow, or none.
    inward = Picks(inward.clamp_max(tokens - 1), empty)
    return Padding(groups, inward, Picks(outward, None), ordered, restored)


def group_sequences(lengths: list[int], block_size: int, most: int) -> list[list[int]]:
    """Which sequences to pad together, so that padding at most doubles the number of blocks.

    One group if that is enough, otherwise one for every power of two of blocks.

    Args:
        lengths: Tokens of every sequence.
        block_size: Tokens in a block.
        most: Most sequences in a group.
    """
    blocks = {sequence: -(-length // block_size) for sequence, length in enumerate(lengths)}
    held = {sequence: count for sequence, count in blocks.items() if count}
    is_one = len(held) * max(held.values(), default=0) <= 2 * sum(held.values())
    classes: dict[int, list[int]] = {}
    for sequence, count in held.items():
        classes.setdefault(0 if is_one else (count - 1).bit_length(), []).append(sequence)
    groups = (classes[size] for size in sorted(classes))
    return [group[start : start + most] for group in groups for start in range(0, len(group), most)]


def _group(sequences: list[int], lengths: list[int], device: torch.device) -> Group:
    own = [lengths[sequence] for sequence in sequences]
    longest, mask = max(own), None
    if min(own) < longest:
        place = torch.arange(longest, device=device)
        mask = place < torch.tensor(own, device=device)[:, None]
    return Group(sequences, own, longest, mask)


def _ranges(begins: list[int], counts: list[int], device: torch.device) -> Tensor:
    """``begin, …, begin + count - 1`` of every pair, one after the other."""
    passed = [0, *accumulate(counts)]
    total = passed[-1]
    shifts = [begin - before for begin, before in zip(begins, passed, strict=False)]
    shift, count = torch.tensor([shifts, counts], device=device)
    # With the size given nobody has to ask the device for it.
    spread = torch.repeat_interleave(shift, count, output_size=total)
    return spread + torch.arange(total, device=device)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
