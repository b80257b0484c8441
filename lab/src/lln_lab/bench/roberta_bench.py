"""``lln bench roberta``: memory and time of one training step, the paper's Table 2.

Three parts: batch 1 over the length, as in the paper, doubling until memory runs out; the same
replayed as CUDA graphs, without the cost of launching from Python; and batches that fill the
device, with the same number of tokens at every length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from lln_lab.bench.command import Bench, Options, check_least
from lln_lab.bench.record import Record
from lln_lab.bench.result_rows import ROW_FORM, Row, last_shorter, measured_row, row_of
from lln_lab.bench.roberta import SYSTEMS, RobertaSize, TrainingStep
from lln_lab.bench.roberta_figure import draw_roberta
from lln_lab.bench.roberta_table import CELL_FORM, tables_of, text_of
from lln_lab.bench.spread import timed
from lln_lab.choices import check_choices

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
LONGEST = 1 << 20
MOST_STEPS = 20
# A cell that would take longer than this per step is not run.
PATIENCE = 40.0
# Rough bytes per token that a training step of RoBERTa-base needs; the batch takes 60 % of memory.
_TOKEN_BYTES, _FILLED = 500_000, 0.6


@dataclass(frozen=True)
class RobertaCell:
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
    options: Options,
    *,
    systems: Sequence[str] | None = None,
    tokens: int | None = None,
    layers: int = 12,
) -> bool:
    """Measure training steps of RoBERTa-base with every attention.

    Args:
        options: As for every bench; no lengths = 512 … 16,384 and doubling until memory runs out.
            A cell is repeated 20 times at most, and 3 times at least on a GPU.
        systems: Names of `lln_lab.bench.roberta.SYSTEMS`; none = all.
        tokens: B·N of the last part; None = what fills the device, 0 = leave the part out.
        layers: Of the encoder.

    Returns:
        Whether every cell was measured or ran out of memory.

    Raises:
        InvalidInputError: One sentence if an option cannot be used, before any work.
    """
    options = options.checked({"cpu": 1.0, "cuda": 1.0})
    device, size = options.device, RobertaSize(layers=layers)
    check_choices("--systems", systems, SYSTEMS)
    check_least("--layers", layers, 1)
    check_least("--tokens", tokens, 0)
    filling = filling_tokens(device, options.lengths or LENGTHS) if tokens is None else tokens

    def measure_if_worthwhile(cell: RobertaCell, record: Record) -> Row | None:
        # Batches that fill the device do not grow with the length.
        alone = cell.part != "filled"
        last = last_shorter(record.rows, cell, "part", "system") if alone else None
        if last is not None and last["status"] != "timed":
            return None
        # Predicted as if time grew with the square of the length.
        if last and last["milliseconds"] * (cell.tokens / last["tokens"]) ** 2 > 1e3 * PATIENCE:
            return row_of(cell, status=f"over {PATIENCE:.0f} s")
        return measure_cell(cell, size, device, options.repetition)

    bench = Bench(
        "lln bench roberta",
        "roberta",
        measure_if_worthwhile,
        text_of,
        tables_of,
        lambda results, stem: draw_roberta(results, Path(f"{stem}.svg")),
        subject={"model": asdict(size)},
        form={"cases": [ROW_FORM | CELL_FORM]},
        extra={"filling_tokens": filling, "autocast": "bfloat16" if device == "cuda" else None},
    )
    cells = plan(options.lengths, list(systems or SYSTEMS), filling, graphs=device == "cuda")
    asked = {"systems": systems, "tokens": tokens, "layers": None if layers == 12 else layers}
    return bench.run(cells, options, asked)


def plan(
    lengths: Sequence[int] | None, systems: Sequence[str], filling: int, *, graphs: bool
) -> list[RobertaCell]:
    """All cells; after a system runs out of memory its longer ones are skipped during the run."""
    asked = sorted(lengths or ())
    doubled = [1 << power for power in range(LENGTHS[-1].bit_length(), LONGEST.bit_length())]
    lengths = asked or [*LENGTHS, *doubled]
    cells = [RobertaCell("batch 1", name, 1, n) for name in systems for n in lengths]
    # Beyond the paper's lengths the GPU takes longer than launching, so graphs show nothing new.
    short = [n for n in lengths if n <= LENGTHS[-1]]
    if graphs:
        cells += [RobertaCell("graph", name, 1, n) for name in systems for n in short]
    fitting = [n for n in (asked or short) if n <= filling]
    return cells + [
        RobertaCell("filled", name, filling // n, n) for name in systems for n in fitting
    ]


def filling_tokens(device: str, lengths: Sequence[int]) -> int:
    """Tokens of a batch that fills the device: a power of two by its memory; a CPU gets few."""
    if device == "cpu":
        return 2 * max(lengths)
    memory = torch.cuda.get_device_properties(0).total_memory
    return 1 << (int(_FILLED * memory / _TOKEN_BYTES).bit_length() - 1)


def measure_cell(cell: RobertaCell, size: RobertaSize, device: str, seconds: float) -> Row:
    """Median milliseconds and peak bytes of a training step, repeated for ``seconds``."""
    return measured_row(
        cell, lambda row: row.update(_measure(cell, size, device, seconds)), collect=True
    )


def _measure(cell: RobertaCell, size: RobertaSize, device: str, seconds: float) -> Row:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    training = TrainingStep(size, SYSTEMS[cell.system][1], cell.batch, cell.tokens, device)
    first = _timed_step(training.step)
    # The first step also compiles kernels, so it counts only if it is long in comparison.
    times = [first] if first > PATIENCE / 4 and cell.tokens > LENGTHS[-1] else []
    fewest, most = (1, 1) if times else (1 if device == "cpu" else 3, MOST_STEPS)
    step = training.captured() if cell.part == "graph" else training.step
    begin = time.perf_counter()
    while len(times) < fewest or (len(times) < most and time.perf_counter() - begin < seconds):
        times.append(_timed_step(step))
    row: Row = {"status": "timed", "steps": len(times)}
    row |= timed(times).times(1e3).fields("milliseconds")
    # No memory for graphs: a graph has its own pool besides that of the earlier steps.
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
