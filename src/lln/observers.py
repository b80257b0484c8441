"""Lets instruments watch calls of attention.

A way announces the call that it is about to compute, with α, β and what was chosen in place.
Without observers that costs one look at an empty list; inside a compiled graph nothing is
announced.
"""

from __future__ import annotations

from collections.abc import Callable

from lln.checks.call import Call
from lln.tracing import is_compiling

Observer = Callable[[Call], None]

_observers: list[Observer] = []


def is_observed() -> bool:
    """Whether there are observers, and the call is a real one rather than a trace."""
    return bool(_observers) and not is_compiling()


def announce_call(call: Call) -> None:
    """Tell every observer of a call."""
    for observer in tuple(_observers):
        observer(call)


def add_observer(observer: Observer) -> None:
    """Tell ``observer`` about every call, in any thread, until it is removed."""
    _observers.append(observer)


def remove_observer(observer: Observer) -> None:
    """Undo one `add_observer`."""
    _observers.remove(observer)
