"""The results of ``lln bench peers`` as tables: a line a system, a column a length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lln.peers.listing import in_order
from lln.studies.bench.compare import Row
from lln.studies.bench.peers_cells import ALONE, FILLED, FRAME
from lln.studies.bench.spread import about


@dataclass(frozen=True)
class Measure:
    """What one table shows."""

    part: str
    passes: str
    field: str


TABLES = (
    Measure(ALONE, "forward", "milliseconds"),
    Measure(ALONE, "both", "milliseconds"),
    Measure(ALONE, "both", "peak_bytes"),
    Measure(FILLED, "forward", "milliseconds"),
    Measure(FILLED, "both", "milliseconds"),
    Measure(FILLED, "both", "peak_bytes"),
)


def systems_of(results: dict[str, Any]) -> list[str]:
    """The systems that were measured, by family, behind them the frame of the blocks."""
    names = {row["system"] for row in results["cases"]}
    return in_order(names) + [name for name in (FRAME,) if name in names]


def table_of(results: dict[str, Any], measure: Measure) -> tuple[list[str], list[list[str]]]:
    """Headings and cells; no line where nothing of the kind was measured."""
    rows = [
        row
        for row in results["cases"]
        if (row["part"], row["passes"]) == (measure.part, measure.passes)
    ]
    lengths = sorted({row["tokens"] for row in rows})
    found = {(row["system"], row["tokens"]): row for row in rows}
    if not any(row.get(measure.field) is not None for row in rows):
        return [], []
    lines = []
    for name in systems_of(results):
        cells = [_cell(found.get((name, n)), measure.field) for n in lengths]
        if any(cells):
            lines.append([name, *cells])
    return ["", *map(str, lengths)], lines


def title_of(results: dict[str, Any], measure: Measure) -> str:
    """What a table shows, in words."""
    what = "Milliseconds" if measure.field == "milliseconds" else "Megabytes at peak"
    passes = "forward" if measure.passes == "forward" else "forward + backward"
    if measure.part == ALONE:
        return f"{what}, {passes}, batch 1"
    rows = (row for row in results["cases"] if row["part"] == FILLED)
    tokens = max(row["batch"] * row["tokens"] for row in rows)
    return f"{what}, {passes}, {tokens:,} tokens a batch"


def text_of(row: Row) -> str:
    """One row in a few words."""
    if row["status"] != "timed":
        return row["status"] + (f", {row['reason']}" if row.get("reason") else "")
    time = about(f"{row['milliseconds']:.3f}", row, "milliseconds")
    return f"{time} ms, {row['peak_bytes'] / 1e6:.0f} MB"


def _cell(row: Row | None, field: str) -> str:
    """A number of three digits, or why there is none."""
    if row is None:
        return ""
    if row.get(field) is None:
        return "" if row["status"] == "timed" else row["status"]
    value = row[field] if field == "milliseconds" else row[field] / 1e6
    return about(f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}", row, field)
