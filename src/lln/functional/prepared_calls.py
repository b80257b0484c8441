"""Decisions that later calls of the same layout find again, in Python and in the C++ launcher.

A decision depends on how the tensors lie in memory, on types, devices and options, never on numbers
in the tensors. The arguments of a call are checked before anything is looked up here.
"""

from __future__ import annotations

from collections.abc import Hashable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lln.checks.call import FIELDS, Call
from lln.functional.way import Prepared
from lln.kernels.launching import compiled_launcher
from lln.kernels.launching.shapes import layout_of
from lln.kernels.lln import repeats
from lln.tracing import is_capturing, is_untraced

# Of these fields counts how a tensor lies in memory; their numbers do not. All others count as they
# are, so that a new field cannot be forgotten.
SIDES = (
    *("query", "key", "value", "alpha", "beta", "mix", "key_mask", "bounds", "offset"),
    *("choice_query", "choice_key"),
)
_sides = attrgetter(*SIDES)
_options = attrgetter(*(name for name in FIELDS if name not in (*SIDES, "dropout_p")))
# Beyond this many layouts the oldest are dropped: every sequence length is another one.
MOST_LAYOUTS = 4096

_prepared: dict[Hashable, Prepared] = {}


def layout_of_call(call: Call, impl: str) -> Hashable:
    """What decides how a call runs; None for calls that are decided anew each time."""
    query, sides = call.query, _sides(call)
    if not is_untraced(query) or isinstance(call.keys, Tensor):
        return None
    state = (query.device, torch.is_grad_enabled(), torch.get_num_threads(), is_capturing())
    looks = [_look(side) for side in sides]
    return (impl, *state, call.dropout_p > 0, *_options(call), *looks)


def find(layout: Hashable) -> Prepared | None:
    """How an earlier call of this layout ran."""
    return None if layout is None else _prepared.get(layout)


def keep(layout: Hashable, call: Call, impl: str, prepared: Prepared) -> None:
    """Keep how a call ran, with the launches that it left."""
    if layout is None:
        return
    if len(_prepared) >= MOST_LAYOUTS:
        del _prepared[next(iter(_prepared))]
    if prepared.impl == "triton":
        prepared = prepared._replace(repeat=repeats.repeat_of(call, prepared))
        if prepared.repeat is not None:
            repeats.register_native(prepared.repeat, call, impl)
    _prepared[layout] = prepared


def clear() -> None:
    """Forget all decisions, also those that the launcher in C++ holds."""
    _prepared.clear()
    compiled_launcher.forget()


def _look(side: Any) -> Hashable:
    """How a tensor lies in memory and whether it learns; of anything else its type."""
    if isinstance(side, Tensor):
        return type(side), side.requires_grad, layout_of(side)
    return type(side)
