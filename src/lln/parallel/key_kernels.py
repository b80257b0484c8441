"""Exact keys of a rank's own queries by the fused kernels, which read the summaries of all ranks.

Dimension legend: B batch, H query heads, Hk key heads, X tokens of a rank and
those borrowed, D head width, E value width, n blocks, W tokens in a block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lln.checks.call import Call
from lln.kernels.keys.keys_ops import fused_sharded_keys
from lln.parallel.key_rows import FarRows
from lln.parallel.summary_merge import RankSummaries
from lln.parallel.whole_blocks import OwnBlocks


def read_by_kernels(
    call: Call,
    here: OwnBlocks,
    far: Callable[[torch.dtype], FarRows],
    summaries: Callable[[], RankSummaries],
) -> Tensor:
    """The rows of the blocks that begin on this rank, in the dtype of query: ``[B, H, X, E]``.

    Args:
        call: With the tokens borrowed, and α, β and the offset in place.
        here: The blocks of this rank, at least one.
        far: Waits for what their groups chose.
        summaries: Waits for those of all ranks.
    """
    query, key, value = call.qkv
    layout, blocks, counted = here.layout, here.blocks, here.counted
    if layout.is_crossed:
        # The kernels count blocks from the first token, which may belong to another rank's.
        query, key, value = (blocks.gather(side).flatten(2, 3) for side in (query, key, value))
        counted = blocks.valid(counted).flatten(1)
    assert call.beta is not None
    known = summaries()
    slots, number = known.centred(call.beta, known.log_mass.shape[2])
    key, value, indices = far(key.dtype).behind(key, value)
    assert call.alpha is not None
    assert call.offset is not None
    out = fused_sharded_keys(
        query,
        key,
        value,
        call.alpha,
        call.offset,
        slots,
        indices,
        key_mask=counted,
        held=layout.shards.bounds.tokens if counted is None else number,
        block_size=layout.size,
        group_size=call.group_size,
        scale=call.scale,
    )
    if layout.is_crossed:
        out = blocks.scatter(out.unflatten(2, blocks.place.shape[1:]))
    return out
