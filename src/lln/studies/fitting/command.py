"""``lln fit``: fits the constants, writes them, draws the figures, says how good they are."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lln.errors import BackendUnavailableError, InvalidInputError
from lln.files import check_file, check_folder, write_atomically
from lln.printing import written
from lln.studies.fitting.fit import Constants, FitConfig, Progress, fit_constants, scale

Echo = Callable[[str], None]

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
    echo: Echo,
) -> None:
    """Fits the constants from scratch and writes them; an interrupted run goes on where it was.

    Args:
        out: The data file to write.
        figures: Folder for Figures 5b and 7, or None for no figures.
        device: ``"cpu"`` or ``"cuda"``.
        seeds: Independent repetitions of the full grid.
        quick: A coarse grid and one seed, under a minute on two cores: a trial of the program.
        work: File of measurements, reused if it exists.
        echo: Receives the report, line by line.
    """
    if seeds < 1:
        raise InvalidInputError(f"--seeds must be at least 1, got {seeds}.")
    if device not in ("cpu", "cuda"):
        raise InvalidInputError(f"--device must be cpu or cuda, got {device!r}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError("--device cuda needs a CUDA device; use --device cpu.")
    check_file(out, "--out")
    check_file(work, "--work")
    if figures is not None:
        check_folder(figures, "--figures")
    command = f"lln fit --device {device} {'--quick' if quick else f'--seeds {seeds}'}"
    config = FitConfig(seeds=seeds, device=device, work=work, command=command)
    with _progress_bar() as progress:
        constants = fit_constants(config.quick() if quick else config, progress)
    write_atomically(out, dump(constants))
    for line in report(constants):
        echo(line)
    echo(f"wrote {out}")
    if figures is not None:
        _draw(constants, figures, device, echo)


def report(constants: Constants) -> list[str]:
    """Two small tables: s at the reference points, and the validation on fresh seeds."""
    criteria, record = constants["criteria"], constants["fit"]
    lines = ["s at N = 1024       d      p    fitted   reference   difference"]
    for name, d, p, expected in REFERENCE:
        found = scale(criteria[name], torch.tensor(p, dtype=torch.float64), d, 1024).item()
        difference = f"{written(100 * (found / expected - 1), '+.2f')} %"
        lines.append(f"{name:<14}{d:>7}{p:>7g}{found:>10.3f}{expected:>12.3f}{difference:>13}")
    refit, paper = record["paper_refit"], criteria["paper"]
    lines += [
        f"paper's a, b again: {refit['a']:.4f}, {refit['b']:.4f}"
        f" (published: {paper['a']:.4f}, {paper['b']:.4f})",
        "",
        "fresh seeds     variance of log P, relative    entropy, bits",
        "                    mean       max            mean       max",
    ]
    for name, row in record["validation"]["criteria"].items():
        lines.append(
            f"{name:<14}{row['variance_mean']:>10.3f}{row['variance_max']:>10.3f}"
            f"{row['entropy_mean']:>16.3f}{row['entropy_max']:>10.3f}"
        )
    return lines


def dump(constants: Constants) -> str:
    """The data file's text: JSON, with every list of numbers on one line."""

    def one_line(found: re.Match[str]) -> str:
        return f"[{' '.join(found[0][1:-1].split())}]"

    return re.sub(r"\[[^\[\]{}]*\]", one_line, json.dumps(constants, indent=2)) + "\n"


def _draw(constants: Constants, folder: Path, device: str, echo: Echo) -> None:
    """Draws the figures; without matplotlib, which is an extra, says how to get it."""
    from lln.studies.figures.matched_moments import draw_figures

    try:
        for path in draw_figures(constants, folder, device):
            echo(f"wrote {path}")
    except BackendUnavailableError:
        # The constants are written by now, and the next run finds every measurement made.
        echo("no figures: they need matplotlib (pip install 'lln[instruments]'); then run again")


@contextmanager
def _progress_bar() -> Iterator[Progress | None]:
    """A progress bar on the standard error; None where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
    except ImportError:
        yield None
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting")

        def update(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text)

        yield update


def main(arguments: list[str] | None = None) -> None:
    """Runs the fit without the command line program."""

    def echo(line: str) -> None:
        sys.stdout.write(f"{line}\n")

    parser = argparse.ArgumentParser(prog="lln fit", description="Fits the constants from scratch.")
    parser.add_argument("--out", type=Path, default=Path("constants.json"))
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=FitConfig.seeds)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--work", type=Path, default=FitConfig.work)
    options = vars(parser.parse_args(arguments))
    run(**options, echo=echo)


if __name__ == "__main__":
    main()
