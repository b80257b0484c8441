"""``lln bench peers``: one layer of every attention system at every length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lln_lab import peers
from lln_lab.bench.command import Bench, Options, check_least, check_seconds
from lln_lab.bench.peers_cells import (
    ALONE,
    FILLED,
    FRAME,
    PASSES,
    PEER_FORM,
    LayerSize,
    PeerCell,
    foreseen,
    measure_cell,
)
from lln_lab.bench.peers_figure import draw_peers
from lln_lab.bench.peers_table import tables_of, text_of
from lln_lab.bench.peers_worker import Worker
from lln_lab.bench.record import Record
from lln_lab.bench.result_rows import ROW_FORM, Row, row_of
from lln_lab.peers.listing import check_names, in_order

SIZES = {"cpu": LayerSize(256, 4, "float32"), "cuda": LayerSize(768, 12, "bfloat16")}
LENGTHS = {"cpu": (256, 1024, 4096), "cuda": (256, 1024, 4096, 16384, 65536)}
# B·N of the part with the same number of tokens per batch.
TOKENS = {"cpu": 4096, "cuda": 65536}
SECONDS = {"cpu": 0.1, "cuda": 0.02}
LIMITS = {"cpu": 5.0, "cuda": 1.0}


def run_peers(
    options: Options,
    *,
    systems: Sequence[str] | None = None,
    tokens: int | None = None,
    limit: float | None = None,
) -> bool:
    """Measure one layer of every system, forward and forward + backward.

    Args:
        options: As for every bench.
        systems: Names of `lln_lab.peers.available`, or ``softmax_layer``; None = all.
        tokens: B·N of the second part; None = the device's, 0 = leave the part out.
        limit: Seconds that one call may take; None = 5 on a CPU, 1 on a GPU.

    Returns:
        Whether no cell failed; out of memory and over the limit are results.

    Raises:
        InvalidInputError: One sentence if an option cannot be used, before any work.
    """
    options = options.checked(SECONDS)
    device = options.device
    check_names(systems or (), "--systems", also=(FRAME,))
    check_least("--tokens", tokens, 0)
    asked = {"systems": systems, "tokens": tokens, "limit": limit}
    most = check_seconds(LIMITS[device] if limit is None else limit, "--limit")
    lengths = sorted(options.lengths or LENGTHS[device])
    in_batch = TOKENS[device] if tokens is None else tokens
    # A batch of one sample is already in the first part.
    left_out = [n for n in lengths if in_batch // n < 2 and n != in_batch]
    if in_batch and left_out:
        options.echo(
            f"The second part leaves out N = {', '.join(map(str, left_out))}: a batch of "
            f"{in_batch} tokens does not hold two; raise --tokens."
        )
    arguments = (SIZES[device], device, options.repetition, most)
    with _measurer(device, arguments) as measure:

        def measure_or_foresee(cell: PeerCell, record: Record) -> Row:
            told = foreseen(cell, record.rows, device, most)
            return row_of(cell, **told) if told else measure(cell)

        bench = Bench(
            "lln bench peers",
            "peers",
            measure_or_foresee,
            text_of,
            tables_of,
            _draw,
            subject={"layer": asdict(SIZES[device])},
            form={"cases": [ROW_FORM | PEER_FORM]},
            extra={"limit_seconds": most},
        )
        return bench.run(plan(lengths, systems, in_batch), options, asked)


def plan(lengths: Sequence[int], systems: Sequence[str] | None, tokens: int) -> list[PeerCell]:
    """All cells, part after part, lengths of one system and pass in increasing order.

    Args:
        lengths: N, increasing.
        systems: Names; none = all, and the frame that blocks are compared with.
        tokens: B·N of the second part; lengths above it and those with one sample are left out.
    """
    names = systems or [FRAME, *peers.available()]
    ordered = [name for name in names if name == FRAME] + in_order(names)
    alone = [(ALONE, 1, n) for n in lengths]
    filled = [(FILLED, tokens // n, n) for n in lengths if tokens // n > 1]
    # The part that the docs use comes first, in case the run is interrupted.
    return [
        PeerCell(part, name, passes, batch, n)
        for shapes in (alone, filled)
        for name in ordered
        for passes in PASSES
        for part, batch, n in shapes
    ]


@contextmanager
def _measurer(device: str, arguments: tuple[Any, ...]) -> Iterator[Callable[[PeerCell], Row]]:
    """What measures a cell: on a CPU this process, on a GPU a separate one that may crash."""
    if device == "cpu":
        yield lambda cell: measure_cell(cell, *arguments)
        return
    with Worker(measure_cell, arguments) as worker:
        yield worker


def _draw(results: dict[str, Any], stem: str) -> list[Path]:
    fields = {"milliseconds": "time", "peak_bytes": "memory"}
    return [
        path
        for field, end in fields.items()
        for path in draw_peers(results, Path(f"{stem}-{end}.svg"), field)
    ]
