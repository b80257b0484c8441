"""Milliseconds and bytes of one call, on a CPU and on a GPU."""

from __future__ import annotations

import gc
import time
import timeit
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lln.cpu import library
from lln_lab.bench.cases import Case
from lln_lab.bench.operations import Operation
from lln_lab.bench.spread import Timed, timed

# Bytes copied to find the machine's speed: far more than any cache holds.
_COPIED = {"cpu": 1 << 28, "cuda": 1 << 29}
_Made = TypeVar("_Made")
# Fewest runs for a meaningful spread.
_FEWEST_RUNS = 3
# Seconds of a block of short calls: ten thousand times what it costs to read the clock.
_SHORTEST_BLOCK = 1e-3
_MOST_BLOCKS = 1000


def measure(
    operation: Operation, case: Case, inputs: Sequence[Tensor], seconds: float
) -> dict[str, Any]:
    """Time and peak memory of one case.

    Args:
        operation: What to run.
        case: Says whether the backward is part of it.
        inputs: What `Layout.make` drew.
        seconds: How long to repeat the call.

    Returns:
        ``milliseconds`` of a call from Python (median) and ``milliseconds_quartiles``, on a GPU
        also ``graph_milliseconds`` with quartiles, of its replay as a CUDA graph (None if it cannot
        be captured); ``peak_bytes`` that are alive at once (not of compiled code on a CPU) and
        ``memory_ratio``, these divided by the tensors that no implementation can avoid.
    """
    leaves = [
        tensor.detach().requires_grad_(case.backward and tensor.is_floating_point())
        for tensor in inputs
    ]
    with torch.no_grad():
        arguments = operation.prepare(*leaves)
    # In every layout the output has the shape of the query.
    held = sum(one.nbytes for one in arguments if isinstance(one, Tensor))
    needed = (1 + case.backward) * (held + inputs[0].nbytes)
    learnt = [leaf for leaf in leaves if leaf.requires_grad]
    call = bind(lambda: operation.run(*arguments), learnt, inputs[0] if case.backward else None)
    call()
    on_gpu = inputs[0].is_cuda
    found: dict[str, Any] = {}
    # Not for compiled functions or passes: under the mode that counts tensors they would not run.
    by_library = operation.kind == "lln" and library.load() is not None
    if on_gpu or not (operation.is_compiled or by_library):
        upstream = inputs[0].nbytes if case.backward else 0
        peak = held + upstream + peak_bytes(call, on_gpu)
        found |= {"peak_bytes": peak, "memory_ratio": peak / needed}
    found |= milliseconds(call, seconds, on_gpu).fields("milliseconds")
    if on_gpu:
        graph = _time_graph(call, seconds)
        name = "graph_milliseconds"
        found |= {name: None} if graph is None else graph.fields(name)
    return found


def bind(
    run: Callable[[], Tensor], learnt: Sequence[Tensor], like: Tensor | None
) -> Callable[[], Tensor]:
    """The call to time: forward, or forward + backward; it returns the output.

    Args:
        run: The forward.
        learnt: What gets gradients.
        like: A tensor of the output's shape; None = without a backward.
    """
    if like is None:
        return torch.no_grad()(run)
    upstream = torch.randn_like(like)

    def both() -> Tensor:
        out = run()
        torch.autograd.grad(out, learnt, upstream)
        return out.detach()

    return both


def milliseconds(call: Callable[[], object], seconds: float, on_gpu: bool) -> Timed:
    """The time of a call that is repeated for ``seconds``."""
    return (gpu_milliseconds if on_gpu else cpu_milliseconds)(call, seconds)


def peak_bytes(call: Callable[[], object], on_gpu: bool) -> int:
    """The most bytes that a call adds to what was allocated before it."""
    return (gpu_peak if on_gpu else cpu_peak)(call)


def gpu_peak(call: Callable[[], object]) -> int:
    """Bytes that a call allocates at most at one time."""
    torch.cuda.synchronize()
    before = _settled_bytes()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _settled_bytes() -> int:
    """Allocated bytes once no more memory is being freed.

    An autograd thread holds the last call's gradients slightly longer than the call: if they were
    counted here, the next call's peak would be too low.
    """
    now = torch.cuda.memory_allocated()
    while True:
        time.sleep(0.01)
        later = torch.cuda.memory_allocated()
        if later == now:
            return now
        now = later


class _Alive(TorchDispatchMode):
    """Counts the bytes of the tensors that operators have made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_place(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and _place(tensor) not in given | self._known:
                storage, size = tensor.untyped_storage(), tensor.untyped_storage().nbytes()
                self._known.add(_place(tensor))
                self.now += size
                weakref.finalize(storage, self._forget, _place(tensor), size)
        self.peak = max(self.peak, self.now)
        return out

    def _forget(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def cpu_peak(call: Callable[[], object]) -> int:
    """Bytes of the tensors alive at once during a call; what operators use inside is not seen."""
    with _Alive() as alive:
        call()
    return alive.peak


def cpu_milliseconds(call: Callable[[], object], seconds: float) -> Timed:
    """In blocks of calls that follow each other, on as many threads as torch is set to."""
    # Not torch's timer: to load it is to search for CUDA, and to warn where there is none.
    timer, calls = timeit.Timer(call), 1
    block = max(_SHORTEST_BLOCK, seconds / _MOST_BLOCKS)
    while timer.timeit(calls) < block:
        calls *= 10
    runs: list[float] = []
    while len(runs) < _FEWEST_RUNS or calls * sum(runs) < seconds:
        runs.append(timer.timeit(calls) / calls)
    return timed(runs).times(1e3)


def gpu_milliseconds(call: Callable[[], object], seconds: float) -> Timed:
    """By CUDA events, the L2 cache flushed before every call."""
    from triton.testing import do_bench

    warmup, repeat = max(1, round(300 * seconds)), max(1, round(1000 * seconds))
    found: Any = do_bench(call, warmup=warmup, rep=repeat, quantiles=[0.5, 0.25, 0.75])
    return Timed(*map(float, found))


def _time_graph(call: Callable[[], object], seconds: float) -> Timed | None:
    """The call replayed as a CUDA graph: what the GPU takes, without Python launching it."""
    current = torch.cuda.current_stream()
    try:
        graph, _ = captured(call)
    except RuntimeError as error:
        # Restore the stream: a failed capture leaves its own stream as the current one.
        torch.cuda.set_stream(current)
        if is_out_of_memory(error):
            raise
        return None
    found = gpu_milliseconds(graph.replay, seconds)
    graph.reset()
    return found


def captured(call: Callable[[], _Made], warm_ups: int = 1) -> tuple[torch.cuda.CUDAGraph, _Made]:
    """A call recorded as a CUDA graph, and its result, which every replay overwrites."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    # Warm-up: kernels are compiled and the optimiser's state is created before the recording.
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            call()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    return graph, made


def copy_speed(device: str) -> float:
    """Bytes read and written per second by a large copy, in TB/s: what floors are measured with."""
    source = torch.randn(_COPIED[device] // 4, device=device)
    target = torch.empty_like(source)
    on_gpu = device == "cuda"
    found = milliseconds(lambda: target.copy_(source), 0.1 if on_gpu else 0.3, on_gpu)
    return 2 * source.nbytes / found.median / 1e9


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a GPU or on a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "can't allocate memory" in text
    )


def free_memory(collect: bool = True) -> None:
    """Free what the last case held.

    Args:
        collect: Whether to collect reference cycles too, which takes a tenth of a second.
    """
    if collect:
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
