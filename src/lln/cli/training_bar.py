"""The progress bar of a training run, which appears with the first step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import TaskID

from lln.studies.report.progress import progress_bar


@contextmanager
def training_bar(
    echo: Callable[[str], object],
) -> Iterator[Callable[[str, int, int, float], None]]:
    """Shows the phase, the steps and the loss; without a terminal, one line per new loss.

    Yields:
        A function to call after a step with the phase, the step, the number of steps and the last
        loss. Of several processes started by ``torchrun`` only the one that calls it shows a bar.
    """
    bar, last = progress_bar(), math.nan
    tasks: dict[str, TaskID] = {}

    def show(phase: str, step: int, total: int, loss: float) -> None:
        nonlocal last
        if phase not in tasks:
            tasks[phase] = bar.add_task(phase, total=total)
            bar.start()
        text = phase if math.isnan(loss) else f"{phase}, loss {loss:.4g}"
        bar.update(tasks[phase], completed=step, description=text)
        if not (bar.console.is_terminal or math.isnan(loss) or loss == last):
            echo(f"{text}, step {step} of {total}")
        last = loss
        if step >= total:
            # Removed before anything else is printed, because the bar would overwrite it.
            bar.update(tasks[phase], visible=False)
            bar.stop()

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()
