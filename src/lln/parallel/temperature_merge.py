"""Matched temperatures of a sequence that lies on several ranks, by one collective.

Every rank gets the same numbers to the last bit: all merge the same parts in the same order.

Dimension legend: B batch, H query heads, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable

from lln.checks.call import Call
from lln.errors import InvalidInputError
from lln.matching.moments import Moments
from lln.matching.partial_moments import (
    merge_heads,
    merge_tensors,
    part_of_heads,
    part_of_tensor,
)
from lln.parallel.agreement import Shards
from lln.parallel.journeys import gather_later


def measure_shards(call: Call, shards: Shards, *, whole_tensor: bool) -> Callable[[], Moments]:
    """Moments of the whole sequence: ``[B, H]``, or ``[1, 1]`` of the whole tensor.

    It starts to gather those of the shards; what is returned waits for them. One statistic is taken
    over everything in the authors' code.
    """
    query, key, mask = call.query, call.key, call.key_mask
    masks_queries = _is_self_attention(call, shards)
    purpose = shards.purpose("merging the statistics")
    if whole_tensor:
        part = part_of_tensor(query, key, mask, masks_queries=masks_queries)
        parts = gather_later(part, shards.ranks, purpose)
        return lambda: merge_tensors(parts(), query)
    part = part_of_heads(query, key, mask, masks_queries=masks_queries)
    parts = gather_later(part, shards.ranks, purpose)
    return lambda: merge_heads(parts(), query, key)


def _is_self_attention(call: Call, shards: Shards) -> bool:
    """Whether there are as many queries as keys: the key mask then counts for the queries."""
    if shards.queries is None:
        return call.query.shape[2] == call.key.shape[2]
    starts, ends = shards.bounds
    keys = tuple(end - start for start, end in zip(starts, ends, strict=True))
    if keys == shards.queries:
        return True
    if shards.masked and sum(keys) == sum(shards.queries):
        raise InvalidInputError(
            f"{shards.operation}: the sequence has as many queries as keys, so key_mask says which "
            f"queries count, but the ranks hold {list(shards.queries)} queries and {list(keys)} "
            "keys; cut both in the same places, or give alpha and beta."
        )
    return False
