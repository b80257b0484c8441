"""Blocks that cross the boundary between shards, made whole on one rank.

A block is computed by the rank that holds its first token. That rank borrows the tokens behind its
shard that its last block may reach, at most W − 1, and gives the rows of their outputs back. Where
all shards begin with a block, nothing moves.

Blocks are counted from the first valid token of a sample, as in one process: the *phase* is its
position modulo W.

Dimension legend: R ranks, B batch, H heads, T this rank's tokens, X its tokens and those borrowed,
W tokens in a block, n blocks, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lln.checks.call import Call
from lln.eager.diagonal import first_tokens
from lln.eager.key_blocks import KeyBlocks, blocks_in
from lln.parallel.agreement import Shards
from lln.parallel.collectives import gather
from lln.parallel.journeys import exchange_later


@dataclass(frozen=True)
class WholeBlocks:
    """How the blocks of a call lie on the ranks.

    Attributes:
        shards: The group.
        size: W.
        phase: int ``[B]``, position of the first valid token modulo W.
        is_crossed: Whether a block may lie on several ranks.
    """

    shards: Shards
    size: int
    phase: Tensor
    is_crossed: bool

    @property
    def tokens(self) -> int:
        """T."""
        return self.length(self.shards.ranks.own)

    def length(self, rank: int) -> int:
        """The number of tokens of a rank's shard."""
        starts, ends = self.shards.bounds
        return ends[rank] - starts[rank]

    def reach(self, rank: int) -> tuple[int, int]:
        """Where the tokens lie that a rank borrows."""
        bounds = self.shards.bounds
        end = bounds.ends[rank]
        if not self.is_crossed or self.length(rank) == 0:
            return end, end
        return end, min(end + self.size - 1, bounds.tokens)

    def extended(self, rank: int) -> int:
        """X: the number of tokens of a rank together with those that it borrows."""
        start, end = self.reach(rank)
        return self.length(rank) + end - start

    def count(self, rank: int) -> int:
        """N: no sample has more blocks that begin on that rank."""
        is_first = rank == self.shards.bounds.first_rank
        return blocks_in(self.length(rank), self.size, self.shards.padded and is_first)

    def begin(self, rank: int) -> Tensor:
        """Where the first block of a rank begins in its shard, ``[B]``; below 0 behind a gap."""
        if rank == self.shards.bounds.first_rank:
            return -(-self.phase % self.size)
        return (self.phase - self.shards.bounds.starts[rank]) % self.size

    def number(self, rank: int) -> Tensor:
        """The number of the first block of a rank in the whole sequence, ``[B]``."""
        first = self.shards.bounds.first_rank
        if rank == first:
            return torch.zeros_like(self.phase)
        start = self.shards.bounds.starts[rank] + self.begin(rank)
        return (start - self.begin(first)) // self.size

    def borrow(self, sides: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """``[B, H, T, D]`` → ``[B, H, X, D]``, with the tokens borrowed; gradients go back.

        It starts to borrow; what is returned waits.

        Args:
            sides: Tensors of one dtype.
        """
        if not self.is_crossed:
            return lambda: list(sides)
        widths = [side.shape[1] * side.shape[3] for side in sides]
        rows = torch.cat([side.permute(2, 0, 1, 3).flatten(2) for side in sides], -1)
        send, receive = self._traffic()
        parts = [rows[start:end] for start, end in send]
        purpose = self.shards.purpose("borrowing tokens of blocks that cross ranks")
        counts = _counts(send), _counts(receive)
        found = exchange_later(torch.cat(parts), *counts, self.shards.ranks, purpose)

        def finish() -> list[Tensor]:
            borrowed = found().split(widths, -1)
            return [
                torch.cat([side, rows.unflatten(-1, side.shape[1::2]).permute(1, 2, 0, 3)], 2)
                for side, rows in zip(sides, borrowed, strict=True)
            ]

        return finish

    def give_back(self, out: Tensor) -> Callable[[], Tensor]:
        """``[B, H, X, E]`` → ``[B, H, T, E]``: every token has the row of its block's rank.

        It starts to send the rows; what is returned waits.
        """
        if not self.is_crossed:
            return lambda: out
        heads, width = out.shape[1], out.shape[3]
        rows = out.permute(2, 0, 1, 3).flatten(2)
        receive, send = self._traffic()
        purpose = self.shards.purpose("giving back rows of blocks that cross ranks")
        counts = _counts(send), _counts(receive)
        found = exchange_later(rows[self.tokens :], *counts, self.shards.ranks, purpose)

        def finish() -> Tensor:
            every = torch.cat([rows[: self.tokens], found()]).unflatten(-1, (heads, width))
            place = self._source(receive)[:, None, :, None].expand(-1, heads, -1, width)
            return every.permute(1, 2, 0, 3).gather(2, place)

        return finish

    def _traffic(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The stretches of tokens lent to every rank, and those borrowed from it."""
        bounds, own = self.shards.bounds, self.shards.ranks.own
        everyone = range(self.shards.ranks.size)
        lent = [bounds.cover(own, *self.reach(rank)) for rank in everyone]
        borrowed = [bounds.cover(rank, *self.reach(own)) for rank in everyone]
        return lent, borrowed

    def _source(self, lent: list[tuple[int, int]]) -> Tensor:
        """Where in the own rows and those that came back every token's row is: ``[B, T]``."""
        bounds, own = self.shards.bounds, self.shards.ranks.own
        first = bounds.starts[own]
        device = self.phase.device
        token = torch.arange(self.tokens, device=device)
        begin = first + token - (first + token - self.phase[:, None]) % self.size
        ends = torch.tensor(bounds.ends, device=device)
        home = torch.searchsorted(ends, begin.clamp_min(0), right=True)
        # The rows that came back lie behind the own ones, in the order of the ranks.
        before, shifts = self.tokens, []
        for rank, (start, end) in enumerate(lent):
            shifts.append(0 if rank == own else before - start)
            before += end - start
        return token + torch.tensor(shifts, device=device)[home]

    def place(self) -> KeyBlocks:
        """The blocks that begin on this rank, in the tokens of its shard and those borrowed."""
        own = self.shards.ranks.own
        count, tokens, reached = self.count(own), self.tokens, self.extended(own)
        device, begin = self.phase.device, self.begin(own)[:, None]
        starts = begin + torch.arange(count, device=device) * self.size
        place = starts.unsqueeze(-1) + torch.arange(self.size, device=device)
        there = (starts < tokens).unsqueeze(-1) & (place >= 0) & (place < reached)
        token = torch.arange(reached, device=device) - begin
        home = (token // self.size).clamp(0, max(count - 1, 0))
        block = torch.arange(count, device=device)
        return KeyBlocks(
            place.clamp(0, max(reached - 1, 0)),
            there,
            home,
            token % self.size,
            torch.zeros_like(block),
            torch.full_like(block, count - 1),
            not self.is_crossed and tokens == count * self.size,
        )

    def owned(self) -> Tensor:
        """Which of the X tokens belong to a block that begins on this rank: bool ``[B, X]``."""
        own = self.shards.ranks.own
        begin = self.begin(own)[:, None]
        token = torch.arange(self.extended(own), device=self.phase.device)
        start = begin + (token - begin) // self.size * self.size
        return (token >= begin) & (start < self.tokens)


class OwnBlocks(NamedTuple):
    """The blocks that begin on this rank.

    Attributes:
        layout: How the blocks lie on the ranks.
        blocks: Those of this rank.
        valid: bool ``[B, X]``, which tokens belong to them and are not masked.
        counted: The same; None = all are.
        by_kernels: Whether the kernels compute.
    """

    layout: WholeBlocks
    blocks: KeyBlocks
    valid: Tensor
    counted: Tensor | None
    by_kernels: bool


def lay_blocks(call: Call, shards: Shards) -> WholeBlocks:
    """How the blocks of a call lie on the ranks; asks them for the first valid tokens if needed."""
    size, batch, device = call.block_size, call.query.shape[0], call.query.device
    starts, ends = shards.bounds
    shifted = any(start % size for start, end in zip(starts, ends, strict=True) if end > start)
    phase = torch.zeros(batch, dtype=torch.int64, device=device)
    if shards.padded:
        phase = _first_valid(batch, call.key_mask, shards, device) % size
    return WholeBlocks(shards, size, phase, shifted or shards.padded)


def _counts(stretches: list[tuple[int, int]]) -> list[int]:
    return [end - start for start, end in stretches]


def _first_valid(batch: int, mask: Tensor | None, shards: Shards, device: torch.device) -> Tensor:
    """Position of the first valid token of every sample in the whole sequence; 0 if none."""
    start, end = (side[shards.ranks.own] for side in shards.bounds)
    nowhere = shards.bounds.tokens
    if end == start:
        own = torch.full((batch,), nowhere, device=device)
    elif mask is None:
        own = torch.full((batch,), start, device=device)
    else:
        own = torch.where(mask.any(-1), start + first_tokens(mask), nowhere)
    everyone = gather(own, shards.ranks, shards.purpose("finding the first valid tokens"))
    first = everyone.amin(0)
    return torch.where(first == nowhere, 0, first)
