"""Tasks that are made or read once and then kept.

Drawing the pictures of Pathfinder and learning a tokenizer take minutes, and every process that
trains a cell needs them. What is kept is made again when the code that makes it or the data change.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

import lln_lab.experiments.tasks
from lln.checks.reading import first_line, parsed_json
from lln.errors import InvalidInputError
from lln.files import replacing
from lln_lab.experiments.experiment import Experiment
from lln_lab.experiments.tasks.cats_dogs import Pictures, PictureTask
from lln_lab.experiments.tasks.masked_text import FreshlyHidden, TokenIds
from lln_lab.experiments.tasks.recall import RecallTask
from lln_lab.experiments.tasks.retrieval import PairExamples
from lln_lab.experiments.tasks.task import Examples, Task
from lln_lab.saved_data import read_arrays

_TASKS: dict[str, Any] = {kind.__name__: kind for kind in (Task, RecallTask, PictureTask)}
_PARTS: dict[str, Any] = {
    kind.__name__: kind for kind in (Examples, PairExamples, FreshlyHidden, Pictures)
}
# The entry with everything that is no array, as JSON.
_ABOUT = "about"
_SCHEMA = {
    "kind": frozenset(_TASKS),
    "values": dict,
    "parts": {str: {"kind": frozenset(_PARTS), "values": dict}},
}


def prepared_task(
    experiment: Experiment, scale: str, task: str, data: Path | None, work: Path
) -> Task | PictureTask:
    """A task, from the folder of kept ones if it is there.

    Args:
        experiment: Which.
        scale: One of `lln_lab.experiments.experiment.SCALES`.
        task: One of its tasks.
        data: The folder of real data, which may be None.
        work: The folder of unfinished work.
    """
    load = experiment.plans[scale][task].load
    digest = _digest(load, data if task in experiment.needs_data else None)
    path = work / "tasks" / f"{experiment.name}.{scale}.{task}.{digest}.npz"
    if path.exists():
        return _read(path)
    found = load(data)
    for old in path.parent.glob(f"{experiment.name}.{scale}.{task}.*"):
        old.unlink(missing_ok=True)
    with replacing(path) as file:
        np.savez(file, **_arrays_of(found))
    return found


def _arrays_of(task: Task | PictureTask) -> dict[str, np.ndarray]:
    """A task as arrays: those of its parts, and the rest as JSON."""
    arrays: dict[str, np.ndarray] = {}
    about: dict[str, Any] = {"kind": type(task).__name__, "values": {}, "parts": {}}
    for field in fields(task):
        value = getattr(task, field.name)
        if type(value).__name__ not in _PARTS:
            about["values"][field.name] = value
            continue
        part = about["parts"][field.name] = {"kind": type(value).__name__, "values": {}}
        # Every argument of a part is kept under its own name.
        for name in inspect.signature(type(value)).parameters:
            own = getattr(value, name)
            if isinstance(own, np.ndarray):
                arrays[f"{field.name}.{name}"] = own
            else:
                part["values"][name] = _code_of(own) if isinstance(own, TokenIds) else own
    return arrays | {_ABOUT: np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)}


def _code_of(code: TokenIds) -> dict[str, Any]:
    """What a kept part needs of a tokenizer: the ids, not how text becomes them."""
    return {field.name: getattr(code, field.name) for field in fields(TokenIds)}


def _read(path: Path) -> Task | PictureTask:
    fix = "remove it, and it is made again"
    arrays = read_arrays(path, (), fix)
    text = arrays.pop(_ABOUT, np.zeros(0)).tobytes()
    about = parsed_json(text, _SCHEMA, f"{str(path)!r} is not a kept task", fix)
    try:
        parts = {name: _part(name, part, arrays) for name, part in about["parts"].items()}
        return _TASKS[about["kind"]](**about["values"], **parts)
    # What does not fit shows as whatever it leads to.
    except Exception as error:
        raise InvalidInputError(
            f"{str(path)!r} is not a kept task ({first_line(error)}); {fix}."
        ) from error


def _part(name: str, part: dict[str, Any], arrays: dict[str, np.ndarray]) -> Any:
    begin, values = f"{name}.", dict(part["values"])
    if "code" in values:
        code = values["code"]
        values["code"] = TokenIds(**(code | {"plain": tuple(code["plain"])}))
    own = {key.removeprefix(begin): each for key, each in arrays.items() if key.startswith(begin)}
    return _PARTS[part["kind"]](**values, **own)


def _digest(load: Callable[..., Any], data: Path | None) -> str:
    """Of the code that makes a task, and of the names and sizes of the data."""
    sources = sorted(Path(lln_lab.experiments.tasks.__path__[0]).glob("*.py"))
    own = inspect.getsourcefile(getattr(load, "func", load))
    state = hashlib.sha256()
    for path in [*sources, *([Path(own)] if own else [])]:
        state.update(path.read_bytes())
    for path in sorted(data.rglob("*")) if data is not None else ():
        if path.is_file():
            state.update(f"{path.relative_to(data).as_posix()} {path.stat().st_size}\n".encode())
    return state.hexdigest()[:16]
