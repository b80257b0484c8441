"""``lln bench peers``: one layer of every attention system over the length, cell after cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lln import peers
from lln.errors import InvalidInputError
from lln.peers.listing import check_names, in_order
from lln.studies.bench.command import check_seconds, command_of, threads_set
from lln.studies.bench.compare import Row
from lln.studies.bench.display import Echo, progress, show_table
from lln.studies.bench.environment import check_device, describe
from lln.studies.bench.peers_cells import (
    ALONE,
    FILLED,
    FRAME,
    PASSES,
    LayerSize,
    PeerCell,
    foreseen,
    measure_cell,
)
from lln.studies.bench.peers_figure import draw_peers
from lln.studies.bench.peers_table import TABLES, table_of, text_of, title_of
from lln.studies.bench.peers_worker import Worker
from lln.studies.bench.record import Record
from lln.studies.bench.speed_figure import check_matplotlib
from lln.studies.bench.spread import noise_note

SIZES = {"cpu": LayerSize(256, 4, "float32"), "cuda": LayerSize(768, 12, "bfloat16")}
LENGTHS = {"cpu": (256, 1024, 4096), "cuda": (256, 1024, 4096, 16384, 65536)}
# B·N of the part with equal numbers of tokens.
TOKENS = {"cpu": 4096, "cuda": 65536}
SECONDS = {"cpu": 0.1, "cuda": 0.02}
LIMITS = {"cpu": 5.0, "cuda": 1.0}


def run_peers(
    *,
    device: str | None = None,
    lengths: Sequence[int] | None = None,
    systems: Sequence[str] | None = None,
    tokens: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    threads: int | None = None,
    seconds: float | None = None,
    limit: float | None = None,
    figure: bool = False,
    echo: Echo,
) -> bool:
    """Measure one layer of every system, forward and forward + backward.

    Args:
        device: ``"cpu"`` or ``"cuda"``; None = the GPU if there is one.
        lengths: N; None = those of the device.
        systems: Names of `lln.peers.available`, or ``softmax_layer``; None = all.
        tokens: B·N of the second part; None = the device's, 0 = leave the part out.
        out: The results file; None = ``lln-peers-DEVICE.json`` here.
        resume: Whether to keep what ``out`` already holds.
        threads: CPU threads; None = as many as torch uses.
        seconds: Repetition of a cell; None = 0.1 on a CPU, 0.02 on a GPU.
        limit: Seconds that one call may take; None = 5 on a CPU, 1 on a GPU.
        figure: Whether to draw the results beside ``out``.
        echo: Takes the lines meant for the terminal.

    Returns:
        Whether no cell failed; out of memory and over the limit are results.

    Raises:
        InvalidInputError: One sentence if an option cannot be used, before any work.
        KeyboardInterrupt: After Ctrl-C, with the file in order.
    """
    device = check_device(device)
    _check(lengths, systems, tokens)
    seconds = check_seconds(SECONDS[device] if seconds is None else seconds)
    limit = check_seconds(LIMITS[device] if limit is None else limit, "--limit")
    if figure:
        check_matplotlib()
    options = {"device": device, "lengths": lengths, "systems": systems, "tokens": tokens}
    options |= {"threads": threads, "seconds": None if seconds == SECONDS[device] else seconds}
    options |= {"limit": None if limit == LIMITS[device] else limit}
    steps, in_batch = (
        sorted(lengths or LENGTHS[device]),
        TOKENS[device] if tokens is None else tokens,
    )
    cells = plan(steps, systems, in_batch)
    # One sample of exactly so many tokens is in the first part already.
    left_out = [n for n in steps if in_batch // n < 2 and n != in_batch]
    if in_batch and left_out:
        echo(
            f"The second part leaves out N = {', '.join(map(str, left_out))}: a batch of "
            f"{in_batch} tokens does not hold two; raise --tokens."
        )
    with threads_set(threads):
        environment = describe(device, command_of("lln bench peers", options), echo)
        record = Record(out or Path(f"lln-peers-{device}.json"), "peers", environment, resume)
        record.extra = {"layer": asdict(SIZES[device]), "limit_seconds": limit}
        try:
            _run_cells(cells, record, device, seconds, limit, echo)
        except KeyboardInterrupt:
            echo(f"Stopped; {record.path} holds what was measured, and --resume goes on from it.")
            raise
    _report(record, figure, echo)
    return all(row["status"] != "failed" for row in record.rows)


def plan(lengths: Sequence[int], systems: Sequence[str] | None, tokens: int) -> list[PeerCell]:
    """All cells, part after part, lengths of one system and pass in increasing order.

    Args:
        lengths: N, increasing.
        systems: Names; None = all, and the frame that blocks are compared with.
        tokens: B·N of the second part; lengths above it and those with one sample are left out.
    """
    if systems is None:
        systems = [FRAME, *peers.available()]
    ordered = [name for name in systems if name == FRAME] + in_order(systems)
    alone = [(ALONE, 1, n) for n in lengths]
    filled = [(FILLED, tokens // n, n) for n in lengths if tokens // n > 1]
    # The part that every page is made of comes first, whatever ends the run.
    return [
        PeerCell(part, name, passes, batch, n)
        for shapes in (alone, filled)
        for name in ordered
        for passes in PASSES
        for part, batch, n in shapes
    ]


def _run_cells(
    cells: Sequence[PeerCell],
    record: Record,
    device: str,
    seconds: float,
    limit: float,
    echo: Echo,
) -> None:
    arguments = (SIZES[device], device, seconds, limit)
    with progress(len(cells), echo) as (advance, tell), _measurer(device, arguments) as measure:
        for cell in cells:
            advance(cell.name)
            if cell.name in record.done:
                continue
            told = foreseen(cell, record.rows, device, limit)
            row = {"name": cell.name, **asdict(cell), **told} if told else measure(cell)
            (echo if row["status"] == "failed" else tell)(f"{cell.name}: {text_of(row)}")
            record.add(row)


@contextmanager
def _measurer(device: str, arguments: tuple[Any, ...]) -> Iterator[Callable[[PeerCell], Row]]:
    """What measures a cell: here on a CPU, on a GPU in a process that may be lost."""
    if device == "cpu":
        yield lambda cell: measure_cell(cell, *arguments)
        return
    with Worker(measure_cell, arguments) as worker:
        yield worker


def _report(record: Record, figure: bool, echo: Echo) -> None:
    results = {"environment": record.environment, **record.extra, "cases": record.rows}
    for measure in TABLES:
        heads, lines = table_of(results, measure)
        if lines:
            show_table(heads, lines, title=title_of(results, measure))
    if note := noise_note(record.rows, ("milliseconds",)):
        echo(note)
    for row in record.rows:
        if row["status"] == "failed":
            echo(f"{row['name']}: {text_of(row)}")
    echo(f"Wrote {record.path}.")
    if figure:
        for field in ("milliseconds", "peak_bytes"):
            end = "time" if field == "milliseconds" else "memory"
            for path in draw_peers(
                results, Path(f"{record.path.with_suffix('')}-{end}.svg"), field
            ):
                echo(f"Drew {path}.")


def _check(
    lengths: Sequence[int] | None, systems: Sequence[str] | None, tokens: int | None
) -> None:
    check_names(systems or (), "--systems", also=(FRAME,))
    if any(n < 1 for n in lengths or ()):
        raise InvalidInputError(f"--lengths must be at least 1, got {min(lengths or ())}.")
    if tokens is not None and tokens < 0:
        raise InvalidInputError(f"--tokens must be at least 0, got {tokens}.")
