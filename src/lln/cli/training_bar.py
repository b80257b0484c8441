"""The progress bar of a training, which begins with its first step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from lln.studies.report.progress import progress_bar


@contextmanager
def training_bar(
    echo: Callable[[str], object],
) -> Iterator[Callable[[str, int, int, float], None]]:
    """Shows the phase, the steps and the loss; away from a terminal in a line per new loss.

    Yields:
        What to call after a step with the phase, the step, their number and the last loss. Of
        several processes that ``torchrun`` starts one calls it, and only that one shows a bar.
    """
    with ExitStack() as stack:
        bar = progress_bar()
        tasks = {}
        last = math.nan

        def show(phase: str, step: int, total: int, loss: float) -> None:
            nonlocal last
            if not tasks:
                stack.enter_context(bar)
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total)
            text = phase if math.isnan(loss) else f"{phase}, loss {loss:.4g}"
            bar.update(tasks[phase], completed=step, description=text)
            if not (bar.console.is_terminal or math.isnan(loss) or loss == last):
                echo(f"{text}, step {step} of {total}")
            last = loss

        yield show
