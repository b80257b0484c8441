"""What a table or a figure has to say about itself so that it can be run.

One small file per table or figure holds an `Experiment`; the `catalogue` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lln_lab.experiments.answering import accuracy
from lln_lab.experiments.hosts import Sizes
from lln_lab.experiments.tasks.cats_dogs import PictureTask
from lln_lab.experiments.tasks.task import Task
from lln_lab.experiments.training import Recipe

SCALES = ("smoke", "small", "full")


class Column(NamedTuple):
    """One column of a table.

    Attributes:
        task: Which.
        measure: The entry of its results.
        title: For readers.
    """

    task: str
    measure: str
    title: str

    @property
    def is_loss(self) -> bool:
        """Whether it is in nats, and less is better."""
        return self.measure == "loss"


@dataclass(frozen=True)
class Plan:
    """How one task is run at one scale.

    Attributes:
        sizes: Of the host.
        recipe: Of the training.
        load: Makes the task; takes the folder of real data, which may be None.
        note: What differs from the paper, or nothing.
        starts_from: The task whose trained encoder this one starts from; it runs first.
        score: Measures of answers and right answers.
        measures: What the table shows, in its order; nothing = the experiment's.
        observed: How often the attention is measured on the way, where instruments know it; it does
            not change what is trained.
    """

    sizes: Sizes
    recipe: Recipe
    load: Callable[[Path | None], Task | PictureTask]
    note: str = ""
    starts_from: str | None = None
    score: Callable[[np.ndarray, np.ndarray], dict[str, float]] = accuracy
    measures: tuple[str, ...] = ()
    observed: int = 0


@dataclass(frozen=True)
class Experiment:
    """A table or a figure.

    Attributes:
        name: For the command line.
        title: One line for readers.
        plans: By scale and task.
        methods: What runs unless others are asked for.
        seeds: Likewise.
        needs_data: Which tasks need the folder of real data.
        measure: The entry of the results that its table shows, unless a plan names others; the
            loss is in nats and less of it is better, everything else is a share.
    """

    name: str
    title: str
    plans: dict[str, dict[str, Plan]]
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    needs_data: frozenset[str] = frozenset()
    measure: str = "accuracy"

    def config(self, scale: str, task: str, method: str) -> dict[str, Any]:
        """Everything that decides a cell's result besides its seed."""
        plan = self.plans[scale][task]
        found = {"method": method, "sizes": asdict(plan.sizes), "recipe": asdict(plan.recipe)}
        if plan.starts_from is not None:
            found["starts_from"] = self.config(scale, plan.starts_from, method)
        return found

    def columns(self, scale: str) -> list[Column]:
        """What its table shows, in the order of the plans."""
        found = []
        for task, plan in self.plans[scale].items():
            first, *others = plan.measures or (self.measure,)
            found.append(Column(task, first, task))
            found += [Column(task, one, f"{task}, {one.upper()}") for one in others]
        return found
