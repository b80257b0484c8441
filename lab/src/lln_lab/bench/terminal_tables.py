"""Tables of results: a line per system, a column per length, printed with rich."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from lln_lab.bench.result_rows import Row
from lln_lab.bench.spread import about

# Headings and cells.
Table = tuple[list[str], list[list[str]]]

# Width without a terminal: room for every column.
_WIDE = 250


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


def show_table(
    heads: Sequence[str], cells: Sequence[Sequence[str]], title: str, spare: Sequence[str] = ()
) -> None:
    """Print a table on the standard output; all columns but the first are numbers.

    Numbers are never cut. Without a terminal every column is shown.

    Args:
        heads: A heading per column.
        cells: The lines.
        title: What stands above.
        spare: Headings of columns that a narrow terminal does without, the first to go first.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console()
    columns = list(zip(heads, *cells, strict=True))
    gone: list[str] = []
    if sys.stdout.isatty():
        for head in (head for head in spare if head in heads):
            if _unwrapped(column for column in columns if column[0] not in gone) <= console.width:
                break
            gone.append(head)
    else:
        console.width = _WIDE
    kept = [column for column in columns if column[0] not in gone]
    # Rich would cut words that do not fit. So wide, the last columns pass the edge instead.
    words = [[word for text in column for word in text.split()] for column in kept[1:]]
    least = [_longest(each) for each in (*kept[:1], *words)]
    console.width = max(console.width, _frame(least))
    table = Table()
    for index, (column, width) in enumerate(zip(kept, least, strict=True)):
        justify = "right" if index else "left"
        table.add_column(column[0], justify=justify, no_wrap=index == 0, min_width=width)
    for line in zip(*(column[1:] for column in kept), strict=True):
        table.add_row(*line)
    # Printed separately: rich would wrap a table's title to the table's width.
    console.print(title, style="italic", highlight=False)
    console.print(table)
    if gone:
        names = ", ".join(head for head in heads if head in gone)
        console.print(f"A wider terminal also shows: {names}.", highlight=False)


def _frame(widths: Sequence[int]) -> int:
    """Width of a table whose columns have these widths."""
    return 1 + sum(width + 3 for width in widths)


def _unwrapped(columns: Iterable[Sequence[str]]) -> int:
    """Width of a table in which headings are wrapped and nothing else is."""
    return _frame([_longest([*head.split(), *cells]) for head, *cells in columns])


def _longest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)
