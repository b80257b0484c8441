"""Plain PyTorch on a busy CPU: threads are synchronised once per call, not once per operation.

PyTorch splits every operation over its threads and waits for all of them before the next one. If
other programs keep the processors busy, each of these waits lasts until the last thread gets its
turn. Fused softmax waits once, LLN attention 11 times, causal 50. Heads do not depend on each
other, so on a busy machine every thread computes its share of the heads from start to end, with one
wait. On an idle machine waiting is short and PyTorch's way is faster. Both give the same numbers.

A *side* is a tensor or number that a call takes: query, key, value, α, β, key mask or mix.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lln.eager.load import LoadWatch, own_cpus
from lln.tracing import has_values, is_moded

Result = TypeVar("Result")
Side = Tensor | float | None

# Smaller tensors are not split, as in PyTorch itself (its grain is 32,768).
_FEWEST = 65_536
# Cores that background work takes even on an idle machine.
_SPARE = 0.3

# Returns the active saved-tensor hooks; None where this version of PyTorch lacks the function.
_top_hooks: Any = getattr(
    getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None
)

_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


class Cut(NamedTuple):
    """Where tensors are cut into pieces that do not depend on each other.

    Attributes:
        axes: For every side the axis, counted from the end, along which it is cut; None = never. A
            side with one entry there, or without that axis, goes whole to every piece.
        units: How many key heads or samples there are; these are not cut further.
        pieces: Number of pieces.
    """

    axes: tuple[int | None, ...]
    units: int
    pieces: int

    def pieces_of(self, sides: Sequence[Side], index: int) -> list[Any]:
        """Piece ``index`` of every side."""
        return [self.of(side, index, axis) for side, axis in zip(sides, self.axes, strict=True)]

    def of(self, side: Side, index: int, axis: int | None) -> Any:
        """Piece ``index`` of a side."""
        where = self.place(side, index, axis)
        return side if where is None or not isinstance(side, Tensor) else side.narrow(*where)

    def place(self, side: Side, index: int, axis: int | None) -> tuple[int, int, int] | None:
        """Axis, start and length of a piece; None where a side is not cut."""
        if axis is None or not isinstance(side, Tensor) or side.dim() < -axis:
            return None
        each = side.shape[axis] // self.units
        if each == 0 or (side.shape[axis] == 1 and self.units > 1):
            return None
        start = index * self.units // self.pieces
        end = (index + 1) * self.units // self.pieces
        return axis, start * each, (end - start) * each


def cut_heads(query: Tensor, key: Tensor, axes: dict[str, tuple[int | None, ...]]) -> Cut | None:
    """How a call is divided between threads; None if it is not.

    Args:
        query: ``[B, H, T, D]``, or ``[T, H, D]`` of packed sequences.
        key: The same with Hk heads.
        axes: The axis of every side, by what is divided: ``"heads"`` or ``"samples"``.
    """
    threads = _threads_for(query)
    if threads < 2 or not _is_crowded(threads):
        return None
    units = {"heads": key.shape[axes["heads"][1] or 0]}
    if "samples" in axes:
        units["samples"] = query.shape[0]
    # Choose what leaves the fewest threads without work; heads, if equal.
    best = max(units, key=lambda name: (min(units[name], threads), name == "heads"))
    pieces = min(units[best], threads)
    return Cut(axes[best], units[best], pieces) if pieces > 1 else None


_watch = LoadWatch()


def _is_crowded(threads: int) -> bool:
    """Whether other programs are using some of the processors that these threads would need."""
    return threads + _watch.busy() > len(own_cpus()) + _SPARE


def _threads_for(query: Tensor) -> int:
    """How many threads a call gets; 1 if it is small, or if a tracer has to see its operations."""
    # `has_values` comes before `numel`, because a trace must not depend on the size.
    if query.device.type != "cpu" or not has_values(query) or query.numel() < _FEWEST:
        return 1
    if type(query) not in (Tensor, torch.nn.Parameter) or not torch.backends.openmp.is_available():
        return 1
    if is_moded() or forward_ad._current_level >= 0 or getattr(_here, "is_worker", False):
        return 1
    return torch.get_num_threads()


def share_out(run: Callable[..., Tensor], sides: Sequence[Side], cut: Cut | None) -> Tensor:
    """``run(*sides)``, piece by piece in threads; differentiable any number of times.

    Args:
        run: Takes the sides and returns ``[..., E]`` with the leading shape and the type of the
            first; each piece of the result depends only on the same piece of the sides.
        sides: query, key, value, then the other arguments of ``run``.
        cut: How to cut them; None = run in this thread, uncut.
    """
    if cut is None:
        return run(*sides)
    return _Shared.apply(run, cut, *sides)


def over_threads(jobs: Sequence[Callable[[], Result]]) -> list[Result]:
    """What every job returns; each job runs in one thread, which does not split operations."""
    pool = _pool(torch.get_num_threads())
    inference = torch.is_inference_mode_enabled()

    def start(job: Callable[[], Result]) -> Result:
        # Inference mode is per thread; the worker has to take over the caller's.
        with torch.inference_mode(inference):
            return job()

    waiting: list[Future[Result]] = [pool.submit(start, job) for job in jobs]
    return [future.result() for future in waiting]


class _Shared(torch.autograd.Function):
    """Computes pieces in threads; each has its own autograd graph, whose backward runs likewise."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], cut: Cut, *sides: Side) -> Tensor:
        ctx.run, ctx.cut = run, cut
        ctx.rest = [None if isinstance(side, Tensor) else side for side in sides]
        ctx.places = [index for index, side in enumerate(sides) if isinstance(side, Tensor)]
        ctx.save_for_backward(*(side for side in sides if isinstance(side, Tensor)))
        asked = [index for index, wanted in enumerate(ctx.needs_input_grad[2:]) if wanted]
        query, _, value, *_ = sides
        assert isinstance(query, Tensor)
        assert isinstance(value, Tensor)
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        # Saved-tensor hooks (checkpointing, offloading) are per thread: workers would bypass them.
        keeps = bool(asked) and _top_hooks is not None and _top_hooks(True) is None

        def job(index: int) -> _Piece | None:
            piece = _Piece(run, cut, sides, index, asked if keeps else [])
            with torch.no_grad():
                cut.of(out, index, cut.axes[0]).copy_(piece.out)
            return piece if keeps else None

        ctx.pieces = over_threads([partial(job, index) for index in range(cut.pieces)])
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        (gradient,) = grad_outputs
        sides: list[Side] = list(ctx.rest)
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            sides[place] = tensor
        asked = [index for index, wanted in enumerate(ctx.needs_input_grad[2:]) if wanted]
        if torch.is_grad_enabled():
            # For a second derivative compute without threads.
            leaves: list[Any] = [sides[index] for index in asked]
            grads = torch.autograd.grad(
                ctx.run(*sides), leaves, gradient, create_graph=True, allow_unused=True
            )
        else:
            pieces, ctx.pieces = ctx.pieces, [None] * ctx.cut.pieces
            grads = _gradients(ctx.run, ctx.cut, sides, asked, gradient, pieces)
        found: list[Tensor | None] = [None] * len(sides)
        for index, grad in zip(asked, grads, strict=True):
            found[index] = grad
        return (None, None, *found)


class _Piece:
    """One piece: its output, and the leaves that need a gradient."""

    def __init__(
        self,
        run: Callable[..., Tensor],
        cut: Cut,
        sides: Sequence[Side],
        index: int,
        asked: list[int],
    ) -> None:
        pieces = [
            piece.detach() if isinstance(piece, Tensor) else piece
            for piece in cut.pieces_of(sides, index)
        ]
        self.leaves = [pieces[at].requires_grad_() for at in asked]
        with torch.set_grad_enabled(bool(asked)):
            self.out = run(*pieces)


def _gradients(
    run: Callable[..., Tensor],
    cut: Cut,
    sides: list[Side],
    asked: list[int],
    gradient: Tensor,
    pieces: list[_Piece | None],
) -> list[Tensor]:
    """Gradients of the sides that need one; pieces that were not kept are computed again."""
    wholes = {
        index: torch.empty_like(side) for index in asked if isinstance(side := sides[index], Tensor)
    }

    def job(index: int) -> dict[int, Tensor]:
        piece = pieces[index] or _Piece(run, cut, sides, index, asked)
        upstream = cut.of(gradient, index, cut.axes[0])
        grads = torch.autograd.grad(piece.out, piece.leaves, upstream, allow_unused=True)
        shared = {}
        for at, grad, leaf in zip(asked, grads, piece.leaves, strict=True):
            grad = torch.zeros_like(leaf) if grad is None else grad
            where = cut.place(sides[at], index, cut.axes[at])
            if where is None:
                shared[at] = grad
            else:
                wholes[at].narrow(*where).copy_(grad)
        return shared

    found = over_threads([partial(job, index) for index in range(cut.pieces)])
    # A side that went whole to every piece sums its gradients, always in the same order.
    for index, shared in enumerate(found):
        for at, grad in shared.items():
            wholes[at] = grad if index == 0 else wholes[at] + grad
    return [wholes[at] for at in asked]


_here = threading.local()


def _pool(threads: int) -> ThreadPoolExecutor:
    """A pool of threads that do not split operations; created when first needed."""
    with _lock:
        pool = _pools.get(threads)
        if pool is None:
            pool = _pools[threads] = ThreadPoolExecutor(threads, "lln", _begin)
            ready = threading.Barrier(threads + 1)
            for _ in range(threads):
                pool.submit(ready.wait)
            ready.wait()
            # Undo a side effect: set_num_threads(1) in a worker also applies to all new threads.
            torch.set_num_threads(threads)
        return pool


def _begin() -> None:
    """Set up a thread that does not split operations.

    `get_num_threads` comes first: its first call in a thread resets the number to the global one.
    """
    _here.is_worker = True
    torch.get_num_threads()
    torch.set_num_threads(1)


def _forget() -> None:
    """Drop the pools after a fork, because threads are not copied into the child process."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
