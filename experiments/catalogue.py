"""Every experiment by its name."""

from __future__ import annotations

from experiments import distance, lra, table1, table3
from experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT for module in (table1, table3, lra, distance)
}
