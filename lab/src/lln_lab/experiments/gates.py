"""Recipes in which softmax learns, and whether it did: the gates of the tables.

    python -m lln_lab.experiments.gates run table3 --data FOLDER
    python -m lln_lab.experiments.gates run listops --method softmax lln_diag --seed 0 1 2
    python -m lln_lab.experiments.gates run pathfinder --scale small --workers 2
    python -m lln_lab.experiments.gates baselines --data FOLDER
    python -m lln_lab.experiments.gates summary

A cell is one training and one JSON file. Finished cells are skipped, stopped ones go on from their
last checkpoint; `summary` compares softmax and the baselines with what `gate_rules` asks for.
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lln.errors import InvalidInputError, LLNError
from lln.files import write_atomically
from lln.integrations.progress import progress_bar
from lln_lab.bench.environment import describe
from lln_lab.compact import compact_json
from lln_lab.experiments import gate_baselines
from lln_lab.experiments.captured import Course, Phase, narrow, train_captured
from lln_lab.experiments.cells import Cell, is_finished, read_all, write
from lln_lab.experiments.compiling import as_written, compile_layers, explained
from lln_lab.experiments.gate_data import Photos, Place, TaskSource, Tests, Words
from lln_lab.experiments.gate_fresh import Paths, Trees
from lln_lab.experiments.gate_hosts import Frame
from lln_lab.experiments.gate_rules import GATES
from lln_lab.experiments.hosts import Sizes, same_start
from lln_lab.experiments.tasks import listops
from lln_lab.experiments.tasks.matched_retrieval import matched_parts
from lln_lab.saved_data import read_saved

NAME = "gates"
OUT = Path("lab/results/experiments/cells")
WORK = Path("lab/runs")
# How often an article of Retrieval is parted, each time elsewhere.
ROUNDS = 2


@dataclass(frozen=True)
class GatedTask:
    """A task with its host and its course.

    Attributes:
        frame: Of the host.
        course: Of the training.
        source: The task.
        settings: Its arguments besides place and batch.
    """

    frame: Frame
    course: Course
    source: type[TaskSource]
    settings: dict[str, Any]

    def config(self, method: str) -> dict[str, Any]:
        """Everything that decides a result besides the seed."""
        own = {"frame": asdict(self.frame), "course": asdict(self.course)}
        return {"method": method, **own, "settings": self.settings}

    def open(self, place: Place) -> TaskSource:
        """The task."""
        return self.source(place, self.course.batch, **self.settings)  # type: ignore[call-arg]


def _sizes(layers: int, width: int, heads: int, length: int) -> Sizes:
    return Sizes(layers, width, heads, 4 * width, length)


def _words(frame: Frame, steps: int, batch: int, vocabulary: int) -> GatedTask:
    settings = {"length": frame.sizes.length, "vocabulary": vocabulary}
    return GatedTask(frame, Course((Phase(steps, 1e-3),), batch), Words, settings)


def _photos(frame: Frame, steps: int, batch: int, small: bool) -> GatedTask:
    course = Course((Phase(steps, 1e-3),), batch, decay=0.05, betas=(0.9, 0.999))
    return GatedTask(frame, course, Photos, {"small": small})


def _trees(frame: Frame, steps: int, batch: int, tested: int) -> GatedTask:
    stages = ((steps // 2, (2, 3, 4)), (steps - steps // 2, (2, 3, 4, 5, 6)))
    settings = {"length": frame.sizes.length, "stages": stages, "tested": tested}
    return GatedTask(frame, Course((Phase(steps, 1e-3),), batch), Trees, settings)


def _paths(frame: Frame, steps: int, batch: int, files: int, patch: int, tested: int) -> GatedTask:
    """A fifth of the steps paints; then short paths, then longer ones."""
    fifth = steps // 5
    stages = (
        (fifth, (3, 6, 9), True),
        (fifth, (3,), False),
        (fifth, (3, 6), False),
        (steps - 3 * fifth, (3, 6, 9), False),
    )
    phases = (Phase(fifth, 1e-3), Phase(steps - fifth, 5e-4))
    settings = {"stages": stages, "files": files, "patch": patch, "tested": tested}
    return GatedTask(frame, Course(phases, batch, betas=(0.9, 0.98)), Paths, settings)


_WORDS, _LONG_WORDS = _sizes(6, 384, 6, 512), _sizes(6, 384, 6, 2048)
_TINY = _sizes(2, 64, 2, 64)
RECIPES: dict[str, dict[str, GatedTask]] = {
    "small": {
        "table1": _words(Frame(_TINY, convolution=True), 200, 16, 2048),
        "table1-rope": _words(Frame(_TINY, rotary=True), 200, 16, 2048),
        "table3": _photos(Frame(_sizes(2, 32, 2, 256)), 100, 16, small=True),
        "listops": _trees(Frame(_sizes(2, 64, 2, 128)), 300, 64, 50),
        "pathfinder": _paths(Frame(_sizes(2, 32, 2, 256)), 150, 24, 1, 2, 60),
    },
    "gpu": {
        "table1": _words(Frame(_WORDS, convolution=True), 4_000, 64, 8192),
        "table1-rope": _words(Frame(_WORDS, rotary=True), 4_000, 64, 8192),
        # As many words per update, in texts four times as long.
        "table1-rope-2048": _words(Frame(_LONG_WORDS, rotary=True), 4_000, 16, 8192),
        "table3": _photos(Frame(_sizes(12, 128, 8, 256)), 6_000, 128, small=False),
        "listops": _trees(Frame(_sizes(6, 128, 4, 256)), 10_000, 256, 1_000),
        "pathfinder": _paths(Frame(_sizes(4, 128, 4, 1024)), 15_000, 96, 40, 1, 2_000),
        "pathfinder-patches": _paths(Frame(_sizes(4, 128, 4, 256)), 15_000, 96, 40, 2, 2_000),
    },
}
# What of them decides whether a table says anything.
GATED = {
    "table1": "table1/mlm",
    "table3": "table3/cats_dogs",
    "pathfinder": "lra/pathfinder",
    "listops": "lra/listops",
    "retrieval": "lra/retrieval",
}


def main(words: list[str] | None = None) -> int:
    """Parse and run one command; returns the exit status."""
    options = _parser().parse_args(words)
    options.command = shlex.join(
        ["python", "-m", "lln_lab.experiments.gates", *(words or sys.argv[1:])]
    )
    try:
        return options.function(options)
    except LLNError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """Train the cells that are not finished."""
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    for name in options.names:
        for seed in options.seed:
            for method in options.method:
                cell = Cell(NAME, options.scale, name, method, seed)
                recipe = _recipe(options.scale, name)
                if is_finished(cell, recipe.config(method), options.out):
                    print(f"{cell.title}: finished before")
                elif not run_cell(cell, recipe, options, until):
                    print(f"{cell.title}: out of time; the same command goes on from here")
                    return 0
    return 0


def run_cell(
    cell: Cell, recipe: GatedTask, options: argparse.Namespace, until: float | None = None
) -> bool:
    """Train, test and keep one cell; whether it was finished in time."""
    place = Place(options.data, options.work, options.workers)
    path = cell.path(options.work).with_suffix(".pt")
    first = 0
    if path.exists():
        first = read_saved(path, {"step": int}, "a checkpoint of a training", "remove it")["step"]
    source = recipe.open(place)
    source.begin(first, recipe.course.steps)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    try:
        source.open(device)
        build = functools.partial(source.host, frame=recipe.frame)
        model = same_start(build, cell.method, cell.seed).to(device)
        if options.compile:
            compile_layers(model)
        valid = source.tests("valid")
        with explained(), progress_bar(time_left=True) as bar:
            line = bar.add_task(cell.title, total=recipe.course.steps)

            def tell(step: int, said: str) -> None:
                bar.update(line, completed=step)
                if said:
                    print(f"{cell.title}: {said}", flush=True)

            trained = train_captured(
                model, source, recipe.course, path, capture=on_gpu and not options.eager,
                look=lambda: measured(model, valid)[0], tell=tell, until=until,
            )  # fmt: skip
        if trained is None:
            return False
        found, right = measured(model, source.tests("test"))
    finally:
        source.close()
    packed = {"right": np.packbits(right).tobytes().hex()} if len(right) <= 20_000 else {}
    result = found | {"questions": len(right), **packed, **trained}
    result["compiled"] = options.compile
    result["parameters"] = sum(weight.numel() for weight in model.parameters())
    result["setup"] = describe(device.type, options.command)
    write(cell, recipe.config(cell.method), result, options.out)
    # Only now: a run that is stopped before has its checkpoint.
    path.unlink(missing_ok=True)
    print(f"{cell.title}: {' '.join(f'{name} {value:.4f}' for name, value in found.items())}")
    return True


@torch.no_grad()
def measured(model: nn.Module, tests: Tests) -> tuple[dict[str, float], np.ndarray]:
    """Loss and accuracy over all, accuracy of every difficulty, and which answers were right."""
    model.eval()
    losses, counts, right, groups = [], [], [], {}
    for group, batches in tests.items():
        own = []
        for batch in batches:
            with narrow(batch["labels"].device), as_written(model):
                output = model(**batch)
            labels = batch["labels"]
            expected = labels.argmax(-1) if labels.is_floating_point() else labels.flatten()
            own.append((output["logits"].argmax(-1) == expected).cpu().numpy())
            losses.append(float(output["loss"]))
            counts.append(len(expected))
        right += own
        if group:
            groups[group] = float(np.concatenate(own).mean())
    every = np.concatenate(right)
    loss = float(np.average(losses, weights=counts))
    return {"loss": loss, "accuracy": float(every.mean()), **groups}, every


def baselines(options: argparse.Namespace) -> int:
    """Answer ListOps and Retrieval without a network."""
    for name in options.names or ("listops", "retrieval"):
        if name == "listops":
            place = Place(None, options.work, 0)
            trees = _recipe(options.scale, name).open(place)
            assert isinstance(trees, Trees)
            depths = trees.stages[-1][1]
            train = listops.fresh_trees(0, depths, 20_000, trees.length)
            answers = gate_baselines.of_trees(train, trees.test_trees("test"))
        else:
            parts = matched_parts(options.data, rounds=ROUNDS)
            answers = gate_baselines.of_pairs(parts["train"], parts["test"])
        for baseline, found in answers.items():
            found["setup"] = describe("cpu", options.command)
            cell = Cell(NAME, options.scale, name, baseline, 0)
            write(cell, {"method": baseline}, found, options.out)
            print(f"{cell.title}: accuracy {found['accuracy']:.4f}")
    return 0


def summary(options: argparse.Namespace) -> int:
    """Write and print which gates are met."""
    found = {}
    for name, rule in GATED.items():
        cells = [one for one in read_all(options.out, NAME, options.scale)
                 if one["cell"]["task"] == name]  # fmt: skip
        if gate := gate_of(rule, cells):
            found[name] = gate
            print(f"{name:11} {gate}")
    write_atomically(options.out.parent / "gates.json", compact_json(found))
    return 0


def gate_of(rule: str, cells: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What a gate needs and what was reached; None where its cells are not there."""
    gate = GATES[rule]
    own = [one for one in cells if one["cell"]["method"] == gate.row]
    base = [one[gate.measure] for one in cells if one["cell"]["method"] == gate.times]
    if not own or bool(gate.times) != bool(base):
        return None
    reached = float(np.mean([one[gate.measure] for one in own]))
    baseline = float(np.mean(base)) if base else 1.0
    met = gate.met(reached, baseline)
    return {
        "measure": f"{gate.measure} of {gate.row}",
        "needed": f"{gate.comparison} {gate.needed * baseline:.4g}"
        + (f" ({gate.needed:g} × {gate.times})" if gate.times else ""),
        "reached": round(reached, 4),
        "seeds": [one["cell"]["seed"] for one in own],
        "of_seeds": [round(one[gate.measure], 4) for one in own],
        "met": met,
        # A table whose softmax row has not learned compares nothing.
        "claims": met,
        "commits": sorted({one["setup"]["commit"] for one in own}),
        "changed": any(one["setup"]["changed"] for one in own),
    }


def _recipe(scale: str, name: str) -> GatedTask:
    recipes = RECIPES[scale]
    if name not in recipes:
        raise InvalidInputError(f"{name!r} is not known at --scale {scale}; there are "
                                f"{', '.join(recipes)}.")  # fmt: skip
    return recipes[name]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lln_lab.experiments.gates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("run", help="train the cells that are not finished")
    one.add_argument("names", nargs="+", metavar="RECIPE", help=", ".join(RECIPES["gpu"]))
    one.add_argument("--method", nargs="+", default=["softmax"], help="default: softmax")
    one.add_argument("--seed", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    one.add_argument("--minutes", type=float, help="stop then, with a checkpoint")
    one.add_argument("--eager", action="store_true", help="call every kernel by itself")
    one.add_argument("--compile", action="store_true", help="faster steps after a minute's wait")
    one.set_defaults(function=run)
    two = commands.add_parser("baselines", help="answers without a network")
    two.add_argument("names", nargs="*", metavar="TASK", help="default: listops retrieval")
    two.set_defaults(function=baselines)
    three = commands.add_parser("summary", help="which gates are met: gates.json")
    three.set_defaults(function=summary)
    data = os.environ.get("LLN_DATA")
    for command in (one, two, three):
        command.add_argument("--scale", choices=RECIPES, default="gpu", help="default: gpu")
        command.add_argument("--out", type=Path, default=OUT)
        command.add_argument("--work", type=Path, default=WORK)
        command.add_argument("--data", type=Path, default=data and Path(data), help="or LLN_DATA")
        command.add_argument("--workers", type=int, default=1, help="that make examples ahead")
    return parser


if __name__ == "__main__":
    sys.exit(main())
