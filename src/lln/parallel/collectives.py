"""The two collectives of context parallelism, as operators with gradients.

`gather` gives every rank the tensors of all ranks; `exchange` sends rows from every rank to every
other. Both are linear: the gradient of an exchange is the exchange back, that of a gather is an
exchange and a sum. So one collective forward is one collective backward, and gradients can be
differentiated again. They are operators of ``torch.library``: a compiler sees one node and does
not look inside.

Every rank of the group must make the same calls in the same order, in the backward pass too.

Dimension legend: R ranks, n rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lln.errors import PeerError
from lln.parallel.ranks import Ranks, find_group
from lln.tracing import is_watched

# Called "into" before PyTorch 2.13, which warns about the old name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

# In the error of an attention's collective.
_COMPARED = ", which calls without lengths= compare first"


def gather(tensor: Tensor, ranks: Ranks, purpose: str) -> Tensor:
    """The tensors of all ranks, which have one shape: ``[R, ...]``.

    Args:
        tensor: This rank's.
        ranks: The group.
        purpose: The operation and the step it serves, for the message if it fails.
    """
    return _gather(tensor.contiguous(), ranks.size, ranks.name, purpose)


def gather_later(tensor: Tensor, ranks: Ranks, purpose: str) -> Callable[[], Tensor]:
    """Start a `gather`; what is returned waits for it and gives its result.

    Between the two this rank can compute. A compiler gets the gather at once.
    """
    if is_watched(tensor) or not tensor.numel():
        found = gather(tensor, ranks, purpose)
        return lambda: found
    works: list[Any] = []
    out = _GatherLater.apply(tensor, ranks, purpose, works)

    def finish() -> Tensor:
        with named(ranks.name, purpose, _COMPARED):
            works.pop().wait()
        return out

    return finish


def exchange(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], ranks: Ranks, purpose: str
) -> Tensor:
    """Send the first ``send[0]`` rows to rank 0, the next ``send[1]`` to rank 1, and so on.

    Args:
        rows: ``[n, ...]``, ordered by the rank they go to.
        send: How many rows every rank gets.
        receive: How many rows every rank sends here.
        ranks: The group.
        purpose: As in `gather`.

    Returns:
        ``[sum(receive), ...]``, ordered by the rank they came from.
    """
    return _exchange(rows.contiguous(), list(send), list(receive), ranks.name, purpose)


@torch.library.custom_op("lln::gather_ranks", mutates_args=())
def _gather(tensor: Tensor, size: int, group: str, purpose: str) -> Tensor:
    out = tensor.new_empty((size, *tensor.shape))
    if tensor.numel():
        with named(group, purpose, _COMPARED):
            _all_gather(out.flatten(), tensor.detach().flatten(), group=find_group(group))
    return out


@_gather.register_fake
def _(tensor: Tensor, size: int, group: str, purpose: str) -> Tensor:
    return tensor.new_empty((size, *tensor.shape))


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.size, ctx.group, ctx.purpose = inputs


def _gather_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    one_each = [1] * ctx.size
    purpose = _backward_of(ctx.purpose)
    parts = _exchange(gradient.contiguous(), one_each, one_each, ctx.group, purpose)
    return parts.sum(0), None, None, None


_gather.register_autograd(_gather_backward, setup_context=_save_gather)


class _GatherLater(torch.autograd.Function):
    """`_gather` that does not wait; it leaves in ``works`` what to wait for."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks, purpose: str, works: list[Any]) -> Tensor:
        ctx.size, ctx.group, ctx.purpose = ranks.size, ranks.name, purpose
        out = tensor.new_empty((ranks.size, *tensor.shape))
        own = tensor.detach().contiguous().flatten()
        with named(ranks.name, purpose, _COMPARED):
            works.append(_all_gather(out.flatten(), own, group=ranks.group(), async_op=True))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather_backward(ctx, *gradients)


@torch.library.custom_op("lln::exchange_rows", mutates_args=())
def _exchange(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: str, purpose: str
) -> Tensor:
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    # Also where this rank has nothing to send or to get: the others wait for it.
    counts = list(receive), list(send)
    with named(group, purpose, _COMPARED):
        dist.all_to_all_single(out, rows.detach(), *counts, group=find_group(group))
    return out


@_exchange.register_fake
def _(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: str, purpose: str
) -> Tensor:
    return rows.new_empty((sum(receive), *rows.shape[1:]))


def _save_exchange(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.send, ctx.receive, ctx.group, ctx.purpose = inputs


def _exchange_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    purpose = _backward_of(ctx.purpose)
    back = _exchange(gradient.contiguous(), ctx.receive, ctx.send, ctx.group, purpose)
    return back, None, None, None, None


_exchange.register_autograd(_exchange_backward, setup_context=_save_exchange)


@contextmanager
def named(group: str, purpose: str, hint: str = "") -> Iterator[None]:
    """If the collective inside fails, say in which operation; ``hint`` says more of shapes."""
    try:
        yield
    except RuntimeError as error:
        found = find_group(group)
        raise PeerError(
            f"{purpose} failed on rank {found.rank()} of {found.size()}: another rank stopped, did "
            f"not make the same call in time, or made it with other shapes{hint} "
            f"({_first_line(error)})."
        ) from error


def _backward_of(purpose: str) -> str:
    return purpose if purpose.endswith("(backward)") else f"{purpose} (backward)"


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
