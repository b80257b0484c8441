"""The paper's tables and figures, one command each.

    python -m lln_lab.experiments list
    python -m lln_lab.experiments run lra --scale smoke
    python -m lln_lab.experiments run lra --task listops --method softmax lln lln_keys --seed 0 1 2
    python -m lln_lab.experiments time lra                      # ms and MiB of a training step
    python -m lln_lab.experiments status lra
    python -m lln_lab.experiments report lra

Every combination of task, method and seed is one cell with one JSON result. Finished cells are
skipped, stopped ones go on where they were. Real data comes from --data or LLN_DATA; `copy` fills
that folder.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import textwrap
from pathlib import Path

from lln.errors import InvalidInputError, LLNError
from lln_lab.experiments import table2
from lln_lab.experiments.catalogue import EXPERIMENTS
from lln_lab.experiments.cells import Cell, check_publishable, is_finished, read_all
from lln_lab.experiments.cost import cost_table, measure
from lln_lab.experiments.experiment import SCALES, Experiment
from lln_lab.experiments.methods import Method
from lln_lab.experiments.prepared import prepared_task
from lln_lab.experiments.report_page import markdown, write_report
from lln_lab.experiments.runner import cells_of, run
from lln_lab.experiments.side_by_side import Job, run_side_by_side
from lln_lab.experiments.tasks.copies import SOURCES, copy
from lln_lab.experiments.training import processes


def main(words: list[str] | None = None) -> int:
    """Parse and run one command; returns the exit status."""
    options = _parser().parse_args(words)
    try:
        return options.function(options)
    except BrokenPipeError:
        # Whoever reads, such as head, has seen enough.
        sys.stdout = None
        return 0
    except LLNError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def list_all(options: argparse.Namespace) -> int:
    """Print every experiment with its tasks."""
    for experiment in EXPERIMENTS.values():
        print(f"{experiment.name:11} {experiment.title}")
        for task in experiment.plans["small"]:
            data = " (needs --data)" if task in experiment.needs_data else ""
            print(f"{'':12} {task}{data}")
        more = [task for task in experiment.plans["full"] if task not in experiment.plans["small"]]
        if more:
            print(_wrapped(f"with --scale full also {' '.join(more)}"))
        print(_wrapped(f"methods: {' '.join(experiment.methods)}"))
    print(f"{table2.NAME:11} {table2.TITLE} (by lln bench roberta)")
    return 0


def _wrapped(text: str) -> str:
    """A long line in short ones, below the tasks; a method stays in one piece, to be copied."""
    margin = 13 * " "
    return textwrap.fill(
        text,
        100,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def run_cells(options: argparse.Namespace) -> int:
    """Run the cells that are not finished."""
    check_publishable(options.out)
    if options.name == table2.NAME:
        return table2.run_table2(options.scale, options.out)
    experiment = EXPERIMENTS[options.name]
    cells = _cells(experiment, options)
    command = shlex.join(["python", "-m", "lln_lab.experiments", "run", *_without_folders(options)])
    if options.jobs > 1:
        return run_many(experiment, cells, options)
    count = run(
        experiment, cells, data=options.data, out=options.out, work=options.work, command=command,
        compiled=options.compile,
    )  # fmt: skip
    if processes()[0] == 0:
        print(f"{count} cells run, {len(cells) - count} were finished before.")
    return 0


def time_steps(options: argparse.Namespace) -> int:
    """Measure a training step of every method, one at a time."""
    check_publishable(options.out)
    experiment = EXPERIMENTS[options.name]
    cells = _cells(experiment, options)
    words = ["python", "-m", "lln_lab.experiments", "time", *_without_folders(options)]
    count = measure(
        experiment, cells, data=options.data, out=options.out, work=options.work,
        command=shlex.join(words),
    )  # fmt: skip
    print(f"{count} measured.")
    print(cost_table(experiment, options.scale, options.out))
    return 0


def run_many(experiment: Experiment, cells: list[Cell], options: argparse.Namespace) -> int:
    """Run every unfinished cell in a process of its own; what others start from comes first."""
    plans = experiment.plans[options.scale]
    stages: list[list[Job]] = [[], []]
    tasks: dict[str, None] = {}
    for cell in cells:
        if is_finished(cell, experiment.config(cell.scale, cell.task, cell.method), options.out):
            continue
        words = [sys.executable, "-m", "lln_lab.experiments", "run", cell.experiment]
        words += ["--scale", cell.scale, "--task", cell.task, "--method", cell.method]
        words += ["--seed", str(cell.seed), "--out", str(options.out), "--work", str(options.work)]
        words += ["--data", str(options.data)] if options.data else []
        words += ["--compile"] if options.compile else []
        log = cell.path(options.work / "logs").with_suffix(".log")
        stages[plans[cell.task].starts_from is not None].append(Job(cell.title, words, log))
        tasks[cell.task] = None
    for task in tasks:
        # Once, not in every process.
        print(f"preparing {task}", flush=True)
        prepared_task(experiment, options.scale, task, options.data, options.work)
    failed = [
        line for jobs in stages for line in run_side_by_side(jobs, options.jobs, options.minutes)
    ]
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


def copy_sets(options: argparse.Namespace) -> int:
    """Write real sets into the data folder."""
    if options.data is None:
        raise InvalidInputError("the folder to write to is not given; pass --data FOLDER.")
    for name in options.names:
        for path in copy(name, options.data, download=options.download):
            print(f"wrote {path}")
    return 0


def status(options: argparse.Namespace) -> int:
    """Print how much of every task is finished."""
    for experiment in _chosen(options):
        found = {tuple(sorted(one["cell"].items())) for one in _finished(experiment, options)}
        for task in experiment.plans[options.scale]:
            done = [cell for cell in found if dict(cell)["task"] == task]
            wanted = len(experiment.methods) * len(experiment.seeds)
            print(f"{experiment.name:11} {options.scale:6} {task:13} {len(done)} of {wanted} cells")
    return 0


def report(options: argparse.Namespace) -> int:
    """Print the tables of what is there, and write them with the curves as a page if asked."""
    texts = []
    if options.name in (None, table2.NAME):
        texts.append(table2.report_table2(options.scale, options.out))
    for experiment in _chosen(options):
        if found := _finished(experiment, options):
            texts.append(markdown(experiment, options.scale, found))
        texts.append(cost_table(experiment, options.scale, options.out))
    print("\n\n".join(text for text in texts if text) or "Nothing was run yet.")
    if options.page:
        write_report(_chosen(options), options.scale, options.out, options.page)
        print(f"The page: {options.page}")
    return 0


def _finished(experiment: Experiment, options: argparse.Namespace) -> list[dict]:
    return read_all(options.out, experiment.name, options.scale)


def _chosen(options: argparse.Namespace) -> list[Experiment]:
    names = [options.name] if options.name else list(EXPERIMENTS)
    return [EXPERIMENTS[name] for name in names if name != table2.NAME]


def _cells(experiment: Experiment, options: argparse.Namespace) -> list[Cell]:
    plans = experiment.plans[options.scale]
    unknown = [task for task in options.task or () if task not in plans]
    if unknown:
        raise InvalidInputError(
            f"{experiment.name} has no task {unknown[0]!r}; it has {', '.join(plans)}."
        )
    methods = options.method or list(experiment.methods)
    for method in methods:
        Method.parse(method)
    seeds = options.seed if options.seed is not None else list(experiment.seeds)
    return cells_of(experiment, options.scale, options.task or list(plans), methods, seeds)


def _without_folders(options: argparse.Namespace) -> list[str]:
    """The words to repeat a run, without folders of this machine."""
    words = [options.name, "--scale", options.scale]
    for flag, values in (("--task", options.task), ("--method", options.method)):
        words += [flag, *values] if values else []
    words += ["--compile"] if getattr(options, "compile", False) else []
    return words + (["--seed", *map(str, options.seed)] if options.seed is not None else [])


def _parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").strip().splitlines()
    parser = argparse.ArgumentParser(
        prog="python -m lln_lab.experiments",
        description="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("list", help="what there is to run")
    one.set_defaults(function=list_all)
    data = os.environ.get("LLN_DATA")
    for name, text in (
        ("run", "run what is not finished"),
        ("time", "time and memory of a training step, one method at a time"),
    ):
        one = commands.add_parser(name, help=text)
        known = [*EXPERIMENTS, *([table2.NAME] if name == "run" else [])]
        one.add_argument("name", choices=known)
        one.add_argument("--task", nargs="+", help="default: all")
        one.add_argument("--method", nargs="+", help="default: those that `list` names")
        one.add_argument("--data", type=Path, default=data and Path(data), help="or LLN_DATA")
        one.add_argument("--work", type=Path, default=Path("lab/runs"), help="checkpoints")
    one.set_defaults(function=time_steps, seed=None)
    one = commands.choices["run"]
    one.add_argument("--seed", nargs="+", type=int, help="default: 0 1 2")
    one.add_argument("--jobs", type=int, default=1, help="cells at a time, each in its process")
    one.add_argument("--minutes", type=float, help="with --jobs: begin none that would end later")
    one.add_argument("--compile", action="store_true", help="faster steps after a minute's wait")
    one.set_defaults(function=run_cells)
    one = commands.add_parser("copy", help="put a real set into the data folder (by `datasets`)")
    one.add_argument("names", nargs="+", metavar="SET", help=", ".join(SOURCES))
    one.add_argument("--data", type=Path, default=data and Path(data), help="or LLN_DATA")
    one.add_argument("--download", action="store_true", help="the network may be used")
    one.set_defaults(function=copy_sets)
    for name, function, text in (
        ("status", status, "how much is finished"),
        ("report", report, "print the tables of what is there"),
    ):
        one = commands.add_parser(name, help=text)
        known = [*EXPERIMENTS, *([table2.NAME] if name == "report" else [])]
        one.add_argument("name", nargs="?", choices=known, help="default: all")
        one.set_defaults(function=function)
    commands.choices["report"].add_argument("--page", type=Path, help="an .html file to write")
    for name in ("run", "time", "status", "report"):
        one = commands.choices[name]
        one.add_argument("--scale", choices=SCALES, default="small", help="default: small")
        one.add_argument("--out", type=Path, default=Path("lab/results/experiments/cells"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
