"""Where the tokens of a call lie in blocks, for dense and for packed sequences.

The attention with exact keys (`lln.eager.key_attention`) works block by block. Blocks of a dense
sequence are counted from its first token that is not masked; every packed sequence starts a new
block.

Dimension legend: B batch (1 for packed sequences), H heads, T tokens, n blocks, W tokens in a
block, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lln.eager.diagonal import first_tokens
from lln.eager.tiling import cut_tiles
from lln.eager.whole_division import divided
from lln.tracing import always_holds, is_compiling, values_are_readable


class KeyBlocks(NamedTuple):
    """The way from tokens to blocks and back.

    Attributes:
        place: int ``[B, n, W]``, the token in every place (any token where there is none).
        there: bool ``[B, n, W]``, which places hold a token.
        home: int ``[B, T]``, the block of every token.
        within: int ``[B, T]``, its place inside the block.
        first: int ``[n]``, the first block of the same sequence.
        last: int ``[n]``, the last one.
        is_plain: Whether blocks are the sequence cut at multiples of W, all full.
    """

    place: Tensor
    there: Tensor
    home: Tensor
    within: Tensor
    first: Tensor
    last: Tensor
    is_plain: bool

    def gather(self, side: Tensor) -> Tensor:
        """``[B, H, T, D]`` → ``[B, H, n, W, D]``; zero where there is no token."""
        size = self.place.shape[2]
        if self.is_plain:
            return side.unflatten(2, (-1, size))
        blocks = _take(side, self.place.flatten(1)).unflatten(2, (-1, size))
        return torch.where(self.there[:, None, ..., None], blocks, 0.0)

    def scatter(self, blocks: Tensor) -> Tensor:
        """``[B, H, n, W, E]`` → ``[B, H, T, E]``."""
        if self.is_plain:
            return blocks.flatten(2, 3)
        return _take(blocks.flatten(2, 3), self.home * blocks.shape[3] + self.within)

    def valid(self, key_mask: Tensor | None) -> Tensor:
        """Which places hold a token that is not masked: bool ``[B, n, W]``."""
        if key_mask is None:
            return self.there
        sample = torch.arange(key_mask.shape[0], device=key_mask.device)[:, None, None]
        return self.there & key_mask[sample, self.place]


class Groups(NamedTuple):
    """Groups of queries that choose keys, and what they may choose.

    Attributes:
        blocks: Where the tokens lie.
        size: g, a divisor of W.
        key_mask: bool ``[B, T]``; masked keys are never chosen, masked queries do not count.
    """

    blocks: KeyBlocks
    size: int
    key_mask: Tensor | None = None


def _take(side: Tensor, place: Tensor) -> Tensor:
    """The tokens of ``[B, H, T, D]`` at ``[B, P]``: ``[B, H, P, D]``.

    By `gather`: the gradient of an index adds in any order, also on a CPU.
    """
    spread = place[:, None, :, None].expand(-1, side.shape[1], -1, side.shape[3])
    return side.expand(place.shape[0], -1, -1, -1).gather(2, spread)


def blocks_in(tokens: int, block_size: int, is_masked: bool) -> int:
    """How many blocks a dense sequence is cut into.

    With a mask one more than without may be needed, because the first block can begin anywhere.
    """
    extra = block_size - 1 if is_masked and tokens > 0 else 0
    return (tokens + extra + block_size - 1) // block_size


def dense_blocks(
    batch: int,
    tokens: int,
    block_size: int,
    key_mask: Tensor | None,
    device: torch.device,
    count: int | None = None,
) -> KeyBlocks:
    """The blocks of dense sequences, counted from the first True of ``key_mask``.

    ``count`` is n, at least `blocks_in`; None = that many, in a trace for every length at least
    two: a tracer would take one block for a constant.
    """
    if count is None:
        count = blocks_in(tokens, block_size, key_mask is not None)
        if is_compiling() and not always_holds(count > 2):
            count = (tokens + 2 * block_size - 1) // block_size
    gap: Tensor | None = None
    if key_mask is not None and tokens > 0:
        gap = -first_tokens(key_mask) % block_size
    token = torch.arange(tokens, device=device).expand(batch, -1)
    goal = token if gap is None else token + gap[:, None]
    block = torch.arange(count, device=device)
    place = block[:, None] * block_size + torch.arange(block_size, device=device)
    place = (place if gap is None else place - gap[:, None, None]).expand(batch, -1, -1)
    there = (place >= 0) & (place < tokens)
    # A trace must hold for every length, so it cannot ask whether the last block is full.
    is_plain = not is_compiling() and tokens == count * block_size
    if is_plain and gap is not None:
        is_plain = values_are_readable(gap) and not bool(gap.any())
    return KeyBlocks(
        place.clamp(0, max(tokens - 1, 0)),
        there,
        divided(goal, block_size),
        goal % block_size,
        torch.zeros_like(block),
        torch.full_like(block, count - 1),
        is_plain,
    )


def packed_blocks(bounds: Tensor, tokens: int, block_size: int) -> tuple[KeyBlocks, Tensor]:
    """The blocks of packed sequences as one sample, and the sequence of every block ``[n]``.

    ``bounds`` are int64 ``cu_seqlens`` of at least one token.
    """
    tiles = cut_tiles(bounds, tokens, block_size)
    counts = divided(bounds.diff() + block_size - 1, block_size)
    starts = torch.cat([counts.cumsum(0) - counts, counts.sum()[None]])
    block = torch.arange(tiles.sequence.shape[0], device=bounds.device)
    used = tiles.sequence < bounds.shape[0] - 1
    first = torch.where(used, starts[tiles.sequence.clamp_max(bounds.shape[0] - 1)], block)
    home, within = divided(tiles.place, block_size), tiles.place % block_size
    blocks = KeyBlocks(
        tiles.source[None], tiles.valid[None], home[None], within[None], first, tiles.last, False
    )
    return blocks, tiles.sequence
