"""``lln bench``: checks, times and saves every case; then prints a table and may draw figures."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lln_lab.bench.attention_table import FORM, SPARE, table_of, text_of
from lln_lab.bench.cases import Case
from lln_lab.bench.command import Bench, Echo, Options
from lln_lab.bench.compare import TIMES, add_floors, add_ratios
from lln_lab.bench.gate import Checker
from lln_lab.bench.operations import OPERATIONS
from lln_lab.bench.record import Record
from lln_lab.bench.result_rows import ROW_FORM, Row, measured_row
from lln_lab.bench.speed_figure import draw_speed
from lln_lab.bench.suites import choose_cases
from lln_lab.bench.terminal_tables import Table
from lln_lab.bench.timing import copy_speed, free_memory, measure

# Seconds to repeat a case; fewer on a GPU, because its times vary little and its suite is long.
_SECONDS = {"cpu": 0.3, "cuda": 0.05}
_COPY = "copy_terabytes_per_second"


def run_bench(options: Options, **asked: Any) -> bool:
    """Run the benchmark of this machine.

    Args:
        options: As for every bench.
        **asked: ``operations``, ``passes``, ``dtype`` and ``width``, see `choose_cases`.

    Returns:
        Whether all of our operations that ran were right.

    Raises:
        InvalidInputError: One sentence if an option cannot be used, before any work.
    """
    options = options.checked(_SECONDS)
    cases = _possible(choose_cases(options.device, options.lengths, **asked), options.echo)
    gate = Checker(options.device)

    def begin(record: Record) -> None:
        if _COPY not in record.extra:
            record.extra[_COPY] = copy_speed(options.device)
            free_memory()
        device, speed = record.environment["device"], record.extra[_COPY]
        options.echo(f"{device}: a copy moves {speed:.3g} TB/s; {len(cases)} cases.")

    def measure_one(case: Case, record: Record) -> Row:
        return measure_case(case, gate, options.repetition, record.extra[_COPY])

    bench = Bench(
        "lln bench",
        "attention",
        measure_one,
        text_of,
        _tables,
        _draw,
        fails=_fails,
        times=tuple(TIMES),
        form={"cases": [ROW_FORM | FORM], f"{_COPY}?": float},
        begin=begin,
        relate=add_ratios,
        spare=SPARE,
    )
    return bench.run(cases, options, asked)


def _possible(cases: Sequence[Case], echo: Echo) -> list[Case]:
    """The cases with an operation that can run here; says once why the others cannot."""
    missing = {name: OPERATIONS[name].missing() for name in {case.operation for case in cases}}
    for name, sentence in sorted(missing.items()):
        if sentence:
            echo(f"No rows for {name}: {sentence}.")
    return [case for case in cases if not missing[case.operation]]


def measure_case(case: Case, gate: Checker, seconds: float, speed: float) -> Row:
    """One row: checked, then timed for ``seconds`` if right; ``speed`` of a copy is in TB/s."""
    operation = OPERATIONS[case.operation]

    def judge_and_time(row: Row) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            inputs = operation.layout.make(case, gate.device, 0)
            verdict = gate.judge(operation, case, inputs)
            row |= asdict(verdict)
            row["status"] = "timed" if verdict.passed else "wrong"
            if verdict.passed:
                row |= measure(operation, case, inputs, seconds)
                add_floors(row, operation, case, speed)
        notes = {str(one.message) for one in caught if str(one.message).startswith("lln ")}
        if notes:
            row["note"] = " ".join(sorted(notes))

    return measured_row(case, judge_and_time)


def _fails(row: Row) -> bool:
    """Whether a result is wrong, or one of our operations failed; a rival may lack a shape."""
    if row.get("status") == "failed":
        return OPERATIONS[row["operation"]].kind == "lln"
    return row.get("status") == "wrong"


def _tables(results: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    environment = results["environment"]
    yield f"{environment['device']}, torch {environment['torch']}", table_of(results["cases"])


def _draw(results: dict[str, Any], stem: str) -> list[Path]:
    groups = {"bidirectional": "", "causal": "-causal"}
    return [
        path
        for group, end in groups.items()
        for path in draw_speed(results, Path(f"{stem}{end}.svg"), group)
    ]
