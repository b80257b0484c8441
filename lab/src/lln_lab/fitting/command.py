"""``lln fit``: fits the constants, writes them, draws the figures, reports how good they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from lln.checks.printing import written
from lln.errors import InvalidInputError
from lln.files import check_folder, write_atomically
from lln.integrations.progress import progress_bar
from lln_lab.bench.terminal_tables import show_table
from lln_lab.compact import compact_json
from lln_lab.fitting.fit import Constants, FitConfig, fit_constants, scale
from lln_lab.machine import check_device
from lln_lab.new_files import check_file

Echo = Callable[[str], None]
# Draws the constants into a folder, on a device; gives back the files.
Draw = Callable[[Constants, Path, str], Iterable[Path]]

# Values of s at N = 1024 from an independent fit: (criterion, d, p, s). A fit that is not within
# two per cent of them is wrong.
REFERENCE: tuple[tuple[str, int, float, float], ...] = (
    ("variance", 64, 0.25, 1.501),
    ("variance", 64, 1.0, 2.274),
    ("variance", 64, 4.0, 3.799),
    ("variance", 32, 1.0, 2.076),
    ("variance", 128, 1.0, 2.462),
    ("entropy", 64, 0.25, 1.379),
    ("entropy", 64, 1.0, 1.887),
    ("entropy", 64, 4.0, 2.776),
)


def run(
    out: Path,
    figures: Path | None,
    device: str,
    seeds: int,
    quick: bool,
    work: Path,
    *,
    draw: Draw,
    echo: Echo,
) -> None:
    """Fits the constants from scratch and writes them; an interrupted run can be resumed.

    Args:
        out: The data file to write.
        figures: Folder for Figures 5b and 7, or None for no figures.
        device: ``"cpu"`` or ``"cuda"``.
        seeds: Independent repetitions of the full grid.
        quick: A coarse grid and one seed, under a minute on two cores, to try the program.
        work: File of measurements, reused if it exists.
        draw: Draws the figures.
        echo: Receives the report, line by line.

    Raises:
        KeyboardInterrupt: After Ctrl-C; the work file is complete.
    """
    if seeds < 1:
        raise InvalidInputError(f"--seeds must be at least 1, got {seeds}.")
    check_device(device)
    check_file(out, "--out")
    check_file(work, "--work")
    if figures is not None:
        check_folder(figures, "--figures")
    command = f"lln fit --device {device} {'--quick' if quick else f'--seeds {seeds}'}"
    config = FitConfig(seeds=seeds, device=device, work=work, command=command)
    with progress_bar() as bar:
        task = bar.add_task("starting")
        try:
            constants = fit_constants(
                config.quick() if quick else config,
                lambda done, total, text: bar.update(
                    task, completed=done, total=total, description=text
                ),
            )
        except KeyboardInterrupt:
            echo(f"Stopped; the same command goes on with the measurements in {work}.")
            raise
    write_atomically(out, compact_json(constants))
    report(constants, echo)
    echo(f"wrote {out}")
    if figures is not None:
        for path in draw(constants, figures, device):
            echo(f"wrote {path}")


def report(constants: Constants, echo: Echo) -> None:
    """Two small tables: s at the reference points, and the validation on fresh seeds."""
    criteria, record = constants["criteria"], constants["fit"]
    lines = []
    for name, d, p, expected in REFERENCE:
        found = scale(criteria[name], torch.tensor(p, dtype=torch.float64), d, 1024).item()
        difference = f"{written(100 * (found / expected - 1), '+.2f')} %"
        lines.append([name, str(d), f"{p:g}", f"{found:.3f}", f"{expected:.3f}", difference])
    heads = ["criterion", "d", "p", "fitted", "reference", "difference"]
    show_table(heads, lines, "s at N = 1024")
    refit, paper = record["paper_refit"], criteria["paper"]
    echo(
        f"The paper's a and b, fitted again: {refit['a']:.4f}, {refit['b']:.4f} "
        f"(published: {paper['a']:.4f}, {paper['b']:.4f})."
    )
    fields = {
        "variance, mean": "variance_mean",
        "max": "variance_max",
        "entropy, mean": "entropy_mean",
        "max ": "entropy_max",
    }
    lines = [
        [name, *(f"{row[field]:.3f}" for field in fields.values())]
        for name, row in record["validation"]["criteria"].items()
    ]
    title = "Errors on fresh seeds: variance of log P (relative), entropy (bits)"
    show_table(["criterion", *fields], lines, title)
