"""What ``lln bench``, ``lln bench roberta`` and ``lln bench peers`` share.

Options that all three take, the results file, the loop over the cells, tables and figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lln.errors import InvalidInputError
from lln.integrations.progress import progress_bar
from lln_lab.bench.environment import describe
from lln_lab.bench.record import Record
from lln_lab.bench.result_rows import Row
from lln_lab.bench.spread import noise_note
from lln_lab.bench.terminal_tables import Table, show_table
from lln_lab.machine import check_device

Echo = Callable[[str], object]


@dataclass(frozen=True)
class Options:
    """The options of every benchmark.

    Attributes:
        echo: Takes the lines meant for the terminal.
        device: ``"cpu"`` or ``"cuda"``; None = the GPU if there is one.
        lengths: N; None = the benchmark's default.
        out: The results file; None = ``lln-BENCH-DEVICE.json`` here.
        resume: Whether to keep what ``out`` already holds.
        threads: CPU threads; None = as many as torch uses.
        seconds: How long to repeat one cell; None = the benchmark's default for the device.
        figure: Whether to draw the results next to ``out``.
        repetition: ``seconds`` or its default; set by `checked`.
    """

    echo: Echo
    device: Any = None
    lengths: Sequence[int] | None = None
    out: Path | None = None
    resume: bool = False
    threads: int | None = None
    seconds: float | None = None
    figure: bool = False
    repetition: float = 0.0

    def checked(self, seconds: Mapping[str, float]) -> Options:
        """A checked copy with a device and the seconds to repeat a cell.

        Args:
            seconds: Default seconds by device.

        Raises:
            InvalidInputError: One sentence if an option cannot be used, before any work.
        """
        device = check_device(self.device)
        check_least("--lengths", min(self.lengths or (1,)), 1)
        check_least("--threads", self.threads, 1)
        asked = seconds[device] if self.seconds is None else self.seconds
        return replace(self, device=device, repetition=check_seconds(asked))


@dataclass(frozen=True)
class Bench:
    """One bench: how it measures a cell, and how it shows what it found.

    Attributes:
        program: The command, such as ``lln bench peers``.
        kind: The kind of results, as written in the results file.
        measure: A cell → its row; None = skip the cell.
        line: A row in a few words.
        tables: Content of the results file → titles and tables.
        draw: Content of the results file, and its path without suffix → the figures' files.
        fails: Whether a row makes the command fail.
        times: Fields of a row that are times.
        subject: Entries of the file that must be equal for rows to be comparable.
        extra: Further entries of the file.
        form: Parts of the results file's schema, see `lln_lab.bench.record.Record`.
        begin: Called with the results file before the first cell.
        relate: Adds fields to rows that depend on other rows.
        spare: Headings of columns that a narrow terminal does without, the first to go first.
    """

    program: str
    kind: str
    measure: Callable[[Any, Record], Row | None]
    line: Callable[[Row], str]
    tables: Callable[[dict[str, Any]], Iterator[tuple[str, Table]]]
    draw: Callable[[dict[str, Any], str], list[Path]]
    fails: Callable[[Row], bool] = lambda row: row["status"] == "failed"
    times: tuple[str, ...] = ("milliseconds",)
    subject: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    form: dict[str, Any] = field(default_factory=dict)
    begin: Callable[[Record], None] = lambda record: None
    relate: Callable[[list[Row]], None] = lambda rows: None
    spare: tuple[str, ...] = ()

    def run(self, cells: Sequence[Any], options: Options, asked: dict[str, Any]) -> bool:
        """Measure the cells that the results file lacks, then show all it holds.

        Args:
            cells: What to measure; each has a ``name``.
            options: Checked options.
            asked: Further options, for the command recorded in the file; None = not given.

        Returns:
            Whether no row makes the command fail.

        Raises:
            KeyboardInterrupt: After Ctrl-C; the file is complete.
        """
        given = {"device": options.device, "lengths": options.lengths, **asked}
        given |= {"threads": options.threads, "seconds": options.seconds}
        path = options.out or Path(f"lln-{self.program.split()[-1]}-{options.device}.json")
        with threads_set(options.threads):
            environment = describe(options.device, command_of(self.program, given), options.echo)
            record = Record(path, self.kind, environment, options.resume, self.subject, self.form)
            record.extra |= self.extra
            try:
                self._measure_all(cells, record, options.echo)
            except KeyboardInterrupt:
                options.echo(f"Stopped; {path} holds what was measured; --resume continues there.")
                raise
        self._report(record, options)
        return not any(map(self.fails, record.rows))

    def _measure_all(self, cells: Sequence[Any], record: Record, echo: Echo) -> None:
        self.begin(record)
        with progress_bar() as bar:
            task = bar.add_task("starting", total=len(cells))
            for index, cell in enumerate(cells):
                bar.update(task, description=cell.name, completed=index)
                row = None if cell.name in record.done else self.measure(cell, record)
                if row is not None:
                    line = f"{cell.name}: {self.line(row)}"
                    if not bar.console.is_terminal:
                        echo(line)
                    elif self.fails(row):
                        # Above the bar. Other rows are not printed now: a table comes at the end.
                        bar.console.print(line, markup=False, highlight=False)
                    self.relate([*record.rows, row])
                    record.add(row)

    def _report(self, record: Record, options: Options) -> None:
        echo, results = options.echo, record.content
        for title, table in self.tables(results):
            show_table(*table, title, self.spare)
        if note := noise_note(record.rows, self.times):
            echo(note)
        failed = [row for row in record.rows if self.fails(row)]
        for row in failed:
            echo(f"{row['name']}: {self.line(row)}")
        if failed:
            echo(
                f"{len(failed)} of {len(record.rows)} cases have no time for these reasons; the "
                "others were measured, and --resume tries those again."
            )
        echo(f"Wrote {record.path}.")
        if options.figure:
            for written in self.draw(results, str(record.path.with_suffix(""))):
                echo(f"Drew {written}.")


def command_of(program: str, options: Mapping[str, Any]) -> str:
    """The command that repeats the measurements, without paths of this machine.

    Example:
        >>> command_of("lln bench", {"device": "cpu", "lengths": (64, 128), "width": None})
        'lln bench --device cpu --lengths 64 128'
    """
    words = [program]
    for name, value in options.items():
        several = list(value) if isinstance(value, (list, tuple)) else [value]
        if several and value is not None:
            words += [f"--{name}", *map(str, several)]
    return " ".join(words)


def check_least(option: str, value: int | None, least: int) -> None:
    """Refuse a number that is too small.

    Raises:
        InvalidInputError: Names the option.
    """
    if value is not None and value < least:
        raise InvalidInputError(f"{option} must be at least {least}, got {value}.")


def check_seconds(seconds: float, option: str = "--seconds") -> float:
    """A positive number of seconds.

    Raises:
        InvalidInputError: If it is not positive.
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidInputError(f"{option} must be a positive number, got {seconds!r}.")
    return seconds


@contextmanager
def threads_set(threads: int | None) -> Iterator[None]:
    """Run the body on ``threads`` CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
