"""The diagonal blocks of a sequence that lies on several ranks.

Dimension legend: B batch, H query heads, T this rank's tokens, X its tokens and those borrowed,
E value width.
"""

from __future__ import annotations

from torch import Tensor

from lln.eager.diagonal import block_diagonal
from lln.eager.run import repeat_heads, widen
from lln.functional.request import Request
from lln.parallel.agreement import Shards
from lln.parallel.whole_blocks import WholeBlocks, lay_blocks


def diagonal_part(request: Request, shards: Shards) -> Tensor:
    """Softmax attention inside blocks: ``[B, H, T, E]`` in the accumulation dtype."""
    blocks = lay_blocks(request, shards)
    query, key, value, mask = borrow_sides(request, blocks)
    query, key, value = widen(query, key, value, mask, 0.0)
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    if blocks.is_crossed and mask is None:
        mask = query.new_ones(query.shape[0], query.shape[2]).bool()
    # Not the first valid token of this shard. A block that begins before it is cut off here; its
    # rows come from another rank.
    first = blocks.begin(shards.ranks.own) % blocks.size
    out = block_diagonal(
        query,
        key,
        value,
        blocks.size,
        scale=request.scale,
        key_mask=mask,
        first=first,
        is_causal=request.is_causal,
    )
    return blocks.give_back(out)


def borrow_sides(
    request: Request, blocks: WholeBlocks
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key and value ``[B, H, X, …]`` and the key mask ``[B, X]`` of whole blocks."""
    query, key, value, mask = request.query, request.key, request.value, request.key_mask
    if not blocks.is_crossed or not blocks.shards.masked:
        query, key, value = blocks.borrow((query, key, value))
        return query, key, value, mask
    if mask is None:
        mask = query.new_ones(query.shape[0], query.shape[2]).bool()
    valid = mask[:, None, :, None].to(query.dtype)
    query, key, value, valid = blocks.borrow((query, key, value, valid))
    return query, key, value, valid[:, 0, :, 0] > 0
