"""Where the diagonal cannot see: recall and a needle, with everything far away.

Bidirectional encoders, every question at least a quarter of the sequence from its answer and far
outside its block. Softmax has to solve a length for it to count. Learning switches on suddenly, so
there are five seeds. Examples are as good as never seen twice: with 20,000 of them softmax learned
those by heart instead (recall at 512 tokens, 3,000 steps: loss 1.9 in training, 2.4 in the test).
"""

from __future__ import annotations

from experiments.experiment import Experiment, Plan
from experiments.hosts import Sizes
from experiments.tasks import recall
from experiments.training import Recipe

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS_PER_STEP = 32_768
# More would fill the disk, and are not learned by heart either.
MOST_EXAMPLES = 200_000


def _sizes(length: int) -> Sizes:
    return Sizes(layers=2, width=128, heads=2, feed_forward=256, length=length)


def _recipe(length: int, steps: int) -> Recipe:
    batch = max(TOKENS_PER_STEP // length, 2)
    return Recipe(steps, batch, 2e-3, precision="bfloat16")


def _plans(steps: int, lengths: tuple[int, ...], test: int) -> dict[str, Plan]:
    plans = {}
    for length in lengths:
        train = min(steps * _recipe(length, steps).batch, MOST_EXAMPLES)
        plans[f"recall-{length}"] = Plan(
            _sizes(length),
            _recipe(length, steps),
            lambda data, length=length, train=train: recall.associative(
                train, 64, test, length=length
            ),
        )
        plans[f"needle-{length}"] = Plan(
            _sizes(length),
            _recipe(length, steps),
            lambda data, length=length, train=train: recall.needle(train, 64, test, length=length),
        )
    return plans


SMOKE = Recipe(4, 4, 1e-3, saves=1, points=4)

EXPERIMENT = Experiment(
    name="distance",
    title="Where the diagonal cannot see: recall and needle over distance",
    plans={
        "smoke": {
            name: Plan(plan.sizes, SMOKE, plan.load) for name, plan in _plans(1, (128,), 8).items()
        },
        "small": _plans(3_000, LENGTHS[:3], 512),
        "full": _plans(10_000, LENGTHS, 512),
    },
    methods=(
        "softmax",
        "diag",
        "lln",
        "lln_diag",
        "lln_keys",
        "lln_keys@select=query,offset=-1e4",
        "elu",
        "hedgehog",
    ),
    seeds=(0, 1, 2, 3, 4),
)
