"""Tables 4 and 5: Long Range Arena.

The model is that of the paper's harness (Skyformer's): 2 layers, 64 wide, 2 heads, mean of the
tokens. Its defects are not kept: ListOps has its brackets, black pixels are not padding, nothing is
chosen on the test part, and the mean is over real tokens. Text, Image and Retrieval need the data
folder; Retrieval is made of Wikipedia articles, because AAN cannot be had. Smoke uses stand-ins.
"""

from __future__ import annotations

import os

from lln_lab.experiments.experiment import Experiment, Plan
from lln_lab.experiments.hosts import Sizes
from lln_lab.experiments.methods import COMPARED
from lln_lab.experiments.tasks import listops, pathfinder, stand_in
from lln_lab.experiments.tasks.lra_image import lra_image
from lln_lab.experiments.tasks.lra_text import lra_text
from lln_lab.experiments.tasks.retrieval import retrieval
from lln_lab.experiments.training import Recipe

# Learning rate, batch and warm-up steps of the harness, by task, out of its 50,000 steps.
PUBLISHED = {
    "listops": (1e-4, 32, 1000),
    "pathfinder": (2e-4, 128, 312),
    "text": (1e-4, 32, 80),
    "image": (1e-4, 256, 175),
    "retrieval": (2e-4, 16, 800),
}
# How often an article of Retrieval is cut, each time elsewhere: 2,000 steps see a pair once.
ROUNDS = 4


def _sizes(length: int) -> Sizes:
    return Sizes(layers=2, width=64, heads=2, feed_forward=128, length=length)


def _full(task: str) -> Recipe:
    rate, batch, warm_up = PUBLISHED[task]
    return Recipe(50_000, batch, rate, warm_up / 50_000, precision="bfloat16", saves=20, choices=50)


def _small(batch: int) -> Recipe:
    return Recipe(2_000, batch, 1e-3, precision="bfloat16", choices=8)


def _cores() -> int:
    return os.cpu_count() or 1


SMOKE = Recipe(4, 4, 1e-3, saves=1, points=4, choices=2)

EXPERIMENT = Experiment(
    name="lra",
    title="Tables 4 and 5: Long Range Arena",
    plans={
        "smoke": {
            "listops": Plan(
                _sizes(64), SMOKE, lambda data: listops.load(16, 8, 8, length=64, least=10, most=64)
            ),
            "pathfinder": Plan(_sizes(1024), SMOKE, lambda data: pathfinder.load(16, 8, 8)),
            "text": Plan(_sizes(128), SMOKE, lambda data: stand_in.reversed_text(16, 8, 128)),
            "image": Plan(_sizes(1024), SMOKE, lambda data: stand_in.shape_pixels(16, 8)),
            "retrieval": Plan(_sizes(128), SMOKE, lambda data: stand_in.source_halves(16, 8, 128)),
        },
        "small": {
            "listops": Plan(
                _sizes(1024),
                _small(32),
                lambda data: listops.load(20_000, 1_000, 2_000, length=1024, least=200, most=1024),
                "trees of 200 to 1,024 tokens",
            ),
            "pathfinder": Plan(
                _sizes(1024),
                _small(64),
                lambda data: pathfinder.load(20_000, 1_000, 2_000, workers=_cores()),
            ),
            "text": Plan(_sizes(2048), _small(16), lambda data: lra_text(data, 2048, 2000)),
            "image": Plan(_sizes(1024), _small(64), lra_image),
            "retrieval": Plan(
                _sizes(2048), _small(16), lambda data: retrieval(data, 2048, 2000, ROUNDS)
            ),
        },
        "full": {
            "listops": Plan(_sizes(2048), _full("listops"), lambda data: listops.load()),
            # For comparison with published tables; nobody can solve it.
            "listops-compat": Plan(
                _sizes(2048), _full("listops"), lambda data: listops.load(compat=True)
            ),
            "pathfinder": Plan(
                _sizes(1024), _full("pathfinder"), lambda data: pathfinder.load(workers=_cores())
            ),
            "text": Plan(_sizes(4096), _full("text"), lra_text),
            "image": Plan(_sizes(1024), _full("image"), lra_image),
            "retrieval": Plan(
                _sizes(4096), _full("retrieval"), lambda data: retrieval(data, rounds=ROUNDS)
            ),
        },
    },
    methods=COMPARED,
    needs_data=frozenset({"text", "image", "retrieval"}),
)
