"""A table from finished cells: mean ± standard deviation over the seeds, empty where nothing ran.

Where a cell has fewer seeds than others of its row, their number follows in brackets.

The best mean of a column is bold only if it differs from every other one with at least two seeds
(Welch's t-test, two-sided) after Holm's correction over all pairs of rows in all columns of the
table: which row is best was not known before, so every pair is asked.
"""

from __future__ import annotations

import math
import re
import statistics
import warnings
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from lln_lab.experiments.experiment import Column
from lln_lab.experiments.methods import Method, all_methods
from lln_lab.markdown import table

SIGNIFICANT = 0.05
# Name of a baseline → measure → value, by task.
Baselines = Mapping[str, Mapping[str, Mapping[str, float]]]


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
    cells: list[dict[str, Any]], columns: Sequence[Column], baselines: Baselines | None = None
) -> str:
    """`cell_grid` as Markdown."""
    head, rows, bold = cell_grid(cells, columns, baselines)
    written = [
        [f"**{text}**" if (row, column) in bold else text for column, text in enumerate(texts)]
        for row, texts in enumerate(rows)
    ]
    return table(head, written)


def cell_grid(
    cells: list[dict[str, Any]], columns: Sequence[Column], baselines: Baselines | None = None
) -> Grid:
    """Methods by columns, and below them what needs no training.

    Args:
        cells: Finished cells of one experiment and scale.
        columns: In this order; those without cells are left out.
        baselines: Of the tasks.
    """
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for cell in cells:
        place = found.setdefault(cell["cell"]["method"], {})
        place.setdefault(cell["cell"]["task"], []).append(cell)
    ran = {task for tasks in found.values() for task in tasks}
    shown = [column for column in columns if column.task in ran]
    values = [
        {name: [cell[measure] for cell in tasks.get(task, [])] for name, tasks in found.items()}
        for task, measure, _ in shown
    ]
    best = clear_bests(
        [
            {name: [-one if column.is_loss else one for one in own] for name, own in by.items()}
            for column, by in zip(shown, values, strict=True)
        ]
    )
    order = {name: place for place, name in enumerate(all_methods())}
    rows, bold = [], set()
    for method in sorted(found, key=lambda name: (order.get(name, len(order)), _natural(name))):
        most = max(len(own) for own in found[method].values())
        texts = [
            _written(by[method], column.is_loss, most)
            for column, by in zip(shown, values, strict=True)
        ]
        bold |= {(len(rows), place + 2) for place, first in enumerate(best) if first == method}
        rows.append([Method.parse(method).title, str(most), *texts])
    rows += _baseline_rows(shown, baselines or {})
    return Grid(["attention", "seeds", *(column.title for column in shown)], rows, bold)


def clear_bests(columns: Sequence[Mapping[str, list[float]]]) -> list[str | None]:
    """For every column of a table the method that is better than all others; None if none is.

    More is better. All pairs of all columns are one family: a method is named if its differences
    from all others of its column hold after Holm's correction.
    """
    known = [{name: own for name, own in column.items() if len(own) > 1} for column in columns]
    chances = {
        (place, *pair): _chance(column[pair[0]], column[pair[1]])
        for place, column in enumerate(known)
        for pair in combinations(column, 2)
    }
    held, waiting = set(), len(chances)
    for pair in sorted(chances, key=lambda pair: chances[pair]):
        if chances[pair] >= SIGNIFICANT / waiting:
            break
        held.add(pair)
        waiting -= 1
    bests: list[str | None] = []
    for place, column in enumerate(known):
        first = max(column, key=lambda name: statistics.mean(column[name]), default=None)
        asked = [pair for pair in chances if pair[0] == place and first in pair[1:]]
        bests.append(first if asked and held.issuperset(asked) else None)
    return bests


def _chance(one: list[float], other: list[float]) -> float:
    """Welch's p of two samples."""
    from scipy.stats import ttest_ind

    if statistics.mean(one) == statistics.mean(other):
        return 1.0
    with warnings.catch_warnings():
        # Of nearly equal numbers, which is what they are.
        warnings.simplefilter("ignore", RuntimeWarning)
        found = float(ttest_ind(one, other, equal_var=False).pvalue)
    # Two constant samples have no variance: t is infinite, and they differ.
    return 0.0 if math.isnan(found) else found


def _baseline_rows(columns: Sequence[Column], baselines: Baselines) -> list[list[str]]:
    names = dict.fromkeys(name for column in columns for name in baselines.get(column.task, {}))
    rows = []
    for name in names:
        found = [baselines.get(task, {}).get(name, {}).get(what) for task, what, _ in columns]
        texts = [
            "" if value is None else _written([value], column.is_loss, 1)
            for column, value in zip(columns, found, strict=True)
        ]
        if any(texts):
            rows.append([f"*{name}*", "", *texts])
    return rows


def _natural(name: str) -> list[tuple[float, str]]:
    """For sorting: ``keys=64`` before ``keys=256``."""
    parts = re.split(r"(\d+)", name)
    return [(float(part), "") if part.isdigit() else (-1.0, part) for part in parts]


def _written(values: list[float], is_loss: bool, most: int) -> str:
    if not values:
        return ""
    factor, digits = (1, 3) if is_loss else (100, 1)
    text = f"{factor * statistics.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {factor * statistics.stdev(values):.{digits}f}"
    return text if len(values) == most else f"{text} ({len(values)})"
