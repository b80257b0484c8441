"""Lets instruments watch calls of attention.

An entry point announces what it is about to compute. Without observers that costs one look at an
empty list; inside a compiled graph nothing is announced.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lln.checks.printing import brief
from lln.tracing import is_compiling


@dataclass(frozen=True)
class Announcement:
    """One call of an entry point, as it is about to be computed.

    Attributes:
        kind: ``"softmax"``, ``"lln"``, ``"diag"``, ``"lln_diag"``, ``"window"``, ``"pages"`` or
            ``"lln_keys"``.
        query: ``[B, H, T, D]``, or packed ``[T, H, D]`` with ``cu_seqlens``.
        key: ``[B, Hk, S, D]``, or packed ``[T, Hk, D]``.
        alpha: α of the LLN part, as used.
        beta: β of the LLN part, as used.
        block_size: Tokens in a diagonal block.
        mix: Weight of the LLN part; the diagonal part has the rest.
        scale: Factor of softmax scores; None = 1/√D.
        key_mask: bool ``[B, S]``, True = attend.
        is_causal: Whether row i sees keys 0 … i only.
        cu_seqlens: Bounds of packed sequences.
        offset: What ``"lln_keys"`` adds to the logits of the slots.
        indices: The chosen keys of every group of queries, ``[B, H, G, K]``; -1 = none. Of
            ``"pages"`` the pages of every query, ``[B, Hk, T, P]``; of packed ones None.
        group_size: Queries in a group.
        window: Tokens that ``"window"`` and ``"pages"`` see before a query, and behind it if they
            are not causal.
        sinks: How many first tokens ``"pages"`` sees.
        page_size: Tokens in a page.
    """

    kind: str
    query: Tensor
    key: Tensor
    alpha: float | Tensor | None = None
    beta: float | Tensor | None = None
    block_size: int | None = None
    mix: float | Tensor = 0.5
    scale: float | None = None
    key_mask: Tensor | None = None
    is_causal: bool = False
    cu_seqlens: Tensor | None = None
    offset: float | Tensor | None = None
    indices: Tensor | None = None
    group_size: int | None = None
    window: int | None = None
    sinks: int = 0
    page_size: int = 0

    def __repr__(self) -> str:
        """Tensors are shown by their shapes."""
        return brief(self, vars(self))


Observer = Callable[[Announcement], None]

_observers: list[Observer] = []


def is_observed() -> bool:
    """Whether there are observers, and the call is a real one rather than a trace."""
    return bool(_observers) and not is_compiling()


def announce(announcement: Announcement) -> None:
    """Tell every observer."""
    for observer in tuple(_observers):
        observer(announcement)


def add_observer(observer: Observer) -> None:
    """Tell ``observer`` about every call, in any thread, until it is removed."""
    _observers.append(observer)


def remove_observer(observer: Observer) -> None:
    """Undo one `add_observer`."""
    _observers.remove(observer)
