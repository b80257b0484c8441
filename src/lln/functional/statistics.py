"""Statistics of queries and keys for modules and instruments, apart from a call of attention.

Dimension legend: as in `lln.functional.call`.
"""

from __future__ import annotations

from torch import Tensor

from lln.functional import ways
from lln.functional.call import Call
from lln.functional.match import match_inputs, measure_heads
from lln.matching.moments import Moments


def matched_temperatures(
    query: Tensor, key: Tensor, matching: str, key_mask: Tensor | None, impl: str
) -> tuple[Tensor, Tensor]:
    """α and β ``[B, H, 1, 1]`` of dense queries and keys, by what ``impl`` asks for."""
    call = Call("temperatures", query, key, key, matching=matching, key_mask=key_mask)
    return match_inputs(query, key, matching, key_mask, ways.prepare(call, impl).impl)


def measured_moments(query: Tensor, key: Tensor, key_mask: Tensor | None, impl: str) -> Moments:
    """The moments of every head, by what ``impl`` asks for."""
    call = Call("moments", query, key, key, key_mask=key_mask)
    return measure_heads(query, key, key_mask, ways.prepare(call, impl).impl)
