"""How many bytes a rank sends for one attention layer, and what other methods would send.

Every collective is counted as what one rank sends to the others: a gather of n bytes over R ranks
is (R − 1)·n, an exchange what goes to other ranks. Counted this way a test finds the same numbers
at the network. Only the rows of chosen keys depend on the data: their number is bounded from above,
in the mean over the ranks (a rank whose keys many choose sends more).

Dimension legend: R ranks, B batch, H query heads, Hk key heads, SH summary heads, T tokens of a
rank, D head width, E value width, W tokens in a block, K keys per group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lln.checks.names import check_choice
from lln.eager.key_blocks import blocks_in
from lln.parallel.agreement import FACTS
from lln.parallel.ranks import Bounds
from lln.precision import accumulation_dtype

KINDS = ("lln", "lln_diag", "lln_keys", "ring", "ulysses")


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in one layer.

    Attributes:
        forward: Bytes by step of the forward pass.
        backward: Bytes by step of the backward pass.
    """

    forward: dict[str, int]
    backward: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of a training step."""
        return sum(self.forward.values()) + sum(self.backward.values())


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a layer that decide what travels.

    Attributes:
        lengths: Tokens of every rank.
        heads: H.
        width: D.
        batch: B.
        key_heads: Hk; None = H.
        value_width: E; None = D.
        dtype: Of query, key and value.
        block_size: W.
        keys: K.
        group_size: Queries that share their chosen keys; None = W.
        matched: Whether α, β (and the offset) come from statistics of the sequence; they are then
            per query head.
        asked: Whether the ranks compare their arguments first, as without ``lengths``.
        masked: Whether there is a key mask.
        padded: Whether some sample begins with padding.
    """

    lengths: tuple[int, ...]
    heads: int
    width: int
    batch: int = 1
    key_heads: int | None = None
    value_width: int | None = None
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 64
    keys: int = 64
    group_size: int | None = None
    matched: bool = True
    asked: bool = True
    masked: bool = False
    padded: bool = False
    bounds: Bounds = field(init=False)

    def __post_init__(self) -> None:
        """Lay the shards out."""
        object.__setattr__(self, "bounds", Bounds.of(self.lengths))

    @property
    def grouped(self) -> tuple[int, int]:
        """Hk and E."""
        key_heads = self.heads if self.key_heads is None else self.key_heads
        return key_heads, self.width if self.value_width is None else self.value_width

    @property
    def wide(self) -> int:
        """Bytes of a number of a summary."""
        return accumulation_dtype(self.dtype).itemsize


def layer_traffic(kind: str, shape: LayerShape, rank: int = 0) -> Traffic:
    """What a rank sends in one layer.

    Args:
        kind: ``"lln"``, ``"lln_diag"`` or ``"lln_keys"``; for comparison ``"ring"``, softmax
            attention whose keys and values go round the ranks, and ``"ulysses"``, softmax attention
            over whole sequences with the heads divided between the ranks.
        shape: The sizes of the layer.
        rank: Which rank.

    Example:
        >>> shape = LayerShape((65_536,) * 8, heads=16, width=64)
        >>> ours, ring = (layer_traffic(kind, shape).total for kind in ("lln", "ring"))
        >>> round(ring / ours)
        1571
    """
    check_choice("kind", kind, KINDS)
    if kind == "ring":
        return _ring(shape, rank)
    if kind == "ulysses":
        return _ulysses(shape, rank)
    others = len(shape.lengths) - 1
    key_heads, value_width = shape.grouped
    forward: dict[str, int] = {}
    if shape.asked:
        forward["arguments"] = 8 * FACTS * others
    if shape.matched:
        numbers = 2 + shape.heads + key_heads * (shape.width + 1)
        forward["statistics"] = shape.wide * shape.batch * numbers * others
    columns = value_width + (3 if kind == "lln_keys" else 1)
    summary_heads = shape.heads if shape.matched else key_heads
    summary = shape.wide * shape.batch * summary_heads * shape.width * columns * others
    forward["summaries"], backward = summary, {"summaries": summary}
    if kind != "lln":
        _add_blocks(shape, rank, forward, backward)
    if kind == "lln_keys":
        _add_keys(shape, rank, forward, backward)
    return Traffic(forward, backward)


def _ring(shape: LayerShape, rank: int) -> Traffic:
    """Keys and values pass every rank; backward once more, with gradients that also return."""
    key_heads, value_width = shape.grouped
    ranks = len(shape.lengths)
    # Every rank passes on what it gets: all shards but the one that its neighbour began with.
    passed = sum(shape.lengths) - shape.lengths[(rank + 1) % ranks]
    each = shape.dtype.itemsize * shape.batch * key_heads * (shape.width + value_width)
    back = each * (passed + sum(shape.lengths))
    return Traffic({"keys and values": each * passed}, {"keys, values and gradients": back})


def _ulysses(shape: LayerShape, rank: int) -> Traffic:
    """Tokens change to heads and back: all but 1/R of query, key, value and output leaves."""
    key_heads, value_width = shape.grouped
    ranks = len(shape.lengths)
    numbers = (shape.heads + key_heads) * (shape.width + value_width)
    each = shape.dtype.itemsize * shape.batch * shape.lengths[rank] * numbers
    sent = each * (ranks - 1) // ranks
    return Traffic({"heads and rows": sent}, {"heads and rows": sent})


def _add_blocks(
    shape: LayerShape, rank: int, forward: dict[str, int], backward: dict[str, int]
) -> None:
    """Tokens of blocks that cross ranks, and the rows that come back."""
    starts, ends = shape.bounds
    used = [start for start, end in zip(starts, ends, strict=True) if end > start]
    if shape.padded:
        forward["first valid tokens"] = 8 * shape.batch * (len(shape.lengths) - 1)
    if not shape.padded and not any(start % shape.block_size for start in used):
        return

    def reach(one: int) -> tuple[int, int]:
        there = ends[one] > starts[one]
        return ends[one], min(ends[one] + there * (shape.block_size - 1), shape.bounds.tokens)

    everyone = range(len(shape.lengths))
    lent = sum(_length(shape.bounds.cover(rank, *reach(one))) for one in everyone)
    borrowed = _length(reach(rank))
    key_heads, value_width = shape.grouped
    numbers = (shape.heads + key_heads) * shape.width + key_heads * value_width + shape.masked
    row = shape.dtype.itemsize * shape.batch * numbers
    out = shape.wide * shape.batch * shape.heads * value_width
    forward |= {"tokens borrowed": lent * row, "rows given back": borrowed * out}
    backward |= {"tokens borrowed": borrowed * row, "rows given back": lent * out}


def _length(stretch: tuple[int, int]) -> int:
    return stretch[1] - stretch[0]


def _add_keys(
    shape: LayerShape, rank: int, forward: dict[str, int], backward: dict[str, int]
) -> None:
    """Mean queries, candidates, and at most so many rows of chosen keys."""
    key_heads, value_width = shape.grouped
    rows = shape.block_size // (shape.group_size or shape.block_size)
    first = shape.bounds.first_rank
    groups = [
        rows * blocks_in(length, shape.block_size, shape.padded and one == first)
        for one, length in enumerate(shape.lengths)
    ]
    others = len(groups) - 1
    keys = min(shape.keys, shape.bounds.tokens)
    lead = shape.batch * shape.heads
    mean = shape.dtype.itemsize * lead * max(groups) * shape.width
    forward["mean queries"] = mean * others
    elsewhere = sum(groups) - groups[rank]
    forward["candidates"] = 2 * shape.wide * lead * elsewhere * keys
    # A row travels once to a rank, however many groups chose it.
    held = [shape.batch * key_heads * (length + shape.block_size - 1) for length in shape.lengths]
    fetched = min(lead * groups[rank] * keys, sum(held) - held[rank])
    row = shape.dtype.itemsize * (shape.width + value_width)
    forward["numbers of rows"] = 8 * others
    forward["rows asked for, at most"] = 8 * fetched
    # What a rank lends others have fetched: so much in the mean over the ranks.
    forward["chosen rows, at most"] = fetched * row
    backward["chosen rows, at most"] = fetched * row
