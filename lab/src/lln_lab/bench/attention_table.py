"""The rows of ``lln bench`` as text: one line per case, and a table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

from lln_lab.bench.operations import OPERATIONS
from lln_lab.bench.result_rows import MEASURED, Row
from lln_lab.bench.spread import about
from lln_lab.bench.terminal_tables import Table

_GROUPS = ("bidirectional", "diagonal", "causal", "packed", "decode")
# Heading, field of the row, number format.
_NUMBERS = (
    ("floors", "floors", "{:.2f}"),
    ("graph floors", "graph_floors", "{:.2f}"),
    ("vs softmax", "softmax_ratio", "{:.2f}×"),
    ("graph vs softmax", "graph_softmax_ratio", "{:.2f}×"),
    ("vs compiled", "compiled_ratio", "{:.2f}×"),
    ("vs fla", "fla_ratio", "{:.2f}×"),
    ("memory", "memory_ratio", "{:.2f}×"),
)
# Columns that a narrow terminal does without, the first to go first.
SPARE = (
    *("error / allowed", "peak MB", "graph floors", "units", "memory", "floors"),
    *("vs fla", "vs compiled", "graph vs softmax", "graph ms", "vs softmax"),
)
# What a row says about its case.
FORM = {
    "operation": frozenset(OPERATIONS),
    "heads": int,
    "width": int,
    "dtype": str,
    "backward": bool,
    "units?": MEASURED,
    "graph_units?": MEASURED,
    "fewest_units?": int,
    "error?": Real,
    "allowed?": Real,
    **{f"{field}?": MEASURED for _, field, _ in _NUMBERS},
}


def text_of(row: Row) -> str:
    """One row in a few words: its time, or why it has none."""
    if row.get("milliseconds") is None:
        return _problem(row)
    text = f"{_time(row, 'milliseconds')} ms"
    if row.get("graph_milliseconds") is not None:
        text += f", as a CUDA graph {_time(row, 'graph_milliseconds')}"
    floors = row.get("graph_floors", row.get("floors"))
    text += "" if floors is None else f", {floors:.2f} floors"
    return text + (f" ({row['note']})" if row.get("note") else "")


def table_of(rows: Sequence[Row]) -> Table:
    """Headings and cells of all rows; a column without any content is left out."""
    lines = [_cells(row) for row in sorted(rows, key=_place)]
    heads = [head for head in (lines[0] if lines else ()) if any(line[head] for line in lines)]
    return heads, [[line[head] for head in heads] for line in lines]


def _cells(row: Row) -> dict[str, str]:
    """The cells of a row, by heading."""
    in_short = "refused" if row.get("status") == "wrong" else row.get("status", "not measured")
    # The time in units / the fewest possible units.
    spent = row.get("graph_units", row.get("units"))
    return {
        "operation": OPERATIONS[row["operation"]].label,
        "pass": "fwd+bwd" if row["backward"] else "forward",
        "B": str(row["batch"]),
        "N": str(row["tokens"]),
        "D": str(row["width"]),
        "ms": _time(row, "milliseconds") or in_short,
        "graph ms": _time(row, "graph_milliseconds"),
        "units": "" if spent is None else f"{spent:.1f}/{row['fewest_units']}",
        **{head: _number(row, field, form) for head, field, form in _NUMBERS},
        "peak MB": f"{row['peak_bytes'] / 1e6:.1f}" if "peak_bytes" in row else "",
        "error / allowed": f"{row['error']:.0e} / {row['allowed']:.0e}" if "allowed" in row else "",
    }


def _place(row: Row) -> tuple[Any, ...]:
    """Sort key of a row in the table."""
    group = _GROUPS.index(OPERATIONS[row["operation"]].group)
    alone = row["batch"] == 1
    return group, row["width"] != 64, row["width"], alone, row["backward"], row["tokens"]


def _problem(row: Row) -> str:
    if row.get("status") == "wrong":
        return (
            f"refused and not timed, because its {row['what']} differs from float64 by "
            f"{row['error']:.1e}, and {row['allowed']:.1e} is allowed"
        )
    if row.get("status") == "failed":
        return f"failed: {row['reason']}"
    return row.get("status", "not measured")


def _time(row: Row, field: str) -> str:
    return about(_number(row, field, "{:.3f}"), row, field)


def _number(row: Row, field: str, form: str) -> str:
    return "" if row.get(field) is None else form.format(row[field])
