"""How many threads a command runs on.

Threads that share their processors with other programs wait for each other at the end of every
operation. On a busy machine a single thread is then much faster, and its times vary less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
import torch.nn.functional as F

from lln.functional.dense import lln_attention


@contextmanager
def faster_threads(echo: Callable[[str], object] = lambda _: None) -> Iterator[int]:
    """Run the body on all threads or on one, whichever is faster now; yields how many.

    Args:
        echo: Takes a line for the terminal if only one thread is used.
    """
    before = torch.get_num_threads()
    try:
        seconds = {}
        for threads in {before, 1} if before > 1 else ():
            torch.set_num_threads(threads)
            seconds[threads] = _probe()
        chosen = min(seconds, key=seconds.__getitem__, default=before)
        torch.set_num_threads(chosen)
        if chosen < before:
            echo("Other programs keep the processors busy: one thread is faster here than all.")
        yield chosen
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def _probe() -> float:
    """Median seconds of a pair of calls of the size that the demo times."""
    query, key, value = torch.randn(3, 1, 12, 512, 64, generator=torch.Generator().manual_seed(0))
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        F.scaled_dot_product_attention(query, key, value)
        lln_attention(query, key, value)
        seconds.append(time.perf_counter() - start)
    return median(seconds)
