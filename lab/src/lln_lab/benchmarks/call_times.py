"""The time of a call on a GPU: as a CUDA graph, what the GPU takes; and what the host takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def graph_ms(call: Callable[[], Any], rounds: int = 20) -> float:
    """Milliseconds of a replay: the lower quartile of the rounds, after five to warm up."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(rounds + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(3):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 3)
    return sorted(times[5:])[rounds // 4]


def host_ms(call: Callable[[], Any]) -> float:
    """Milliseconds that the host spends on a call, at best."""
    for _ in range(50):
        call()
    best = float("inf")
    for _ in range(100):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            call()
        best = min(best, (time.perf_counter() - start) * 100)
    return best
