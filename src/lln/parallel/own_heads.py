"""Tokens and heads on several ranks at once: context and tensor parallelism together.

Every rank computes its own heads (`lln.functional.head_shards`) of its own tokens. The ranks that
share a sequence must hold the same heads, so the two groups have one rank in common.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lln.checks.call import Call
from lln.errors import InvalidInputError
from lln.functional.head_shards import on_own_shards
from lln.parallel.ranks import Ranks


def attend_own_heads(
    call: Call,
    ranks: Ranks,
    attend: Callable[[Call], Tensor],
) -> Tensor:
    """A call of ``DTensor`` sides whose heads or samples are divided, as a ``DTensor``.

    ``attend`` computes the call of the ordinary tensors of this rank's heads.

    Raises:
        InvalidInputError: If heads are divided between ranks that share the sequence.
    """
    query: Any = call.query
    members = set(dist.get_process_group_ranks(ranks.group()))
    for axis, placement in enumerate(query.placements):
        holders = dist.get_process_group_ranks(query.device_mesh.get_group(axis))
        if placement.is_shard() and len(members.intersection(holders)) > 1:
            raise InvalidInputError(
                f"query is divided as {placement} between the ranks {holders}, of which "
                f"{sorted(members.intersection(holders))} share the sequence; divide heads along "
                "another axis of the mesh, and give to_local() of what is divided by tokens."
            )
    return on_own_shards(call, attend)
