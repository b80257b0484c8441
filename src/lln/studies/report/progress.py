"""The progress bar of long commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


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
