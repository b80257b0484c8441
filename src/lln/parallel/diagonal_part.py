"""The diagonal blocks of a sequence that lies on several ranks.

Dimension legend: B batch, H query heads, T this rank's tokens, X its tokens and those borrowed,
E value width.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lln.checks.call import Call
from lln.eager.diagonal import block_diagonal
from lln.eager.run import repeat_heads, widen
from lln.parallel.agreement import Shards
from lln.parallel.local_passes import LocalPasses
from lln.parallel.whole_blocks import WholeBlocks, lay_blocks

Sides = tuple[Tensor, Tensor, Tensor, Tensor | None]


class DiagonalPart:
    """Softmax attention inside blocks, step by step.

    Between the steps something else can be computed: then tokens of blocks that cross ranks travel,
    and the rows of their outputs.
    """

    def __init__(self, call: Call, passes: LocalPasses, shards: Shards) -> None:
        """Start to borrow the tokens of blocks that begin on this rank."""
        self._call, self._passes, self._shards = call, passes, shards
        self._by_kernels = bool(passes.block_width and call.query.shape[2])
        if not self._by_kernels:
            self._blocks = lay_blocks(call, shards)
            self._sides = borrow_sides(call, self._blocks)

    def compute(self) -> Callable[[], Tensor]:
        """Compute the blocks, and start to give the rows of borrowed tokens back.

        What is returned waits for this rank's rows ``[B, H, T, E]``.
        """
        if self._by_kernels:
            out = self._passes.blocks(self._call)
            return lambda: out
        return self._blocks.give_back(self._attend())

    def _attend(self) -> Tensor:
        """``[B, H, X, E]`` in plain PyTorch, in the accumulation dtype."""
        call, blocks = self._call, self._blocks
        query, key, value, mask = self._sides()
        query, key, value = widen(query, key, value, mask, 0.0)
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        if blocks.is_crossed and mask is None:
            mask = query.new_ones(query.shape[0], query.shape[2]).bool()
        # Not the first valid token of this shard. A block that begins before it is cut off here;
        # its rows come from another rank.
        first = blocks.begin(self._shards.ranks.own) % blocks.size
        return block_diagonal(
            query,
            key,
            value,
            blocks.size,
            scale=call.scale,
            key_mask=mask,
            first=first,
            is_causal=call.is_causal,
        )


def borrow_sides(call: Call, blocks: WholeBlocks) -> Callable[[], Sides]:
    """Query, key and value ``[B, H, X, …]`` and the key mask ``[B, X]`` of whole blocks.

    It starts to borrow; what is returned waits.
    """
    query, key, value, mask = call.query, call.key, call.value, call.key_mask
    sides = [query, key, value]
    if blocks.is_crossed and blocks.shards.masked:
        if mask is None:
            mask = query.new_ones(query.shape[0], query.shape[2]).bool()
        sides.append(mask[:, None, :, None].to(query.dtype))
    borrowed = blocks.borrow(sides)

    def finish() -> Sides:
        query, key, value, *valid = borrowed()
        return query, key, value, valid[0][:, 0, :, 0] > 0 if valid else mask

    return finish
