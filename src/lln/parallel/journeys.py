"""Collectives that travel while the rank computes, forward and backward.

What starts one returns a function that waits for it and gives its result. In between the rank can
compute whatever does not need it. The graph has a node for either end, connected by an empty tensor
that stands for what is on its way. In the backward pass they change roles: the node of the arrival
sends the gradients back, that of the departure waits for them. PyTorch goes back through the nodes
that are ready in the order opposite to their making, so gradients travel while those of whatever
was computed in between are computed:

    forward     depart            compute              arrive
    backward    wait, gradient    its gradients        send the gradients back

Gradients can be differentiated again: their way back is a journey, too. Compilers, transforms and
dispatch modes get the operators of `lln.parallel.collectives`, which wait at once.

Dimension legend: R ranks, B batch, Hk key heads, X tokens of a rank and those borrowed, n rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lln.parallel.collectives import (
    COMPARED,
    backward_of,
    begin_exchange,
    begin_gather,
    exchange,
    exchange_rows,
    gather,
    named,
)
from lln.parallel.ranks import Ranks
from lln.tracing import is_batched, is_watched

Counts = tuple[list[int], list[int]]


def gather_later(tensor: Tensor, ranks: Ranks, purpose: str) -> Callable[[], Tensor]:
    """Start a `lln.parallel.collectives.gather`; what is returned waits for it."""
    if is_watched(tensor):
        found = gather(tensor, ranks, purpose)
        return lambda: found
    journey = _Journey(ranks.name, purpose, lambda parts: (parts.sum(0),))
    return journey.depart(tensor, [1] * ranks.size)


def exchange_later(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], ranks: Ranks, purpose: str
) -> Callable[[], Tensor]:
    """Start a `lln.parallel.collectives.exchange`; what is returned waits for it."""
    if is_watched(rows):
        found = exchange(rows, send, receive, ranks, purpose)
        return lambda: found
    journey = _Journey(ranks.name, purpose)
    return journey.depart(rows, (list(send), list(receive)))


class Lending:
    """Rows of key and value that other ranks will ask for; their gradients come back late.

    It is made before what the rank computes next, and the rows leave later. So the gradients that
    come back are awaited after those of everything that was computed since.
    """

    def __init__(self, key: Tensor, value: Tensor, ranks: Ranks, purpose: str) -> None:
        """Of key ``[B, Hk, X, D]`` and value ``[B, Hk, X, E]``."""
        self._sides, self._ranks = (key, value), ranks
        returned = partial(_rows_returned, (key.shape, value.shape))
        self._journey = _Journey(ranks.name, purpose, returned)
        self._token = _Depart.apply(self._journey, key, value)

    def send(
        self, places: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> Callable[[], Tensor]:
        """Start to exchange rows ``[n, D + E]``; what is returned waits for those of others.

        ``places`` int ``[n]`` says which rows go, as (sample · Hk + head) · X + token; the numbers
        are as in `lln.parallel.collectives.exchange`.
        """
        (key, value), token, journey = self._sides, self._token, self._journey
        del self._sides, self._token
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_watched(key)):
            sides = [side.flatten(0, 2).index_select(0, places) for side in (key, value)]
            rows = torch.cat(sides, -1)
        if is_watched(key):
            found = exchange(rows, send, receive, self._ranks, journey.purpose)
            return lambda: found
        journey.start(rows, (list(send), list(receive)))
        return lambda: _Arrive.apply(token, journey, places)


def _rows_returned(
    shapes: tuple[torch.Size, ...], rows: Tensor, places: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of what was lent, from those of the rows that left its places."""
    parts = rows.split([shape[3] for shape in shapes], -1)
    return tuple(
        rows.new_zeros(shape[:3].numel(), shape[3]).index_add(0, places, part).view(shape)
        for shape, part in zip(shapes, parts, strict=True)
    )


class _Journey:
    """One collective and that of its gradients, known to the nodes of both ends."""

    def __init__(
        self,
        group: str,
        purpose: str,
        returned: Callable[..., tuple[Tensor, ...]] = lambda rows: (rows,),
    ) -> None:
        """Of the group of a name, for a purpose.

        ``returned`` makes the gradients of what departed from the rows that came back, and from the
        tensors that the node of the arrival has kept.
        """
        self.group, self.purpose, self._returned = group, purpose, returned
        self._under_way: tuple[Tensor, Any, Tensor] | None = None
        self._counts: Counts = [], []
        self._back: tuple[Callable[[Tensor], Tensor], tuple[Tensor, ...]] | None = None

    def depart(self, rows: Tensor, counts: Counts | list[int]) -> Callable[[], Tensor]:
        """Make the node of the departure and start; what is returned waits."""
        token = _Depart.apply(self, rows)
        self.start(rows.detach(), counts)
        return lambda: _Arrive.apply(token, self)

    def start(self, rows: Tensor, counts: Counts | list[int]) -> None:
        """Issue the collective of what this rank sends.

        Counts are rows to and from every rank; one list = a gather, whose gradients are exchanged
        like that.
        """
        rows = rows.contiguous()
        if isinstance(counts, list):
            self._counts = counts, counts
            out, work = begin_gather(rows, len(counts), self.group, self.purpose, later=True)
        else:
            self._counts = counts
            out, work = begin_exchange(rows, *counts, self.group, self.purpose, later=True)
        # What is sent must stay until it has left.
        self._under_way = out, work, rows

    def wait(self) -> Tensor:
        """The result of the collective."""
        assert self._under_way is not None
        (out, work, _), self._under_way = self._under_way, None
        if work is not None:
            with named(self.group, self.purpose, COMPARED):
                work.wait()
        return out

    def send_back(self, gradient: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        """Start the collective of the gradients; returns what stands for them on their way."""
        purpose, (sent, received) = backward_of(self.purpose), self._counts
        if is_watched(gradient) or is_batched(gradient):
            rows = gradient.contiguous()
            found = exchange_rows(rows, received, sent, self.group, purpose)
            self._back = (lambda _: found), kept
            return gradient.new_empty(0)
        journey = _Journey(self.group, purpose)
        token = _Depart.apply(journey, gradient)
        journey.start(gradient.detach(), (received, sent))
        self._back = (lambda token: _Arrive.apply(token, journey)), kept
        return token

    def come_back(self, token: Tensor) -> tuple[Tensor, ...]:
        """Wait for the gradients of what departed."""
        assert self._back is not None
        (wait, kept), self._back = self._back, None
        return self._returned(wait(token), *kept)


class _Depart(torch.autograd.Function):
    """Makes of what leaves an empty tensor that stands for it; backward waits for its gradients."""

    @staticmethod
    def forward(ctx: Any, journey: _Journey, *sides: Tensor) -> Tensor:
        ctx.journey = journey
        return sides[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.journey.come_back(*gradients)


class _Arrive(torch.autograd.Function):
    """Waits for what an empty tensor stands for; backward sends its gradients on their way."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, journey: _Journey, *kept: Tensor) -> Tensor:
        ctx.journey = journey
        ctx.save_for_backward(*kept)
        return journey.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        return ctx.journey.send_back(*gradients, kept), *(None,) * (1 + len(kept))
