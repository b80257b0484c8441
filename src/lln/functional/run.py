"""Runs a checked call: decided once per layout, then matched, announced and computed.

Every entry point and every module calls `attend` here, after checking its inputs.

Dimension legend: as in `lln.checks.call`.
"""

from __future__ import annotations

from torch import Tensor

from lln.checks.call import Call
from lln.functional import prepared_calls, ways
from lln.functional.head_shards import on_own_shards
from lln.kernels.lln import repeats
from lln.observers import is_observed
from lln.tracing import is_compiling, is_sharded


def attend(call: Call, impl: str) -> Tensor:
    """The output of a checked call, ``[B, H, T, E]`` or packed ``[T, H, E]``, in query's dtype."""
    if is_sharded(call.query):
        return on_own_shards(call, lambda own: attend(own, impl))
    call = call.with_fitted_blocks()
    if is_compiling() or is_observed():
        return ways.prepare(call, impl).run(call)
    if repeats.try_fast_path is not None:
        # Groups of query heads are allowed: the call has been checked.
        out = repeats.try_fast_path(call, True, impl)
        if out is not None:
            return out
    layout = prepared_calls.layout_of_call(call, impl)
    prepared = prepared_calls.find(layout)
    if prepared is not None:
        if prepared.repeat is not None and repeats.try_fast_path is not None:
            repeats.register_native(prepared.repeat, call, impl)
        return prepared.run(call)
    prepared = ways.prepare(call, impl)
    out = prepared.run(call)
    prepared_calls.keep(layout, call, impl, prepared)
    return out
