"""A page and its numbers on disk, kept up to date while a command measures."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from lln.files import write_atomically

# Largest share of the time for drawing pages, because drawing disturbs the measurements.
_SHARE = 0.05
_FEWEST_SECONDS = 3.0


class PageFile:
    """An HTML file and the JSON next to it; each is replaced in one step."""

    def __init__(self, path: Path, page: Callable[[], str], numbers: Callable[[], str]) -> None:
        """``path`` of the page, and functions that return the current page and JSON."""
        self.path, self._page, self._numbers = path, page, numbers
        self._next = time.perf_counter() + _FEWEST_SECONDS

    def write(self) -> None:
        """Write both now."""
        start = time.perf_counter()
        write_atomically(self.path, self._page())
        write_atomically(self.path.with_suffix(".json"), self._numbers())
        end = time.perf_counter()
        self._next = end + max(_FEWEST_SECONDS, (end - start) / _SHARE)

    def write_if_due(self) -> None:
        """Write both if the last time is long enough ago."""
        if time.perf_counter() >= self._next:
            self.write()
