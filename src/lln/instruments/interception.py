"""Seeing attention calls from outside: who listens, where a call happens, what is patched.

While somebody listens, functions are replaced by wrappers that call the original with the same
arguments. The originals are put back when the last listener leaves. Modules are followed by global
hooks: a hook on a single ``nn.TransformerEncoderLayer`` would switch it from its fast path to
another kernel, and change the output.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from lln.checks.call import Call
from lln.observers import add_observer, remove_observer
from lln.tracing import is_compiling


@dataclass(frozen=True)
class Sighting:
    """An attention call that was seen.

    Attributes:
        call: What was computed.
        pair_mask: A mask over pairs of tokens, as given: bool (True = attend) or additive.
        weights: P itself ``[B, H, T, S]``, where the caller computed it anyway.
        problem: Why queries and keys alone do not determine P; empty if they do.
    """

    call: Call
    pair_mask: Tensor | None = None
    weights: Tensor | None = None
    problem: str = ""


class Listener(Protocol):
    """Receives the attention calls inside one model."""

    names: dict[int, str]

    def hear(self, layer: str, module: nn.Module, sighting: Sighting) -> None:
        """Take a call that happened in ``layer``."""
        ...

    def forward_ended(self, module: nn.Module) -> None:
        """Learn that the forward of some module has ended, with or without an error."""
        ...


class _Thread(threading.local):
    """What is under way in this thread."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.round = 0
        self.sightings = 0
        self.busy = False


class Patch(NamedTuple):
    """An attribute to replace while somebody listens: by ``wrap`` of what is there."""

    owner: Any
    name: str
    wrap: Callable[[Any], Any]


@dataclass
class _Applied:
    original: Any
    replacement: Any
    users: int = 0


@dataclass
class _Switchboard:
    listeners: tuple[Listener, ...] = ()
    applied: dict[tuple[int, str], _Applied] = field(default_factory=dict)
    hooks: list[RemovableHandle] = field(default_factory=list)
    round: int = 0


# Patching is for the whole process, so one lock guards it; a listener may listen inside another.
_lock = threading.RLock()
_board = _Switchboard()
_thread = _Thread()


def listening() -> bool:
    """Whether a call made now, in this thread, should be looked at.

    Not inside a graph being traced, not while an instrument itself computes, and not when a
    checkpointed forward is run again inside the backward pass.
    """
    return (
        not is_compiling()
        and bool(_board.listeners)
        and not _thread.busy
        and torch._C._current_graph_task_id() == -1
    )


def sight(sighting: Sighting) -> None:
    """Tell every listener that watches the model in which the call happened."""
    if not listening():
        return
    _thread.sightings += 1
    for listener in _board.listeners:
        found = next((m for m in reversed(_thread.modules) if id(m) in listener.names), None)
        if found is None:
            continue
        if isinstance(found, nn.TransformerEncoderLayer) and id(found.self_attn) in listener.names:
            # Its fast path computes the attention without calling the module.
            found = found.self_attn
        with _quiet():
            listener.hear(listener.names[id(found)], found, sighting)


def sighted() -> int:
    """How many calls were seen in this thread so far; tells whether one was seen inside another."""
    return _thread.sightings


@contextmanager
def inside(module: nn.Module) -> Iterator[None]:
    """Attribute what is seen in the block to ``module``."""
    depth = len(_thread.modules)
    _thread.modules.append(module)
    try:
        yield
    finally:
        del _thread.modules[depth:]


@contextmanager
def _quiet() -> Iterator[None]:
    """Instruments call attention functions themselves."""
    _thread.busy = True
    try:
        yield
    finally:
        _thread.busy = False


def start(listener: Listener, patches: Sequence[Patch]) -> None:
    """Begin to tell ``listener``, with these patches in place."""
    with _lock:
        for owner, name, wrap in patches:
            place = (id(owner), name)
            if place not in _board.applied:
                original = getattr(owner, name)
                _board.applied[place] = _Applied(original, wrap(original))
                setattr(owner, name, _board.applied[place].replacement)
            _board.applied[place].users += 1
        if not _board.listeners:
            _board.round += 1
            add_observer(_hear_entry_point)
            _board.hooks = [
                register_module_forward_pre_hook(_enter_module),
                register_module_forward_hook(_leave_module, always_call=True),
            ]
        _board.listeners = (*_board.listeners, listener)


def stop(listener: Listener, patches: Sequence[Patch]) -> None:
    """Undo `start`; what somebody else has put over our patches stays."""
    with _lock:
        _board.listeners = tuple(other for other in _board.listeners if other is not listener)
        for owner, name, _ in patches:
            applied = _board.applied[id(owner), name]
            applied.users -= 1
            if applied.users == 0:
                del _board.applied[id(owner), name]
                if getattr(owner, name) is applied.replacement:
                    setattr(owner, name, applied.original)
        if not _board.listeners:
            remove_observer(_hear_entry_point)
            for hook in _board.hooks:
                hook.remove()
            _board.hooks = []


def _hear_entry_point(call: Call) -> None:
    """A call of lln's own functions."""
    sight(Sighting(call))


def _enter_module(module: nn.Module, _: object) -> None:
    if is_compiling():
        return
    if _thread.round != _board.round:
        # Left over from a forward that was running when the last listener left.
        _thread.modules.clear()
        _thread.round = _board.round
    _thread.modules.append(module)


def _leave_module(module: nn.Module, _: object, __: object) -> None:
    # A module that was entered before anybody listened was not noted.
    if not is_compiling() and module in _thread.modules:
        while _thread.modules.pop() is not module:
            pass
        for listener in _board.listeners:
            listener.forward_ended(module)
