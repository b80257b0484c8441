"""``lln bench roberta``: memory and time of one training step, the paper's Table 2.

Three parts: batch 1 over the length, as in the paper, doubling until memory runs out; the same
replayed as CUDA graphs, which leaves out what launching from Python takes; and batches that all
hold the same number of tokens and fill the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from lln.checks.names import check_choices
from lln.errors import InvalidInputError
from lln.studies.bench.command import check_seconds, command_of
from lln.studies.bench.compare import Row
from lln.studies.bench.display import Echo, progress, show_table
from lln.studies.bench.environment import check_device, describe
from lln.studies.bench.record import Record
from lln.studies.bench.roberta import SYSTEMS, RobertaSize, Training
from lln.studies.bench.roberta_figure import draw_roberta
from lln.studies.bench.speed_figure import check_matplotlib
from lln.studies.bench.spread import about, noise_note, timed
from lln.studies.bench.timing import free_memory, is_out_of_memory
from lln.studies.report.failures import in_one_line

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
LONGEST = 1 << 20
MOST_STEPS = 20
# A cell that would take longer than this a step is not run.
PATIENCE = 40.0
# Bytes a token that a training step of RoBERTa-base keeps, roughly; the batch takes 60 % of memory.
_TOKEN_BYTES, _FILLED = 500_000, 0.6


@dataclass(frozen=True)
class Cell:
    """One cell of the table."""

    part: str
    system: str
    batch: int
    tokens: int

    @property
    def name(self) -> str:
        """How the cell is printed and found again in the results."""
        return f"{self.part}: {self.system} B{self.batch} N{self.tokens}"


def run_roberta(
    *,
    device: str | None = None,
    lengths: Sequence[int] | None = None,
    systems: Sequence[str] | None = None,
    tokens: int | None = None,
    layers: int = 12,
    out: Path | None = None,
    resume: bool = False,
    seconds: float | None = None,
    figure: bool = False,
    echo: Echo,
) -> bool:
    """Measure training steps of RoBERTa-base with every attention.

    Args:
        device: ``"cpu"`` or ``"cuda"``; None = the GPU if there is one.
        lengths: N; None = 512 … 16,384 and doubling until memory runs out.
        systems: Names of `lln.studies.bench.roberta.SYSTEMS`; None = all.
        tokens: B·N of the last part; None = what fills the device, 0 = leave the part out.
        layers: Of the encoder.
        out: The results file; None = ``lln-roberta-DEVICE.json`` here.
        resume: Whether to keep what ``out`` already holds.
        seconds: Repetition of a cell, 20 steps at most, 3 at least on a GPU; None = 1.
        figure: Whether to draw the results beside ``out``.
        echo: Takes the lines meant for the terminal.

    Returns:
        Whether every cell was measured or ran out of memory.

    Raises:
        InvalidInputError: One sentence if an option cannot be used, before any work.
        KeyboardInterrupt: After Ctrl-C, with the file in order.
    """
    device = check_device(device)
    _check(lengths, systems, tokens, layers)
    seconds = check_seconds(1.0 if seconds is None else seconds)
    if figure:
        check_matplotlib()
    options = {"device": device, "lengths": lengths, "systems": systems, "tokens": tokens}
    options |= {"layers": None if layers == 12 else layers}
    options |= {"seconds": None if seconds == 1.0 else seconds}
    environment = describe(device, command_of("lln bench roberta", options), echo)
    size = RobertaSize(layers=layers)
    path = out or Path(f"lln-roberta-{device}.json")
    record = Record(path, "roberta", environment, resume, {"model": asdict(size)})
    filling = filling_tokens(device, lengths or LENGTHS) if tokens is None else tokens
    record.extra["filling_tokens"] = filling
    record.extra["autocast"] = "bfloat16" if device == "cuda" else None
    cells = plan(lengths, list(systems or SYSTEMS), filling, graphs=device == "cuda")
    try:
        _run_cells(cells, record, size, device, seconds, echo)
    except KeyboardInterrupt:
        echo(f"Stopped; {record.path} holds what was measured, and --resume goes on from it.")
        raise
    for part in dict.fromkeys(row["part"] for row in record.rows):
        show_table(*table_of(record.rows, part), title=title_of(record.rows, part))
    if note := noise_note(record.rows, ("milliseconds",)):
        echo(note)
    echo(f"Wrote {record.path}.")
    if figure:
        results = {"environment": record.environment, **record.extra, "cases": record.rows}
        for written in draw_roberta(results, Path(f"{record.path.with_suffix('')}.svg")):
            echo(f"Drew {written}.")
    return all(row["status"] != "failed" for row in record.rows)


def plan(
    lengths: Sequence[int] | None, systems: Sequence[str], filling: int, *, graphs: bool
) -> list[Cell]:
    """All cells; those behind a system's out of memory are left out when their turn comes."""
    asked = sorted(lengths or ())
    lengths = asked or [*LENGTHS, *_doublings(LENGTHS[-1])]
    cells = [Cell("batch 1", name, 1, n) for name in systems for n in lengths]
    # Behind the paper's lengths the GPU takes longer than launching does.
    short = [n for n in lengths if n <= LENGTHS[-1]]
    if graphs:
        cells += [Cell("graph", name, 1, n) for name in systems for n in short]
    for name in systems:
        fitting = [n for n in (asked or short) if n <= filling]
        cells += [Cell("filled", name, filling // n, n) for n in fitting]
    return cells


def filling_tokens(device: str, lengths: Sequence[int]) -> int:
    """Tokens of a batch that fills the device: a power of two by its memory; a CPU gets few."""
    if device == "cpu":
        return 2 * max(lengths)
    memory = torch.cuda.get_device_properties(0).total_memory
    return 1 << (int(_FILLED * memory / _TOKEN_BYTES).bit_length() - 1)


def measure_cell(cell: Cell, size: RobertaSize, device: str, seconds: float) -> Row:
    """Median milliseconds and peak bytes of a training step.

    Args:
        cell: What to measure.
        size: Of the model.
        device: ``"cpu"`` or ``"cuda"``.
        seconds: How long to repeat: 20 steps at most, 3 at least on a GPU.
    """
    row: Row = {"name": cell.name, **asdict(cell)}
    try:
        row |= _measure(cell, size, device, seconds)
    except Exception as error:
        if is_out_of_memory(error):
            row["status"] = "out of memory"
        else:
            row |= {"status": "failed", "reason": in_one_line(error)}
    # Here the exception and the frames it kept alive, model included, are gone.
    free_memory()
    return row


def _measure(cell: Cell, size: RobertaSize, device: str, seconds: float) -> Row:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    training = Training(size, SYSTEMS[cell.system][1], cell.batch, cell.tokens, device)
    first = _timed_step(training.step)
    # The first step also compiles kernels, so it counts only where that is little beside it.
    times = [first] if first > PATIENCE / 4 and cell.tokens > LENGTHS[-1] else []
    fewest, most = (1, 1) if times else (1 if device == "cpu" else 3, MOST_STEPS)
    step = training.captured() if cell.part == "graph" else training.step
    begin = time.perf_counter()
    while len(times) < fewest or (len(times) < most and time.perf_counter() - begin < seconds):
        times.append(_timed_step(step))
    row: Row = {"status": "timed", "steps": len(times)}
    row |= timed(times).times(1e3).fields("milliseconds")
    # A graph keeps its own pool beside that of the steps before it: no measure of a step.
    if device == "cuda" and cell.part != "graph":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
        row["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return row


def _timed_step(step: Callable[[], Tensor]) -> float:
    """Seconds of one step; reading the loss waits for the device."""
    begin = time.perf_counter()
    loss = step().item()
    seconds = time.perf_counter() - begin
    if loss != loss:
        raise FloatingPointError("the loss is not a number")
    return seconds


def _run_cells(
    cells: Sequence[Cell],
    record: Record,
    size: RobertaSize,
    device: str,
    seconds: float,
    echo: Echo,
) -> None:
    with progress(len(cells), echo) as (advance, tell):
        for cell in cells:
            advance(cell.name)
            if cell.name in record.done:
                continue
            if _is_behind_the_end(cell, record.rows):
                continue
            if _is_too_slow(cell, record.rows):
                row = {"name": cell.name, **asdict(cell), "status": f"over {PATIENCE:.0f} s"}
            else:
                row = measure_cell(cell, size, device, seconds)
            (echo if row["status"] == "failed" else tell)(f"{cell.name}: {_text(row)}")
            record.add(row)


def _last_shorter(cell: Cell, rows: Sequence[Row]) -> Row | None:
    """The longest of the shorter sequences in the same part, if its batch is one."""
    shorter = [
        row
        for row in rows
        if (row["part"], row["system"]) == (cell.part, cell.system) and row["tokens"] < cell.tokens
    ]
    if cell.part == "filled":
        return None
    return max(shorter, key=lambda row: row["tokens"], default=None)


def _is_behind_the_end(cell: Cell, rows: Sequence[Row]) -> bool:
    """Whether a shorter sequence already did not fit, took too long or failed."""
    last = _last_shorter(cell, rows)
    return last is not None and last["status"] != "timed"


def _is_too_slow(cell: Cell, rows: Sequence[Row]) -> bool:
    """Whether a step would take too long, if time grows with the square of the length."""
    last = _last_shorter(cell, rows)
    if last is None:
        return False
    return last["milliseconds"] * (cell.tokens / last["tokens"]) ** 2 > 1e3 * PATIENCE


def table_of(rows: Sequence[Row], part: str) -> tuple[list[str], list[list[str]]]:
    """Headings and cells: memory in GB, then milliseconds a step, a line a system."""
    rows = [row for row in rows if row["part"] == part]
    lengths = sorted({row["tokens"] for row in rows})
    lines = []
    for field, what in (("peak_bytes", "GB"), ("milliseconds", "ms")):
        measured = any(row.get(field) is not None for row in rows)
        for name in dict.fromkeys(row["system"] for row in rows if measured):
            own = {row["tokens"]: row for row in rows if row["system"] == name}
            cells = [_cell(own.get(n), field) for n in lengths]
            ends = [n for n, row in own.items() if row["status"] == "out of memory"]
            if part != "filled" and ends:
                # What does not fit does not fit at twice the length either.
                cells = [
                    "out of memory" if n > min(ends) else cell
                    for n, cell in zip(lengths, cells, strict=True)
                ]
            if any(cells):
                lines.append([f"{what}, {SYSTEMS[name][0]}", *cells])
    return ["", *map(str, lengths)], lines


def title_of(rows: Sequence[Row], part: str) -> str:
    """What a part measures."""
    if part != "filled":
        return "One training step, batch 1" + (", as a CUDA graph" if part == "graph" else "")
    tokens = max(row["batch"] * row["tokens"] for row in rows if row["part"] == part)
    return f"One training step, {tokens:,} tokens a batch"


def as_milliseconds(value: float) -> str:
    """Three digits, and no more than there is sense in."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


def _cell(row: Row | None, field: str) -> str:
    """A cell that was not run is empty."""
    if row is None:
        return ""
    if row.get(field) is not None:
        if field == "peak_bytes":
            return f"{row[field] / 1e9:.1f}"
        return about(as_milliseconds(row[field]), row, field)
    return "" if row["status"] == "timed" else row["status"]


def _text(row: Row) -> str:
    if row["status"] != "timed":
        return row.get("reason", row["status"])
    memory = f", {row['peak_bytes'] / 1e9:.1f} GB" if "peak_bytes" in row else ""
    step = about(f"{row['milliseconds']:.1f}", row, "milliseconds")
    return f"{step} ms a step{memory}"


def _doublings(length: int) -> list[int]:
    found: list[int] = []
    while (length := 2 * length) <= LONGEST:
        found.append(length)
    return found


def _check(
    lengths: Sequence[int] | None, systems: Sequence[str] | None, tokens: int | None, layers: int
) -> None:
    check_choices("--systems", systems, SYSTEMS)
    numbers = (
        ("--lengths", min(lengths or (1,)), 1),
        ("--layers", layers, 1),
        ("--tokens", tokens, 0),
    )
    for option, value, least in numbers:
        if value is not None and value < least:
            raise InvalidInputError(f"{option} must be at least {least}, got {value}.")
