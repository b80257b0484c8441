"""A table from finished cells: mean ± standard deviation over the seeds, empty where nothing ran.

Where a cell has fewer seeds than others of its row, their number follows in brackets.
The best mean of a column is bold only if it is significantly better than every other one with at
least two seeds (Welch's t-test, two-sided, p < 0.05).
"""

from __future__ import annotations

import math
import re
import statistics
import warnings
from collections.abc import Sequence
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
    cells: list[dict[str, Any]],
    measure: str,
    percent: bool = True,
    lower: bool = False,
    tasks: Sequence[str] = (),
) -> str:
    """`cell_grid` as Markdown."""
    head, rows, bold = cell_grid(cells, measure, percent, lower, tasks)
    written = [
        [f"**{text}**" if (row, column) in bold else text for column, text in enumerate(texts)]
        for row, texts in enumerate(rows)
    ]
    return table(head, written)


def cell_grid(
    cells: list[dict[str, Any]],
    measure: str,
    percent: bool = True,
    lower: bool = False,
    tasks: Sequence[str] = (),
) -> Grid:
    """Methods by tasks.

    Args:
        cells: Finished cells of one experiment and scale.
        measure: The entry to show.
        percent: Whether to show it times 100.
        lower: Whether less of it is better.
        tasks: Their order; others follow by name.
    """
    sign = -1 if lower else 1
    found: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        place = found.setdefault(cell["cell"]["method"], {})
        place.setdefault(cell["cell"]["task"], []).append(cell[measure])
    ran = {task for columns in found.values() for task in columns}
    shown = [task for task in tasks if task in ran]
    shown += sorted(ran.difference(shown))
    best = {
        task: clear_best(
            {m: [sign * one for one in columns.get(task, [])] for m, columns in found.items()}
        )
        for task in shown
    }
    order = {name: place for place, name in enumerate(all_methods())}
    rows, bold = [], set()
    for method in sorted(found, key=lambda name: (order.get(name, len(order)), _natural(name))):
        most = max(len(values) for values in found[method].values())
        texts = [_written(found[method].get(task, []), percent, most) for task in shown]
        places = (place for place, task in enumerate(shown) if best[task] == method)
        bold |= {(len(rows), place + 2) for place in places}
        rows.append([Method.parse(method).title, str(most), *texts])
    return Grid(["attention", "seeds", *shown], rows, bold)


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


def _written(values: list[float], percent: bool, most: int) -> str:
    if not values:
        return ""
    factor, digits = (100, 1) if percent else (1, 3)
    text = f"{factor * statistics.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {factor * statistics.stdev(values):.{digits}f}"
    return text if len(values) == most else f"{text} ({len(values)})"
