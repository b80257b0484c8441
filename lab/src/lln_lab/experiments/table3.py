"""Table 3: a vision transformer on cats and dogs.

12 layers, 128 wide, 8 heads, as in the authors' example, from scratch. Pictures here are 64 × 64
instead of 224 × 224; patches of 4 pixels give 256 tokens. Smoke draws discs and squares.
"""

from __future__ import annotations

from pathlib import Path

from lln_lab.experiments.experiment import Experiment, Plan
from lln_lab.experiments.hosts import Sizes
from lln_lab.experiments.tasks import stand_in
from lln_lab.experiments.tasks.cats_dogs import Pictures, PictureTask, cats_dogs
from lln_lab.experiments.training import Recipe


def _sizes(length: int, layers: int = 12) -> Sizes:
    return Sizes(layers=layers, width=128, heads=8, feed_forward=512, length=length)


def _shapes(data: Path | None) -> PictureTask:
    parts = [Pictures(*stand_in.shapes(16, seed, channels=3)) for seed in range(3)]
    return PictureTask("cats_dogs", "a disc or a square (a stand-in)", 2, *parts)


EXPERIMENT = Experiment(
    name="table3",
    title="Table 3: a vision transformer on cats and dogs",
    plans={
        "smoke": {
            "cats_dogs": Plan(
                _sizes(64, layers=2), Recipe(4, 4, 1e-3, saves=1, points=4, choices=2), _shapes
            )
        },
        "small": {
            "cats_dogs": Plan(
                _sizes(256),
                Recipe(1_500, 64, 5e-4, 0.1, 0.05, precision="bfloat16", choices=10),
                cats_dogs,
                "64 × 64 pixels",
            )
        },
        "full": {
            "cats_dogs": Plan(
                _sizes(1024),
                Recipe(20_000, 64, 5e-4, 0.1, 0.05, precision="bfloat16", saves=20, choices=50),
                cats_dogs,
                "64 × 64 pixels",
            )
        },
    },
    methods=("softmax", "diag", "lln", "lln_diag", "lln_keys", "linformer", "elu", "hedgehog"),
    needs_data=frozenset({"cats_dogs"}),
)
