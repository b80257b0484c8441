"""``lln bench``: gate, time, save, case after case; then a table and, if asked for, figures."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lln.errors import InvalidInputError
from lln.studies.bench.cases import Case
from lln.studies.bench.compare import TIMES, Row, add_floors, add_ratios
from lln.studies.bench.display import Echo, line_of, problem_of, progress, show_table, table_of
from lln.studies.bench.environment import check_device, describe
from lln.studies.bench.gate import Gate
from lln.studies.bench.operations import OPERATIONS
from lln.studies.bench.record import Record
from lln.studies.bench.speed_figure import check_matplotlib, draw_speed
from lln.studies.bench.spread import noise_note
from lln.studies.bench.suites import choose_cases
from lln.studies.bench.timing import copy_speed, free_memory, is_out_of_memory, measure
from lln.studies.report.failures import in_one_line

# Seconds of repetition a case. A GPU is steady, and its suite is long.
_SECONDS = {"cpu": 0.3, "cuda": 0.05}


def run_bench(
    *,
    device: str | None = None,
    lengths: Sequence[int] | None = None,
    operations: Sequence[str] | None = None,
    passes: Sequence[str] | None = None,
    dtype: str | None = None,
    width: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    threads: int | None = None,
    seconds: float | None = None,
    figure: bool = False,
    echo: Echo,
) -> bool:
    """Run the benchmark of this machine.

    Args:
        device: ``"cpu"`` or ``"cuda"``; None = the GPU if there is one.
        lengths: See `lln.studies.bench.suites.choose_cases`, also for the next four.
        operations: Names of the registry.
        passes: ``"forward"``, ``"both"``.
        dtype: E.g. ``"bfloat16"``.
        width: Head width.
        out: The results file; None = ``lln-bench-DEVICE.json`` here.
        resume: Whether to keep what ``out`` already holds.
        threads: CPU threads; None = as many as torch uses.
        seconds: Repetition of one case; None = 0.3 on a CPU, 0.05 on a GPU.
        figure: Whether to draw the results beside ``out``.
        echo: Takes the lines meant for the terminal.

    Returns:
        Whether everything of ours that ran was right.

    Raises:
        InvalidInputError: One sentence if an option cannot be used, before any work.
        KeyboardInterrupt: After Ctrl-C, with the file in order.
    """
    device = check_device(device)
    cases = choose_cases(device, lengths, operations, passes, dtype, width)
    seconds = check_seconds(_SECONDS[device] if seconds is None else seconds)
    if figure:
        check_matplotlib()
    options = {
        "device": device,
        "lengths": lengths,
        "operations": operations,
        "passes": passes,
        "dtype": dtype,
        "width": width,
        "threads": threads,
        "seconds": None if seconds == _SECONDS[device] else seconds,
    }
    with threads_set(threads):
        environment = describe(device, command_of("lln bench", options), echo)
        path = out or Path(f"lln-bench-{device}.json")
        record = Record(path, "attention", environment, resume)
        cases = _possible(cases, echo)
        try:
            _run_cases(cases, record, device, seconds, echo)
        except KeyboardInterrupt:
            echo(f"Stopped; {record.path} holds what was measured, and --resume goes on from it.")
            raise
    _report(record, figure, echo)
    return all(_is_fine(row) for row in record.rows)


def command_of(program: str, options: dict[str, Any]) -> str:
    """The command that makes the same measurements again, without a place of this machine.

    Example:
        >>> command_of("lln bench", {"device": "cpu", "lengths": (64, 128), "width": None})
        'lln bench --device cpu --lengths 64 128'
    """
    words = [program]
    for name, value in options.items():
        if value is not None:
            several = isinstance(value, (list, tuple))
            words += [f"--{name}", *(map(str, value) if several else [str(value)])]
    return " ".join(words)


def check_seconds(seconds: float, option: str = "--seconds") -> float:
    """A positive number of seconds.

    Raises:
        InvalidInputError: If it is none.
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidInputError(f"{option} must be a positive number, got {seconds!r}.")
    return seconds


@contextmanager
def threads_set(threads: int | None) -> Iterator[None]:
    """Run the body on so many CPU threads.

    Raises:
        InvalidInputError: If there cannot be so many.
    """
    before = torch.get_num_threads()
    if threads is not None and threads < 1:
        raise InvalidInputError(f"--threads must be at least 1, got {threads}.")
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _possible(cases: Sequence[Case], echo: Echo) -> list[Case]:
    """The cases whose operation can run here; says once why the others cannot."""
    missing = {name: OPERATIONS[name].missing() for name in {case.operation for case in cases}}
    for name, sentence in sorted(missing.items()):
        if sentence:
            echo(f"No rows for {name}: {sentence}.")
    return [case for case in cases if not missing[case.operation]]


def _run_cases(
    cases: Sequence[Case], record: Record, device: str, seconds: float, echo: Echo
) -> None:
    if "copy_terabytes_per_second" not in record.extra:
        record.extra["copy_terabytes_per_second"] = copy_speed(device)
        free_memory()
    speed = record.extra["copy_terabytes_per_second"]
    echo(f"{record.environment['device']}: a copy moves {speed:.3g} TB/s; {len(cases)} cases.")
    gate, done = Gate(device), record.done
    with progress(len(cases), echo) as (advance, tell):
        for case in cases:
            advance(case.name)
            if case.name in done:
                continue
            row = measure_case(case, gate, seconds, speed)
            (tell if _is_fine(row) else echo)(line_of(row))
            record.rows.append(row)
            add_ratios(record.rows)
            record.save()


def measure_case(case: Case, gate: Gate, seconds: float, speed: float) -> Row:
    """One row: judged first, timed if right; what goes wrong is a row too.

    Args:
        case: What to measure.
        gate: Judges it.
        seconds: Repetition.
        speed: Of a copy, in TB/s.
    """
    operation = OPERATIONS[case.operation]
    row: Row = {"name": case.name, **asdict(case)}
    try:
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
    except Exception as error:
        if is_out_of_memory(error):
            row["status"] = "out of memory"
        else:
            row |= {"status": "failed", "reason": in_one_line(error)}
    # Here the exception and the frames it kept alive are gone.
    inputs = None
    free_memory(collect=row["status"] != "timed")
    return row


def _is_fine(row: Row) -> bool:
    """Whether nothing of ours is wrong; a rival may lack a shape."""
    if row.get("status") == "failed":
        return OPERATIONS[row["operation"]].kind != "lln"
    return row.get("status") != "wrong"


def _report(record: Record, figure: bool, echo: Echo) -> None:
    heads, cells = table_of(record.rows)
    environment = record.environment
    show_table(heads, cells, f"{environment['device']}, torch {environment['torch']}")
    if note := noise_note(record.rows, tuple(TIMES)):
        echo(note)
    bad = [row for row in record.rows if not _is_fine(row)]
    for row in bad:
        echo(f"{row['name']}: {problem_of(row)}")
    if bad:
        echo(
            f"{len(bad)} of {len(record.rows)} cases have no time for these reasons; the others "
            "were measured, and --resume tries those again."
        )
    echo(f"Wrote {record.path}.")
    if figure:
        results = {"environment": environment, "cases": record.rows}
        stem = record.path.with_suffix("")
        for group, end in (("bidirectional", ""), ("causal", "-causal")):
            for written in draw_speed(results, Path(f"{stem}{end}.svg"), group):
                echo(f"Drew {written}.")
