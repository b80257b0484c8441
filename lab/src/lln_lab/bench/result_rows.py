"""Rows of the results; a failed measurement gives a row too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from lln.testing.failures import in_one_line
from lln_lab.bench.timing import free_memory, is_out_of_memory

Row = dict[str, Any]

MEASURED = (float, None)
_QUARTILES = ([float, float], None)
# What tables and figures read of a row, beside its cell; see `lln.checks.schema`.
ROW_FORM = {
    "name": str,
    "status": str,
    "tokens": int,
    "batch": int,
    "reason?": str,
    "note?": str,
    "milliseconds?": MEASURED,
    "milliseconds_quartiles?": _QUARTILES,
    "graph_milliseconds?": MEASURED,
    "graph_milliseconds_quartiles?": _QUARTILES,
    "peak_bytes?": MEASURED,
}


def last_shorter(rows: Iterable[Row], cell: Any, *kind: str) -> Row | None:
    """The row of the next shorter sequence with the same ``kind`` fields as the cell."""
    shorter = [
        row
        for row in rows
        if row["tokens"] < cell.tokens and all(row[name] == getattr(cell, name) for name in kind)
    ]
    return max(shorter, key=lambda row: row["tokens"], default=None)


def row_of(cell: Any, **found: Any) -> Row:
    """A row with the fields of its cell (a dataclass with a ``name``) and what was found."""
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
    # Only here, where the exception and the frames it kept alive are gone. After some errors a GPU
    # cannot even free its memory.
    with suppress(RuntimeError):
        free_memory(collect=collect or row["status"] != "timed")
    return row
