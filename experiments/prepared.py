"""Tasks that are made or read once and then kept.

Drawing the pictures of Pathfinder and learning a tokenizer take minutes, and every process that
trains a cell needs them. What is kept is made again when the code that makes it or the data change.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import experiments.tasks
from experiments.experiment import Experiment
from experiments.tasks.cats_dogs import PictureTask
from experiments.tasks.task import Task
from lln.files import replacing


def prepared_task(
    experiment: Experiment, scale: str, task: str, data: Path | None, work: Path
) -> Task | PictureTask:
    """A task, from the folder of kept ones if it is there.

    Args:
        experiment: Which.
        scale: One of `experiments.experiment.SCALES`.
        task: One of its tasks.
        data: The folder of real data, which may be None.
        work: The folder of unfinished work; kept tasks are pickles, so it must be the user's own.
    """
    load = experiment.plans[scale][task].load
    digest = _digest(load, data if task in experiment.needs_data else None)
    path = work / "tasks" / f"{experiment.name}.{scale}.{task}.{digest}.pickle"
    if path.exists():
        return pickle.loads(path.read_bytes())
    found = load(data)
    for old in path.parent.glob(f"{experiment.name}.{scale}.{task}.*.pickle"):
        old.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        pickle.dump(found, file)
    return found


def _digest(load: Callable[..., Any], data: Path | None) -> str:
    """Of the code that makes a task, and of the names and sizes of the data."""
    sources = sorted(Path(experiments.tasks.__path__[0]).glob("*.py"))
    own = inspect.getsourcefile(getattr(load, "func", load))
    state = hashlib.sha256()
    for path in [*sources, *([Path(own)] if own else [])]:
        state.update(path.read_bytes())
    for path in sorted(data.rglob("*")) if data is not None else ():
        if path.is_file():
            state.update(f"{path.relative_to(data).as_posix()} {path.stat().st_size}\n".encode())
    return state.hexdigest()[:16]
