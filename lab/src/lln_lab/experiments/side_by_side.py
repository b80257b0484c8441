"""Many programs at a time, each with its log: small trainings share one GPU well.

Under CUDA's multi-process service (``nvidia-cuda-mps-control -d``) they run at the same time.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """A program to run.

    Attributes:
        title: For messages.
        words: Its command line.
        log: Where its output goes.
    """

    title: str
    words: list[str]
    log: Path


def last_line(path: Path) -> str:
    """The last line of a log."""
    lines = path.read_text("utf-8", errors="replace").replace("\r", "\n").splitlines()
    return lines[-1][-200:] if lines else "starting"


def run_side_by_side(
    jobs: list[Job],
    most: int,
    minutes: float | None = None,
    echo: Callable[[str], object] = print,
    pause: float = 0.5,
) -> list[str]:
    """Run all programs, some at a time.

    Args:
        jobs: What to run, in this order.
        most: How many at a time.
        minutes: Begin none that would end after these, judged by the longest so far; None = any.
        echo: Takes a line whenever one ends, and one every half minute.
        pause: Seconds between looks.

    Returns:
        A line for each that failed, with its log.
    """
    # A few compiling threads for each: they start together and share the processors.
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "1"} | os.environ
    waiting, failed, longest = list(jobs), [], 0.0
    running: dict[subprocess.Popen[bytes], tuple[Job, float]] = {}
    begun = spoken = time.monotonic()
    try:
        while running or waiting:
            now = time.monotonic()
            # One that could not end in time would only slow down the others.
            if waiting and minutes and now - begun + longest > 60 * minutes:
                echo(f"no time for {len(waiting)} more: {', '.join(job.title for job in waiting)}")
                waiting = []
            while waiting and len(running) < most:
                job = waiting.pop(0)
                job.log.parent.mkdir(parents=True, exist_ok=True)
                with job.log.open("w") as file:
                    child = subprocess.Popen(job.words, stdout=file, stderr=file, env=environment)
                running[child] = (job, now)
            for child in [child for child in running if child.poll() is not None]:
                job, started = running.pop(child)
                longest = max(longest, now - started)
                echo(f"[{now - begun:.0f} s] {job.title}: {last_line(job.log)}")
                if child.returncode:
                    failed.append(f"{job.title}: {job.log}")
            if now - spoken >= 30:
                spoken = now
                steps = "; ".join(last_line(job.log) for job, _ in running.values())
                echo(f"[{now - begun:.0f} s] {len(waiting)} wait; {steps}")
            time.sleep(pause)
    finally:
        for child in running:
            child.terminate()
    return failed
