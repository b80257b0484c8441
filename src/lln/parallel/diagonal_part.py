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


def start_diagonal(
    call: Call, passes: LocalPasses, shards: Shards
) -> Callable[[], Callable[[], Tensor]]:
    """Softmax attention inside blocks, step by step: the tokens set out that other ranks borrow.

    What is returned computes the blocks, and starts to give the rows of borrowed tokens back; what
    that returns waits for this rank's rows ``[B, H, T, E]``. Between the steps something else can
    be computed.
    """
    if passes.block_width and call.query.shape[2]:

        def by_kernels() -> Callable[[], Tensor]:
            out = passes.blocks(call)
            return lambda: out

        return by_kernels
    blocks = lay_blocks(call, shards)
    sides = borrow_sides(call, blocks)
    return lambda: blocks.give_back(_attend(call, blocks, *sides()))


def _attend(
    call: Call, blocks: WholeBlocks, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """``[B, H, X, E]`` in plain PyTorch, in the accumulation dtype."""
    query, key, value = widen(query, key, value, mask, 0.0)
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    if blocks.is_crossed and mask is None:
        mask = query.new_ones(query.shape[0], query.shape[2]).bool()
    # Not the first valid token of this shard. A block that begins before it is cut off here; its
    # rows come from another rank.
    first = blocks.begin(blocks.shards.ranks.own) % blocks.size
    options = {"scale": call.scale, "key_mask": mask, "is_causal": call.is_causal}
    return block_diagonal(query, key, value, blocks.size, first=first, **options)


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
