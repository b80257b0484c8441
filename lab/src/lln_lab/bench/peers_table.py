"""The results of ``lln bench peers`` as tables: a line per system, a column per length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lln_lab.bench.peers_cells import ALONE, FILLED, FRAME
from lln_lab.bench.result_rows import Row
from lln_lab.bench.spread import about
from lln_lab.bench.terminal_tables import Table, by_length, number_or_status
from lln_lab.peers.listing import in_order


@dataclass(frozen=True)
class Measure:
    """What one table shows."""

    part: str
    passes: str
    field: str


TABLES = tuple(
    Measure(part, passes, field)
    for part in (ALONE, FILLED)
    for passes, field in (
        ("forward", "milliseconds"),
        ("both", "milliseconds"),
        ("both", "peak_bytes"),
    )
)


def systems_of(results: dict[str, Any]) -> list[str]:
    """The systems that were measured, by family, then the frame to compare blocks with."""
    names = {row["system"] for row in results["cases"]}
    return in_order(names) + [name for name in (FRAME,) if name in names]


def tables_of(results: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    """Titles and tables; those without any number are left out."""
    for measure in TABLES:
        table = table_of(results, measure)
        if table[1]:
            what = "Milliseconds" if measure.field == "milliseconds" else "Megabytes at peak"
            passes = "forward" if measure.passes == "forward" else "forward + backward"
            yield f"{what}, {passes}, {batch_of(results, measure.part)}", table


def table_of(results: dict[str, Any], measure: Measure) -> Table:
    """Headings and cells, without lines for which nothing was measured."""
    kind = (measure.part, measure.passes)
    rows = [row for row in results["cases"] if (row["part"], row["passes"]) == kind]
    if not any(row.get(measure.field) is not None for row in rows):
        return [], []
    scale = 1.0 if measure.field == "milliseconds" else 1e-6
    labels = {name: name for name in systems_of(results)}
    return by_length(
        rows,
        labels,
        lambda row: number_or_status(row, measure.field, lambda value: _digits(value * scale)),
    )


def batch_of(results: dict[str, Any], part: str) -> str:
    """The batches of a part, in words."""
    if part == ALONE:
        return "batch 1"
    rows = (row for row in results["cases"] if row["part"] == part)
    return f"{max(row['batch'] * row['tokens'] for row in rows):,} tokens per batch"


def text_of(row: Row) -> str:
    """One row in a few words."""
    if row["status"] != "timed":
        return row["status"] + (f", {row['reason']}" if row.get("reason") else "")
    time = about(f"{row['milliseconds']:.3f}", row, "milliseconds")
    return f"{time} ms, {row['peak_bytes'] / 1e6:.0f} MB"


def _digits(value: float) -> str:
    """A number with three digits."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
