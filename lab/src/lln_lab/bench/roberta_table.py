"""The results of ``lln bench roberta`` as tables: a line per system, a column per length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lln_lab.bench.result_rows import Row
from lln_lab.bench.roberta import SYSTEMS
from lln_lab.bench.spread import about
from lln_lab.bench.terminal_tables import Table, by_length, number_or_status

# What a row says about its cell.
CELL_FORM = {"part": str, "system": frozenset(SYSTEMS)}


def tables_of(results: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    """Title and table of every part."""
    rows = results["cases"]
    for part in dict.fromkeys(row["part"] for row in rows):
        yield title_of(rows, part), table_of(rows, part)


def table_of(rows: Sequence[Row], part: str) -> Table:
    """Headings and cells: memory in GB, then milliseconds per step."""
    rows = [row for row in rows if row["part"] == part]
    lengths = {row["tokens"] for row in rows}
    heads, lines = by_length(rows, {}, str)
    if part != "filled":
        # A system that ran out of memory would at every longer length too.
        ends = [row for row in rows if row["status"] == "out of memory"]
        rows += [end | {"tokens": n} for end in ends for n in lengths if n > end["tokens"]]
    names = dict.fromkeys(row["system"] for row in rows)
    for field, what in (("peak_bytes", "GB"), ("milliseconds", "ms")):
        if any(row.get(field) is not None for row in rows):
            labels = {name: f"{what}, {SYSTEMS[name][0]}" for name in names}
            form = as_milliseconds if what == "ms" else lambda value: f"{value / 1e9:.1f}"
            lines += by_length(
                rows, labels, lambda row, f=field, form=form: number_or_status(row, f, form)
            )[1]
    return heads, lines


def title_of(rows: Sequence[Row], part: str) -> str:
    """What a part measures."""
    if part != "filled":
        return "One training step, batch 1" + (", as a CUDA graph" if part == "graph" else "")
    tokens = max(row["batch"] * row["tokens"] for row in rows if row["part"] == part)
    return f"One training step, {tokens:,} tokens per batch"


def text_of(row: Row) -> str:
    """One row in a few words."""
    if row["status"] != "timed":
        return row.get("reason", row["status"])
    memory = f", {row['peak_bytes'] / 1e9:.1f} GB" if "peak_bytes" in row else ""
    step = about(f"{row['milliseconds']:.1f}", row, "milliseconds")
    return f"{step} ms per step{memory}"


def as_milliseconds(value: float) -> str:
    """About three significant digits."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"
