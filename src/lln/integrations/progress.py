"""The progress bar of long work, on stderr and only where that is a terminal."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def progress_bar(time_left: bool = False) -> Progress:
    """A progress bar on stderr, so that stdout can be piped.

    Args:
        time_left: Whether it also estimates when the work will be done.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description:<13}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        *([TextColumn("left"), TimeRemainingColumn()] if time_left else []),
        console=Console(stderr=True),
        transient=True,
    )


@contextmanager
def step_bar(
    echo: Callable[[str], object] = lambda line: None,
) -> Iterator[Callable[..., None]]:
    """Shows the phase, the steps and the loss of work that consists of steps.

    Args:
        echo: Prints a line per new loss where there is no terminal.

    Yields:
        A function to call after a step with the phase, the step, the number of steps and, if there
        is one, the last loss; step 0 shows the bar before the first step is done. Of several
        processes started by ``torchrun`` only the first shows a bar.
    """
    from rich.errors import LiveError

    bar, last = progress_bar(), math.nan
    tasks: dict[str, TaskID] = {}

    def show(phase: str, step: int, total: int, loss: float = math.nan) -> None:
        nonlocal last
        if phase not in tasks:
            tasks[phase] = bar.add_task(phase, total=total)
            # A notebook is no terminal, and would get widgets.
            if bar.console.is_terminal and os.environ.get("RANK", "0") == "0":
                # Older versions of rich refuse a bar inside a display of the caller's.
                with suppress(LiveError):
                    bar.start()
        text = phase if math.isnan(loss) else f"{phase}, loss {loss:.4g}"
        bar.update(tasks[phase], completed=step, description=text)
        if not (bar.console.is_terminal or math.isnan(loss) or loss == last):
            echo(f"{text}, step {step} of {total}")
        last = loss
        if step >= total:
            # Removed before anything else is printed, because the bar would overwrite it.
            bar.update(tasks[phase], visible=False)
            end()

    def end() -> None:
        # To stop a bar that was never shown prints an empty line.
        if bar.live.is_started:
            bar.stop()

    try:
        yield show
    finally:
        end()
