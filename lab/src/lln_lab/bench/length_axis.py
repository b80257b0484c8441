"""Curves over the length: what the figures of all three benches share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lln_lab.bench.result_rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def points(rows: Iterable[Row], field: str, scale: float = 1.0) -> list[tuple[int, float]]:
    """Length and value of the rows that have one, by length."""
    measured = [row for row in rows if row.get(field) is not None]
    return sorted((row["tokens"], row[field] * scale) for row in measured)


def label_lengths(axes: Axes, lengths: Sequence[int]) -> None:
    """Logarithmic axes, marked at the lengths themselves and at 0.1, 1, 10."""
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    axes.set(xscale="log", yscale="log")
    names = [f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n) for n in lengths]
    axes.set_xticks(lengths, names)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def machine_of(results: dict[str, Any]) -> str:
    """The device and torch's version, for a title."""
    environment = results["environment"]
    return f"{environment['device']}, torch {environment['torch']}"
