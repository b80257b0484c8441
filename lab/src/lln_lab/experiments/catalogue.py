"""Every experiment by its name."""

from __future__ import annotations

from lln_lab.experiments import distance, lra, table1, table3
from lln_lab.experiments.ablations import ABLATION, OVER_LENGTH, TEMPERATURE
from lln_lab.experiments.experiment import Experiment

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
