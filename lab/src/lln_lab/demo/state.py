"""What the parts of the demo share: a clock, a state and where the page goes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from lln_lab.new_files import check_file


class State(str, Enum):
    """How far a part has come."""

    WAITING = "not started"
    RUNNING = "running"
    STOPPED = "stopped early"
    DONE = "complete"


@dataclass
class Part(ABC):
    """One part of the demo: what it was asked to measure and what came out so far."""

    state: State = State.WAITING

    @property
    @abstractmethod
    def has_results(self) -> bool:
        """Whether there is anything to show."""

    @abstractmethod
    def as_json(self) -> dict[str, object]:
        """Numbers alone, without tensors."""


class Clock:
    """The seconds a part may use."""

    def __init__(self, seconds: float) -> None:
        """Starts now."""
        self.seconds = seconds
        self._start = time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    @property
    def left(self) -> float:
        """Seconds until the end, negative after it."""
        return self.seconds - self.spent

    @property
    def fraction(self) -> float:
        """Share of the time that is used, at most 1."""
        return 1.0 if self.seconds <= 0 else min(1.0, self.spent / self.seconds)


def page_path(out: Path) -> Path:
    """The page for ``--out``: a name that ends in .html, or ``lln-demo.html`` in a folder.

    Raises:
        InvalidInputError: If nothing can be written there.
    """
    page = out if out.suffix.lower() in (".html", ".htm") else out / "lln-demo.html"
    for path in (page, page.with_suffix(".json")):
        check_file(path, "--out")
    return page
