"""What a rank does in which order: when it starts a collective, computes, and waits for it."""

from contextlib import ExitStack
from unittest.mock import patch

import torch
from tests.parallel.splits import by_rank
from torch import Tensor

from lln.eager import causal
from lln.parallel import diagonal_part, journeys, key_choice, local_passes, sharded

# The places of what a rank computes of its own.
COMPUTED = (
    ("summary", local_passes.LocalPasses, "summarise"),
    ("reading", local_passes.LocalPasses, "read"),
    ("blocks", local_passes.LocalPasses, "blocks"),
    ("blocks", diagonal_part, "block_diagonal"),
    ("means", key_choice, "group_means"),
    ("means", key_choice, "fused_means"),
    ("candidates", key_choice, "_candidates"),
    ("candidates", key_choice, "fused_candidates"),
    ("dropout", sharded, "drop_keys"),
    ("chunks", causal, "summarise"),
)


class _Mark(torch.autograd.Function):
    """The same tensor; backward writes down that it was here."""

    @staticmethod
    def forward(ctx, tensor, events, event):
        ctx.events, ctx.event = events, event
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        ctx.events.append(ctx.event)
        return gradient, None, None


class _Work:
    """What waits for a collective, and writes that down."""

    def __init__(self, work, events, purpose):
        self.work, self.events, self.purpose = work, events, purpose

    def wait(self):
        self.events.append(f"wait: {self.purpose}")
        return self.work.wait()


def _marked(found, events, event):
    """Tensors, and tuples of them, with a mark."""
    if isinstance(found, Tensor):
        return _Mark.apply(found, events, event) if found.requires_grad else found
    if isinstance(found, tuple):
        sides = [_marked(side, events, event) for side in found]
        return type(found)(*sides) if hasattr(found, "_fields") else tuple(sides)
    return found


def _watched(function, name, events):
    """The function, with events where it and its gradients begin and end."""

    def watching(*arguments, **options):
        arguments = [_marked(side, events, f"end: {name} (backward)") for side in arguments]
        events.append(f"begin: {name}")
        found = function(*arguments, **options)
        events.append(f"end: {name}")
        return _marked(found, events, f"begin: {name} (backward)")

    return watching


def _issuing(begin, events, hasty):
    """A collective of `lln.parallel.journeys`, with events; ``hasty`` = it waits at once."""

    def issue(*arguments, **options):
        purpose = arguments[-1].split(": ", 1)[1]
        events.append(f"start: {purpose}")
        out, work = begin(*arguments, **options)
        work = _Work(work, events, purpose)
        if hasty:
            work.wait()
        return out, work

    return issue


def recorded(group, rank, case, hasty=False):
    """The events of a rank's part of a call and of its backward pass."""
    events = []
    with ExitStack() as patches:
        for name in ("begin_gather", "begin_exchange"):
            issue = _issuing(getattr(journeys, name), events, hasty)
            patches.enter_context(patch.object(journeys, name, issue))
        for name, place, function in COMPUTED:
            watched = _watched(getattr(place, function), name, events)
            patches.enter_context(patch.object(place, function, watched))
        by_rank(group, rank, case)
    return events


def assert_order(events, travels, computed):
    """A collective starts, something is computed, and only then the rank waits."""
    start, begin = events.index(f"start: {travels}"), f"begin: {computed}"
    wait = events.index(f"wait: {travels}")
    assert begin in events[start:], f"{computed} comes before {travels} starts"
    first = events.index(begin, start)
    assert first < wait, f"the rank waits before it computes: {events}"
    last = len(events) - 1 - events[::-1].index(f"end: {computed}")
    assert first < last < wait, f"the rank waits before {computed} is done: {events}"
