"""Where the diagonal cannot see: recall and a needle, with everything far away.

Bidirectional encoders, every question at least a quarter of the sequence from its answer and far
outside its block. Softmax has to solve a length for it to count. Learning switches on suddenly, so
there are five seeds. Examples are as good as never seen twice, those of *repeated* at 2,048 tokens
four times: with 20,000 examples of recall softmax learned those by heart instead.

A pair is one token (`recall`, joined). Pairs of two neighbouring tokens were tried first, at 512
tokens and with softmax: learned or sine positions, 2 or 4 layers, 128 or 256 wide, 8 or 16 pairs,
rates of 0.001 and 0.002, with and without a convolution: none left the level of the most frequent
value in 3,000 steps (17 to 21 %). Joined, with a rate of 0.001, it is at 100 % from step 2,100 on;
with 0.002 and all pairs asked for it was not.

At 1,024 tokens softmax does not learn recall in 3,000 steps: one token in 1,024 answers a question.
*repeated* keeps the share of the text that counts, so that only the distance grows; it is
what the scale `small` has beyond 512 tokens.
"""

from __future__ import annotations

from dataclasses import replace

from lln_lab.experiments.experiment import Experiment, Plan
from lln_lab.experiments.hosts import Sizes
from lln_lab.experiments.tasks import recall
from lln_lab.experiments.tasks.repeated_recall import repeated
from lln_lab.experiments.training import Recipe

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS_PER_STEP = 32_768
# More would fill the disk, and are not learned by heart either.
MOST_EXAMPLES = 200_000
# Of 32 values and 31 decoys softmax found the needle with no seed of five; with one question per
# text, with one.
NEEDLE = {"questions": 8, "values": 8, "decoys": 7}
# Texts per step where pairs are repeated. With 16 of 2,048 tokens, or 2 of 16,384, softmax stays at
# 7 %; with 64 of 2,048 it learns as it does at 512.
REPEATED_TEXTS = 64


def _sizes(length: int) -> Sizes:
    return Sizes(layers=2, width=128, heads=2, feed_forward=256, length=length)


def _recipe(length: int, steps: int) -> Recipe:
    batch = max(TOKENS_PER_STEP // length, 2)
    return Recipe(steps, batch, 1e-3, precision="bfloat16")


def _plans(
    steps: int, lengths: tuple[int, ...], repeated_lengths: tuple[int, ...], test: int
) -> dict[str, Plan]:
    plans = {}
    for length in lengths:
        train = _examples(length, steps)
        plans[f"recall-{length}"] = Plan(
            _sizes(length),
            _recipe(length, steps),
            lambda data, length=length, train=train: recall.associative(
                train, 64, test, length=length, keys=16, values=16, joined=True
            ),
        )
        plans[f"needle-{length}"] = Plan(
            _sizes(length),
            _recipe(length, steps),
            lambda data, length=length, train=train: recall.needle(
                train, 64, test, length=length, joined=True, **NEEDLE
            ),
        )
    for length in repeated_lengths:
        train = _examples(length, steps)
        plans[f"repeated-{length}"] = Plan(
            _sizes(length),
            replace(_recipe(length, steps), batch=REPEATED_TEXTS),
            lambda data, length=length, train=train: repeated(train, 64, test, length=length),
        )
    return plans


def _examples(length: int, steps: int) -> int:
    """To train on: as many tokens as `steps` of `TOKENS_PER_STEP`, whatever a batch holds."""
    return min(steps * _recipe(length, steps).batch, MOST_EXAMPLES)


SMOKE = Recipe(4, 4, 1e-3, saves=1, points=4)

EXPERIMENT = Experiment(
    name="distance",
    title="Where the diagonal cannot see: recall and needle over distance",
    plans={
        "smoke": {
            name: Plan(plan.sizes, SMOKE, plan.load)
            for name, plan in _plans(1, (128,), (512,), 8).items()
        },
        "small": _plans(3_000, LENGTHS[:1], (2048,), 512),
        "full": _plans(10_000, LENGTHS, LENGTHS, 512),
    },
    methods=(
        "softmax",
        "diag",
        "lln",
        "lln_diag",
        "lln_keys",
        "pages",
        "elu",
        "hedgehog",
    ),
    seeds=(0, 1, 2, 3, 4),
)
