"""What the terminal shows: progress, one line a case, a table at the end.

With rich where it is installed (it comes with the command line), in plain lines where it is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lln.studies.bench.compare import Row
from lln.studies.bench.operations import OPERATIONS
from lln.studies.bench.spread import about

Echo = Callable[[str], object]
Advance = Callable[[str], None]

_GROUPS = ("bidirectional", "diagonal", "causal", "packed", "decode")
_WIDE = 200


@contextmanager
def progress(total: int, echo: Echo) -> Iterator[tuple[Advance, Echo]]:
    """A bar on the standard error, or lines where rich is missing.

    Args:
        total: Number of steps.
        echo: Takes lines meant for the terminal.

    Yields:
        What to call when a step begins, and what to call with a line about it.
    """
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )
    except ImportError:
        yield (lambda _: None), echo
        return
    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        begun = 0

        def advance(text: str) -> None:
            nonlocal begun
            bar.update(task, description=text, completed=begun)
            begun += 1

        # Numbers come in the table at the end; on a terminal a line each would only scroll by.
        yield advance, (lambda _: None) if console.is_terminal else echo


def line_of(row: Row) -> str:
    """One row in one line."""
    text = row["name"]
    if row.get("milliseconds") is None:
        return f"{text}: {problem_of(row)}"
    text += f": {_time(row, 'milliseconds')} ms"
    if row.get("graph_milliseconds") is not None:
        text += f", as a CUDA graph {_time(row, 'graph_milliseconds')}"
    for field, what in (("graph_floors", "floors"), ("floors", "floors")):
        if row.get(field) is not None:
            text += f", {row[field]:.2f} {what}"
            break
    return text + (f" ({row['note']})" if row.get("note") else "")


def problem_of(row: Row) -> str:
    """Why a row has no time."""
    if row.get("status") == "wrong":
        return (
            f"refused and not timed, because its {row['what']} differs from float64 by "
            f"{row['error']:.1e}, and {row['allowed']:.1e} is allowed"
        )
    if row.get("status") == "failed":
        return f"failed: {row['reason']}"
    return row.get("status", "not measured")


def _problem_in_short(row: Row) -> str:
    """The same in a word or two, for a cell."""
    return "refused" if row.get("status") == "wrong" else row.get("status", "not measured")


def table_of(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of all rows; a column without any content is left out."""
    columns: dict[str, Callable[[Row], str]] = {
        "operation": lambda row: OPERATIONS[row["operation"]].label,
        "pass": lambda row: "fwd+bwd" if row["backward"] else "forward",
        "B": lambda row: str(row["batch"]),
        "N": lambda row: str(row["tokens"]),
        "D": lambda row: str(row["width"]),
        "ms": lambda row: _time(row, "milliseconds") or _problem_in_short(row),
        "graph ms": lambda row: _time(row, "graph_milliseconds"),
        "units": lambda row: _units(row),
        "floors": lambda row: _number(row, "floors", "{:.2f}"),
        "graph floors": lambda row: _number(row, "graph_floors", "{:.2f}"),
        "vs softmax": lambda row: _number(row, "softmax_ratio", "{:.2f}×"),
        "graph vs softmax": lambda row: _number(row, "graph_softmax_ratio", "{:.2f}×"),
        "vs compiled": lambda row: _number(row, "compiled_ratio", "{:.2f}×"),
        "vs fla": lambda row: _number(row, "fla_ratio", "{:.2f}×"),
        "memory": lambda row: _number(row, "memory_ratio", "{:.2f}×"),
        "peak MB": lambda row: f"{row['peak_bytes'] / 1e6:.1f}" if "peak_bytes" in row else "",
        "error / allowed": lambda row: _share(row),
    }

    def place(row: Row) -> tuple[Any, ...]:
        group = _GROUPS.index(OPERATIONS[row["operation"]].group)
        alone = row["batch"] == 1
        return group, row["width"] != 64, row["width"], alone, row["backward"], row["tokens"]

    cells = [[make(row) for make in columns.values()] for row in sorted(rows, key=place)]
    full = [index for index in range(len(columns)) if any(line[index] for line in cells)]
    names = list(columns)
    return [names[index] for index in full], [[line[index] for index in full] for line in cells]


def show_table(heads: Sequence[str], cells: Sequence[Sequence[str]], title: str) -> None:
    """Print a table on the standard output; all columns but the first are numbers."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
        for line in (heads, *cells):
            padded = (
                f"{cell:>{width}}" if index else f"{cell:<{width}}"
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            sys.stdout.write("  ".join(padded).rstrip() + "\n")
        return
    table = Table()
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left", no_wrap=index == 0)
    for line in cells:
        table.add_row(*line)
    # Away from a terminal rich would fold everything into eighty columns.
    console = Console(width=None if sys.stdout.isatty() else _WIDE)
    # As a title of the table it would be folded to the table's width.
    console.print(title, style="italic", highlight=False)
    console.print(table)


def _time(row: Row, field: str) -> str:
    return about(_number(row, field, "{:.3f}"), row, field)


def _number(row: Row, field: str, form: str) -> str:
    return "" if row.get(field) is None else form.format(row[field])


def _units(row: Row) -> str:
    """Time in units, over the fewest."""
    spent = row.get("graph_units", row.get("units"))
    return "" if spent is None else f"{spent:.1f}/{row['fewest_units']}"


def _share(row: Row) -> str:
    return f"{row['error']:.0e} / {row['allowed']:.0e}" if "allowed" in row else ""
