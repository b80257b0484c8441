"""How much repeated runs of one case vary, and whether two cases differ by more than that."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles
from typing import Any, NamedTuple

# Quartiles further apart than this share of the median make a time noisy.
NOISY = 0.2


class Timed(NamedTuple):
    """The time of a call over its runs.

    Attributes:
        median: Half of the runs took less.
        low: A quarter of the runs took less.
        high: Three quarters of the runs took less.
    """

    median: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Distance between the quartiles."""
        return self.high - self.low

    @property
    def is_noisy(self) -> bool:
        """Whether the quartiles are too far apart."""
        return self.width > NOISY * self.median

    def differs_from(self, other: Timed) -> bool:
        """Whether the medians differ by more than the runs of either, and the runs do not overlap.

        Values without spread, such as memory, always count as different, even if equal.
        """
        low, high = sorted((self, other), key=lambda each: each.median)
        return high.median - low.median >= max(low.width, high.width) and low.high <= high.low

    def times(self, factor: float) -> Timed:
        """The same in another unit."""
        return Timed(*(factor * each for each in self))

    def fields(self, name: str) -> dict[str, Any]:
        """The fields to store in a row of results; `timed_in` reads them back."""
        return {name: self.median, f"{name}_quartiles": [self.low, self.high]}


def timed(runs: Sequence[float]) -> Timed:
    """Median and quartiles of at least one run.

    Example:
        >>> timed([5.0, 1.0, 2.0, 3.0, 4.0])
        Timed(median=3.0, low=2.0, high=4.0)
    """
    low, median, high = quantiles(runs, n=4, method="inclusive") if len(runs) > 1 else 3 * [runs[0]]
    return Timed(median, low, high)


def timed_in(row: dict[str, Any], name: str) -> Timed | None:
    """A time of a row of results; old files without quartiles count as exact."""
    if row.get(name) is None:
        return None
    low, high = row.get(f"{name}_quartiles") or 2 * [row[name]]
    return Timed(row[name], low, high)


def about(text: str, row: dict[str, Any], name: str) -> str:
    """A time as tables show it: with ``~`` before it if it is noisy."""
    found = timed_in(row, name)
    return f"~{text}" if found is not None and found.is_noisy else text


def noise_note(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """A sentence on the times that tables show with ``~``; empty if there is none."""
    found = [timed_in(row, name) for row in rows for name in names]
    noisy = sum(each is not None and each.is_noisy for each in found)
    if not noisy:
        return ""
    what = "time is" if noisy == 1 else "times are"
    return (
        f"~ {noisy} {what} noisy: the middle half of the runs spans more than {NOISY:.0%} of the "
        "median; measure again when nothing else runs, or with more --seconds."
    )
