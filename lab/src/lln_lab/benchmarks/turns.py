"""Calls and processes that take turns, so that whatever slows a machine down slows all of them.

Nothing of lln is imported here: programs that take turns may run beside an older package.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any


def in_turn(
    timed: Mapping[str, Callable[[], float]],
    seconds: float,
    fewest: int = 1,
    most: float = math.inf,
) -> list[dict[str, float]]:
    """Round by round the times of all, in an order that changes from round to round.

    Args:
        timed: Name → what times one turn of it.
        seconds: After which no round begins.
        fewest: Rounds that there are in any case.
        most: Rounds at most.
    """
    order, shuffle = list(timed), Random(0).shuffle
    found: list[dict[str, float]] = []
    end = time.perf_counter() + seconds
    while len(found) < fewest or (len(found) < most and time.perf_counter() < end):
        shuffle(order)
        found.append({name: timed[name]() for name in order})
    return found


def milliseconds(call: Callable[[], Any], clock: Callable[[], float] | None = None) -> float:
    """Of one call, by the clock on the wall or another one."""
    clock = clock or time.perf_counter
    start = clock()
    call()
    return 1e3 * (clock() - start)


def forward_and_both(
    attend: Callable[..., Any], inputs: Sequence[Any], upstream: Any
) -> tuple[Callable[[], tuple[Any, ...]], Callable[[], tuple[Any, ...]]]:
    """A call that gives the output alone, and one that also gives the gradients of its inputs."""
    import torch

    def forward() -> tuple[Any, ...]:
        with torch.no_grad():
            return (attend(*inputs),)

    def both() -> tuple[Any, ...]:
        out = attend(*inputs)
        return out, *torch.autograd.grad(out, inputs, upstream)

    return forward, both


def in_own_process(words: Sequence[str], environment: Mapping[str, str | None]) -> Any:
    """What a module leaves in the file after ``--case``, run in a process of its own.

    Args:
        words: The module, and its options.
        environment: What is different for this process; None = not set.
    """
    own: dict[str, str | None] = {**os.environ, **environment}
    with tempfile.TemporaryDirectory() as folder:
        case = Path(folder) / "case.json"
        command = [sys.executable, "-m", *words, f"--case={case}"]
        subprocess.run(command, check=True, env={k: v for k, v in own.items() if v is not None})
        return json.loads(case.read_text("utf-8"))
