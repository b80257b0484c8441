"""How a call runs on several ranks, whatever it attends to: checked, agreed on, computed.

Tokens may be divided and heads, too: every rank then computes its own heads
(`lln.functional.head_shards`) of its own tokens. The ranks that share a sequence must hold the same
heads, so the two groups have one rank in common.

Dimension legend: as in `lln.checks.call`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from lln.checks.call import Call
from lln.errors import InvalidInputError
from lln.functional.checked_call import checked_call
from lln.functional.head_shards import on_own_shards
from lln.functional.run import attend
from lln.parallel.agreement import Shards, agree, given_bounds
from lln.parallel.local_passes import check_local
from lln.parallel.ranks import Ranks, find_ranks
from lln.precision import without_autocast
from lln.tracing import is_sharded


class Together(NamedTuple):
    """What an entry point is told besides the call; its documentation says what each means."""

    group: Any
    lengths: Sequence[int] | None
    enable_gqa: bool
    impl: str


def attend_together(
    call: Call, how: Together, compute: Callable[[Call, Shards, str], Tensor]
) -> Tensor:
    """The attention of this rank's tokens, in the dtype of query.

    The arguments are as an entry point got them; ``compute`` gets a call that all ranks agree on,
    their shards and ``impl``.
    """
    name = f"{call.kind}_attention"
    operation = f"lln.parallel.{name}"
    ranks = find_ranks(how.group, operation)
    if is_alone(ranks, how.lengths, call.key):
        return attend(checked_call(call, name, how.enable_gqa), how.impl)

    def check() -> Call:
        # Indices of the whole sequence have another shape; they are refused with a reason below.
        known = checked_call(call.replace(keys=0), operation, how.enable_gqa)
        known = known.replace(keys=call.keys)
        check_local(known, how.impl, operation)
        return known

    if is_sharded(call.query):
        return _attend_own_heads(check(), ranks, lambda own: attend_together(own, how, compute))
    call, shards = agree(check, how.lengths, ranks, operation)
    with without_autocast(call.query):
        return compute(call, shards, how.impl).to(call.query.dtype)


def is_alone(ranks: Ranks, lengths: Sequence[int] | None, key: Tensor) -> bool:
    """Whether one rank holds the whole sequence: the attention of the top level computes it.

    Raises:
        InvalidInputError: If it is, and ``lengths`` say otherwise.
    """
    if ranks.size > 1:
        return False
    if lengths is not None:
        given_bounds(lengths, key, ranks)
    return True


def _attend_own_heads(
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
