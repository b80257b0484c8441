"""What rows say about each other: floors, ratios to rivals, crossovers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from lln.bench.cases import Case
from lln.bench.operations import OPERATIONS, Operation

Row = dict[str, Any]

# The two ways of timing: the field of a row, and what the derived fields' names begin with.
TIMES = {"milliseconds": "", "graph_milliseconds": "graph_"}
_SHAPE = ("batch", "heads", "tokens", "width", "dtype", "backward")


def add_floors(row: Row, operation: Operation, case: Case, copy_speed: float) -> None:
    """Write into a row how many times the floor it takes, and how many units of time.

    Args:
        row: A timed row.
        operation: Of the registry.
        case: What was timed.
        copy_speed: In TB/s.
    """
    least = operation.floor_bytes(case)
    if least is None:
        return
    if operation.units is not None:
        row["fewest_units"] = operation.units[case.backward]
    for field, begin in TIMES.items():
        if row.get(field) is not None:
            row[f"{begin}floors"] = row[field] / (least / (copy_speed * 1e9))
            if operation.units is not None:
                row[f"{begin}units"] = row[field] / (case.unit_bytes / (copy_speed * 1e9))


def add_ratios(rows: Sequence[Row]) -> None:
    """Write into every row how many times faster it is than its rivals at the same shape.

    ``…softmax_ratio``: than the fastest softmax; ``…compiled_ratio``: than its own eager form under
    ``torch.compile``; ``…fla_ratio``: than fla's linear attention.
    """
    for field, begin in TIMES.items():
        timed = [row for row in rows if row.get(field) is not None]
        for row in timed:
            beside = [one for one in timed if _same_shape(one, row)]
            operation = OPERATIONS[row["operation"]]
            rivals: dict[str, float | None] = {}
            if operation.kind != "softmax":
                rivals["softmax"] = fastest(beside, field, operation.group)
            if operation.kind == "lln":
                rivals["compiled"] = _time(beside, field, operation.compiled)
            if operation.kind == "lln" and operation.group == "causal":
                rivals["fla"] = _time(beside, field, "fla_causal")
            for name, rival in rivals.items():
                if rival is not None:
                    row[f"{begin}{name}_ratio"] = rival / row[field]


def fastest(rows: Iterable[Row], field: str, group: str) -> float | None:
    """Least time of a softmax operation of a group; None if none was timed."""
    times = [
        row[field]
        for row in rows
        if row.get(field) is not None
        and OPERATIONS[row["operation"]].kind == "softmax"
        and OPERATIONS[row["operation"]].group == group
    ]
    return min(times, default=None)


def crossover(slow: dict[int, float], fast: dict[int, float]) -> float | None:
    """The length from which ``fast`` stays below ``slow``; None if the order never changes so.

    Straight lines in the log-log plane join the measured points.

    Example:
        >>> round(crossover({100: 1.0, 400: 16.0}, {100: 2.0, 400: 8.0}))
        200
    """
    lengths = sorted(set(slow) & set(fast))
    lead = [(math.log(n), math.log(slow[n] / fast[n])) for n in lengths]
    for (x0, y0), (x1, y1) in reversed(list(pairwise(lead))):
        if y1 <= 0:
            return None
        if y0 <= 0:
            return math.exp(x0 + (x1 - x0) * -y0 / (y1 - y0))
    return None


def _same_shape(one: Row, other: Row) -> bool:
    return all(one[name] == other[name] for name in _SHAPE)


def _time(rows: Iterable[Row], field: str, operation: str | None) -> float | None:
    return next((row[field] for row in rows if row["operation"] == operation), None)
