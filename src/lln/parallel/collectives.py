"""The two collectives of context parallelism, as operators with gradients.

`gather` gives every rank the tensors of all ranks; `exchange` sends rows from every rank to every
other. Both are linear: the gradient of an exchange is the exchange back, that of a gather is an
exchange and a sum. So one collective forward is one collective backward, and gradients can be
differentiated again. They are operators of ``torch.library``: a compiler sees one node and does
not look inside. `lln.parallel.journeys` has the same collectives for ranks that compute meanwhile.

Every rank of the group must make the same calls in the same order, in the backward pass too.

Dimension legend: R ranks, n rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lln.errors import PeerError
from lln.parallel.ranks import Ranks, find_group, find_ranks

# Called "into" before PyTorch 2.13, which warns about the old name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

# In the error of an attention's collective.
COMPARED = ", which calls without lengths= compare first"


def gather(tensor: Tensor, ranks: Ranks, purpose: str) -> Tensor:
    """The tensors of all ranks, which have one shape: ``[R, ...]``.

    Args:
        tensor: This rank's.
        ranks: The group.
        purpose: The operation and the step it serves, for the message if it fails.
    """
    return _gather(tensor.contiguous(), ranks.size, ranks.name, purpose)


def exchange(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], ranks: Ranks, purpose: str
) -> Tensor:
    """Send the first ``send[0]`` rows to rank 0, the next ``send[1]`` to rank 1, and so on.

    Rows ``[n, ...]`` come in the order of ranks, too: ``[sum(receive), ...]``, where ``receive``
    says how many every rank sends here. The purpose is as in `gather`.
    """
    return exchange_rows(rows.contiguous(), list(send), list(receive), ranks.name, purpose)


def begin_gather(
    tensor: Tensor, size: int, group: str, purpose: str, *, later: bool
) -> tuple[Tensor, Any]:
    """Issue a gather: where its result comes to be, and what to wait for, or None.

    The tensor is contiguous. If nobody waits for the result ``later`` it is there.
    """
    out, work = tensor.new_empty((size, *tensor.shape)), None
    if tensor.numel():
        with named(group, purpose, COMPARED):
            own = tensor.detach().flatten()
            work = _all_gather(out.flatten(), own, group=find_group(group), async_op=later)
    return out, work


def begin_exchange(
    rows: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    group: str,
    purpose: str,
    *,
    later: bool,
) -> tuple[Tensor, Any]:
    """Issue an exchange: as `begin_gather`, with the numbers of rows of `exchange`."""
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    # Also where this rank has nothing to send or to get: the others wait for it.
    counts = list(receive), list(send)
    with named(group, purpose, COMPARED):
        found = find_group(group)
        work = dist.all_to_all_single(out, rows.detach(), *counts, group=found, async_op=later)
    return out, work


@torch.library.custom_op("lln::gather_ranks", mutates_args=())
def _gather(tensor: Tensor, size: int, group: str, purpose: str) -> Tensor:
    return begin_gather(tensor, size, group, purpose, later=False)[0]


@_gather.register_fake
def _(tensor: Tensor, size: int, group: str, purpose: str) -> Tensor:
    return tensor.new_empty((size, *tensor.shape))


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.size, ctx.group, ctx.purpose = inputs


def _gather_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    one_each = [1] * ctx.size
    purpose = backward_of(ctx.purpose)
    parts = exchange_rows(gradient.contiguous(), one_each, one_each, ctx.group, purpose)
    return parts.sum(0), None, None, None


_gather.register_autograd(_gather_backward, setup_context=_save_gather)


@torch.library.custom_op("lln::exchange_rows", mutates_args=())
def exchange_rows(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: str, purpose: str
) -> Tensor:
    """The operator of `exchange`, by the name of the group."""
    return begin_exchange(rows, send, receive, group, purpose, later=False)[0]


@exchange_rows.register_fake
def _(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: str, purpose: str
) -> Tensor:
    return rows.new_empty((sum(receive), *rows.shape[1:]))


def _save_exchange(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.send, ctx.receive, ctx.group, ctx.purpose = inputs


def _exchange_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    purpose = backward_of(ctx.purpose)
    back = exchange_rows(gradient.contiguous(), ctx.receive, ctx.send, ctx.group, purpose)
    return back, None, None, None, None


exchange_rows.register_autograd(_exchange_backward, setup_context=_save_exchange)


@contextmanager
def named(group: str, purpose: str, hint: str = "") -> Iterator[None]:
    """If the collective inside fails, say in which operation; ``hint`` says more of shapes."""
    try:
        yield
    except RuntimeError as error:
        found, line = find_group(group), str(error).strip().split("\n")[0].rstrip(".")
        raise PeerError(
            f"{purpose} failed on rank {found.rank()} of {found.size()}: another rank stopped, did "
            f"not make the same call in time, or made it with other shapes{hint} "
            f"({line})."
        ) from error


def backward_of(purpose: str) -> str:
    """What the collective of the gradients is for."""
    return purpose if purpose.endswith("(backward)") else f"{purpose} (backward)"


def sum_gradients(model: nn.Module, group: Any = None) -> None:
    """Add up what the tokens of all ranks contribute to the gradients of a model's weights.

    For a loss that is divided by the number of tokens of *all* ranks, every rank then has the
    gradients of one process. DDP and FSDP do this themselves, and divide by the number of ranks.

    Args:
        model: After ``backward``. A weight that this rank's tokens did not use contributes zeros.
        group: A process group, or one axis of a ``DeviceMesh``; None = all processes.

    Raises:
        PeerError: If another rank stops, does not come, or has another model.
    """
    operation = "lln.parallel.sum_gradients"
    ranks = find_ranks(group, operation)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            with named(ranks.name, f"{operation}: adding up the gradients of {name}"):
                dist.all_reduce(weight.grad, group=ranks.group())
