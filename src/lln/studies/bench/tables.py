"""Tables of results: a line per system, a column per length, printed with rich."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from lln.studies.bench.result_rows import Row
from lln.studies.bench.spread import about

# Headings and cells.
Table = tuple[list[str], list[list[str]]]

_WIDE = 200


def by_length(rows: Sequence[Row], labels: Mapping[str, str], text: Callable[[Row], str]) -> Table:
    """A line per system and a column per length; lines without any content are left out.

    Args:
        rows: Rows with ``system`` and ``tokens``.
        labels: System → label of its line, in the order of the lines.
        text: A row → its cell.
    """
    lengths = sorted({row["tokens"] for row in rows})
    found = {(row["system"], row["tokens"]): text(row) for row in rows}
    lines = [
        [label, *(found.get((name, n), "") for n in lengths)] for name, label in labels.items()
    ]
    return ["", *map(str, lengths)], [line for line in lines if any(line[1:])]


def number_or_status(row: Row, field: str, form: Callable[[float], str]) -> str:
    """A formatted number, or why there is none."""
    if row.get(field) is not None:
        return about(form(row[field]), row, field)
    return "" if row["status"] == "timed" else row["status"]


def show_table(heads: Sequence[str], cells: Sequence[Sequence[str]], title: str) -> None:
    """Print a table on the standard output; all columns but the first are numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left", no_wrap=index == 0)
    for line in cells:
        table.add_row(*line)
    # Without a terminal rich would wrap everything to eighty columns.
    console = Console(width=None if sys.stdout.isatty() else _WIDE)
    # Printed separately: rich would wrap a table's title to the table's width.
    console.print(title, style="italic", highlight=False)
    console.print(table)
