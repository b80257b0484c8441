"""Fields that compare rows: floors (times the least possible time), ratios to rivals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lln_lab.bench.cases import Case
from lln_lab.bench.operations import OPERATIONS, Operation
from lln_lab.bench.result_rows import Row

# The two ways of timing: the field of a row, and what the derived fields' names begin with.
TIMES = {"milliseconds": "", "graph_milliseconds": "graph_"}
_SHAPE = ("batch", "heads", "tokens", "width", "dtype", "backward")


def add_floors(row: Row, operation: Operation, case: Case, copy_speed: float) -> None:
    """Add to a row its time as a multiple of the floor (the least possible), and in units.

    Args:
        row: A timed row.
        operation: An operation of the registry.
        case: What was timed.
        copy_speed: Speed of a copy in TB/s.
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
    """Add to every row how many times faster it is than its rivals at the same shape.

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
    row = fastest_row(rows, field, group)
    return None if row is None else row[field]


def fastest_row(rows: Iterable[Row], field: str, group: str) -> Row | None:
    """The row with that time."""
    timed = [
        row
        for row in rows
        if row.get(field) is not None
        and OPERATIONS[row["operation"]].kind == "softmax"
        and OPERATIONS[row["operation"]].group == group
    ]
    return min(timed, key=lambda row: row[field], default=None)


def _same_shape(one: Row, other: Row) -> bool:
    return all(one[name] == other[name] for name in _SHAPE)


def _time(rows: Iterable[Row], field: str, operation: str | None) -> float | None:
    return next((row[field] for row in rows if row["operation"] == operation), None)
