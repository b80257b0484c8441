"""What a table or a figure has to say about itself so that it can be run.

One small file per table or figure holds an `Experiment`; `experiments.catalogue` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.hosts import Sizes
from experiments.tasks.task import Task
from experiments.training import Recipe

SCALES = ("smoke", "small", "full")


@dataclass(frozen=True)
class Plan:
    """How one task is run at one scale.

    Attributes:
        sizes: Of the host.
        recipe: Of the training.
        load: Makes the task; takes the folder of real data, which may be None.
        note: What differs from the paper, or nothing.
    """

    sizes: Sizes
    recipe: Recipe
    load: Callable[[Path | None], Task]
    note: str = ""


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
        measure: The entry of the results that its table shows.
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
        return {"method": method, "sizes": asdict(plan.sizes), "recipe": asdict(plan.recipe)}
