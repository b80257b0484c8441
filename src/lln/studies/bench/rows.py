"""What a measurement leaves behind: a row of the results, also where it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from lln.studies.bench.timing import free_memory, is_out_of_memory
from lln.studies.report.failures import in_one_line

Row = dict[str, Any]


def last_shorter(rows: Iterable[Row], cell: Any, *kind: str) -> Row | None:
    """The longest of the sequences that are shorter than a cell's and share its ``kind`` fields."""
    shorter = [
        row
        for row in rows
        if row["tokens"] < cell.tokens and all(row[name] == getattr(cell, name) for name in kind)
    ]
    return max(shorter, key=lambda row: row["tokens"], default=None)


def row_of(cell: Any, **found: Any) -> Row:
    """A row that says which cell (a dataclass with a ``name``) it is of, and what was found."""
    return {"name": cell.name, **asdict(cell), **found}


def measured_row(cell: Any, measure: Callable[[Row], None], *, collect: bool = False) -> Row:
    """The row of a cell; out of memory and failures are rows too.

    Args:
        cell: What is measured.
        measure: Writes what it finds into the row.
        collect: Whether a timed cell leaves reference cycles that hold memory.
    """
    row = row_of(cell)
    try:
        measure(row)
    except Exception as error:
        if is_out_of_memory(error):
            row["status"] = "out of memory"
        else:
            row |= {"status": "failed", "reason": in_one_line(error)}
    # Here the exception and the frames it kept alive are gone. A GPU that an error has cost does
    # not even take its memory back.
    with suppress(RuntimeError):
        free_memory(collect=collect or row["status"] != "timed")
    return row
