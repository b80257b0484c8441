"""A table from finished cells: mean ± standard deviation over the seeds, empty where nothing ran.

The best mean of a column is bold only if it is significantly better than every other one with at
least two seeds (Welch's t-test, two-sided, p < 0.05).
"""

from __future__ import annotations

import math
import re
import statistics
import warnings
from typing import Any, NamedTuple

from experiments.methods import Method, all_methods
from experiments.tables import table

SIGNIFICANT = 0.05


class Grid(NamedTuple):
    """A table before it is written.

    Attributes:
        head: Names of the columns.
        rows: Texts.
        bold: Places (row, column) that are clearly best.
    """

    head: list[str]
    rows: list[list[str]]
    bold: set[tuple[int, int]]


def cell_table(
    cells: list[dict[str, Any]], measure: str, percent: bool = True, lower: bool = False
) -> str:
    """`cell_grid` as Markdown."""
    head, rows, bold = cell_grid(cells, measure, percent, lower)
    written = [
        [f"**{text}**" if (row, column) in bold else text for column, text in enumerate(texts)]
        for row, texts in enumerate(rows)
    ]
    return table(head, written)


def cell_grid(
    cells: list[dict[str, Any]], measure: str, percent: bool = True, lower: bool = False
) -> Grid:
    """Methods by tasks.

    Args:
        cells: Finished cells of one experiment and scale.
        measure: The entry to show.
        percent: Whether to show it times 100.
        lower: Whether less of it is better.
    """
    sign = -1 if lower else 1
    found: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        place = found.setdefault(cell["cell"]["method"], {})
        place.setdefault(cell["cell"]["task"], []).append(cell[measure])
    tasks = sorted({task for columns in found.values() for task in columns})
    best = {
        task: clear_best(
            {m: [sign * one for one in columns.get(task, [])] for m, columns in found.items()}
        )
        for task in tasks
    }
    order = {name: place for place, name in enumerate(all_methods())}
    rows, bold = [], set()
    for method in sorted(found, key=lambda name: (order.get(name, len(order)), _natural(name))):
        texts = [_written(found[method].get(task, []), percent) for task in tasks]
        places = (place for place, task in enumerate(tasks) if best[task] == method)
        bold |= {(len(rows), place + 2) for place in places}
        counts = sorted({len(values) for values in found[method].values()})
        seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        rows.append([Method.parse(method).title, seeds, *texts])
    return Grid(["attention", "seeds", *tasks], rows, bold)


def clear_best(values: dict[str, list[float]]) -> str | None:
    """The method that is significantly better than all others; None if there is none."""
    from scipy.stats import ttest_ind

    known = {name: found for name, found in values.items() if len(found) > 1}
    if len(known) < 2:
        return None
    first = max(known, key=lambda name: statistics.mean(known[name]))
    for name, found in known.items():
        if name == first:
            continue
        if statistics.mean(found) == statistics.mean(known[first]):
            return None
        with warnings.catch_warnings():
            # Of nearly equal numbers, which is what they are.
            warnings.simplefilter("ignore", RuntimeWarning)
            chance = float(ttest_ind(known[first], found, equal_var=False).pvalue)
        # Two constant samples have no variance: t is infinite, and they differ.
        if not (math.isnan(chance) or chance < SIGNIFICANT):
            return None
    return first


def _natural(name: str) -> list[tuple[float, str]]:
    """For sorting: ``keys=64`` before ``keys=256``."""
    parts = re.split(r"(\d+)", name)
    return [(float(part), "") if part.isdigit() else (-1.0, part) for part in parts]


def _written(values: list[float], percent: bool) -> str:
    if not values:
        return ""
    factor, digits = (100, 1) if percent else (1, 3)
    mean = f"{factor * statistics.mean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {factor * statistics.stdev(values):.{digits}f}"
