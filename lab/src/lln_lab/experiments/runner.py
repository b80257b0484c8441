"""Runs cells one after another: finished ones are skipped, stopped ones go on.

A task is loaded once for all its cells.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lln.errors import InvalidInputError
from lln.files import replacing
from lln.integrations.progress import progress_bar
from lln_lab.bench.environment import describe
from lln_lab.experiments.answering import answers
from lln_lab.experiments.cells import Cell, is_finished, write
from lln_lab.experiments.choosing import Chooser
from lln_lab.experiments.experiment import Experiment
from lln_lab.experiments.hosts import started_host
from lln_lab.experiments.methods import Method
from lln_lab.experiments.observing import Observer, can_be_observed
from lln_lab.experiments.prepared import prepared_task
from lln_lab.experiments.tasks.task import Task
from lln_lab.experiments.training import processes, train
from lln_lab.saved_data import read_saved


def cells_of(
    experiment: Experiment, scale: str, tasks: list[str], methods: list[str], seeds: list[int]
) -> list[Cell]:
    """Task by task and seed by seed, so that time that runs out leaves whole comparisons."""
    return [
        Cell(experiment.name, scale, task, method, seed)
        for task in tasks
        for seed in seeds
        for method in methods
    ]


def run(
    experiment: Experiment,
    cells: list[Cell],
    *,
    data: Path | None,
    out: Path,
    work: Path,
    command: str,
    compiled: bool = False,
    echo: Callable[[str], object] = print,
) -> int:
    """Run what is not finished; returns how many cells were run.

    Args:
        experiment: Which.
        cells: Of it.
        data: The folder of real data.
        out: Where results are kept.
        work: Where checkpoints are kept while a cell runs.
        command: What to type to repeat this.
        compiled: As in `lln_lab.experiments.training.train`.
        echo: Takes a line for the terminal after every cell.
    """
    waiting = [cell for cell in cells if not is_finished(cell, _config(experiment, cell), out)]
    steps = sum(_plan(experiment, cell).recipe.steps for cell in waiting)
    loaded: tuple[str, Task] | None = None
    with progress_bar(time_left=True) as bar:
        line = bar.add_task("", total=max(steps, 1))
        done = 0
        for cell in waiting:
            plan = _plan(experiment, cell)
            if loaded is None or loaded[0] != cell.task:
                bar.update(line, description=f"loading {cell.task}")
                loaded = (cell.task, prepared_task(experiment, cell.scale, cell.task, data, work))
            bar.update(line, description=cell.title)

            def tell(step: int, before: int = done) -> None:
                bar.update(line, completed=before + step)

            result = run_cell(experiment, cell, loaded[1], work, tell, compiled)
            result["setup"] = describe("cuda" if torch.cuda.is_available() else "cpu", command)
            if processes()[0] == 0:
                write(cell, _config(experiment, cell), result, out)
                # Only now: a run that is stopped before has its checkpoints.
                shutil.rmtree(checkpoints(cell, work), ignore_errors=True)
                shown = result[experiment.measure]
                echo(f"{cell.title}: {experiment.measure} {shown:.4f}, {result['seconds']:.0f} s")
            done += plan.recipe.steps
            bar.update(line, completed=done)
    return len(waiting)


def run_cell(
    experiment: Experiment,
    cell: Cell,
    task: Task,
    work: Path,
    tell: Callable[[int], object] = lambda step: None,
    compiled: bool = False,
) -> dict[str, Any]:
    """Train and test one cell."""
    plan = _plan(experiment, cell)
    model: Any = started_host(Method.parse(cell.method), plan.sizes, task, cell.seed)
    if plan.starts_from is not None:
        path = weights_path(replace(cell, task=plan.starts_from), work)
        if not path.exists():
            raise InvalidInputError(
                f"{cell.title} starts from the encoder that {plan.starts_from} trains, and {path} "
                f"is not there; run --task {plan.starts_from} with the same --work (if its result "
                "is kept, remove that first)."
            )
        what, fix = "the weights of an encoder", f"remove it, and run --task {plan.starts_from}"
        model.encoder.load_state_dict(read_saved(path, dict, what, fix))
    folder = checkpoints(cell, work)
    recipe, watchers = plan.recipe, []
    if plan.observed and can_be_observed(Method.parse(cell.method)):
        watchers.append(Observer(task.valid, recipe.steps // plan.observed))
    if recipe.choices:
        every = recipe.steps // recipe.choices
        watchers.append(Chooser(task.valid, every, recipe.batch, recipe.precision, folder / "best"))
    trained = train(model, task.train, recipe, folder, cell.seed, tell, watchers, compiled)
    given, right, loss = answers(model, task.test, recipe.batch, recipe.precision)
    if any(other.starts_from == cell.task for other in experiment.plans[cell.scale].values()):
        path = weights_path(cell, work)
        if processes()[0] == 0:
            with replacing(path) as file:
                torch.save(model.encoder.state_dict(), file)
    if dist.is_initialized():
        # Nobody removes what another process still reads.
        dist.barrier()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    measured = plan.score(given, right) | {"loss": loss, "questions": len(right)}
    return measured | {"parameters": parameters} | trained


def checkpoints(cell: Cell, work: Path) -> Path:
    """The folder that a cell is resumed from."""
    return cell.path(work).with_suffix("")


def weights_path(cell: Cell, work: Path) -> Path:
    """Where a cell leaves its encoder for those that start from it."""
    return cell.path(work).with_suffix(".pt")


def _plan(experiment: Experiment, cell: Cell) -> Any:
    return experiment.plans[cell.scale][cell.task]


def _config(experiment: Experiment, cell: Cell) -> dict[str, Any]:
    return experiment.config(cell.scale, cell.task, cell.method)
