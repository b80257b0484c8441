"""Every experiment by its name."""

from __future__ import annotations

from experiments import distance, lra, table1, table3
from experiments.ablations import ABLATION, OVER_LENGTH, TEMPERATURE
from experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    one.name: one
    for one in (
        table1.EXPERIMENT,
        table3.EXPERIMENT,
        lra.EXPERIMENT,
        distance.EXPERIMENT,
        TEMPERATURE,
        ABLATION,
        OVER_LENGTH,
    )
}
