"""Figures 9 and 10, and what each part of the method is worth: masked-language training, one host.

*temperature*: α = β fixed over a grid against matching, by criterion and scope of the statistics,
in float16 with its loss scale (Figure 10b). Every layer has a convolution of its values: without
one LLN and softmax stay at the frequencies of words for longer than this training lasts (Table 1),
and all temperatures would look alike; with one they leave it within 200 steps, so that 600 steps
tell them apart. *parts*: block size, how LLN and blocks are joined, exact keys, alternating layers,
a convolution of the values; 1,500 steps, twice as many as blocks need to leave the frequencies of
words. *keys*: how many exact keys a query needs at 512 and at 2,048 tokens, trained from scratch
without slots (docs/exact_keys.md), beside keys at random, pages, blocks that every other layer
shifts by half, and a convolution. Kept cells with ``select=query`` and ``select=half`` are of
choices that were removed; pages took their place.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lln_lab.experiments.experiment import Experiment, Plan
from lln_lab.experiments.table1 import SMALL, TINY, pretraining, source_pretraining
from lln_lab.experiments.training import Recipe

GRID = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
TEMPERATURES = tuple(
    f"{method}+conv"
    for method in (
        "softmax",
        "diag",
        *(f"lln@statistics=fixed,alpha={number},beta={number}" for number in GRID),
        "lln@matching=paper",
        "lln@matching=variance",
        "lln@matching=entropy",
        "lln+calibrated",
        "lln@statistics=running",
        "lln@statistics=learned",
    )
)
PARTS = (
    "softmax",
    "diag",
    "lln",
    "lln_diag@block_size=32",
    "lln_diag@block_size=64",
    "lln_diag@block_size=128",
    "lln_diag@join=ratio",
    "lln_diag@join=gate",
    "lln_diag@join=heads",
    "diag/lln",
    "diag/softmax",
    *(f"diag/lln_keys@keys={keys},learn_offset=True" for keys in (16, 64, 128)),
    "lln_keys@learn_offset=True",
    "diag+conv",
    "lln+conv",
    "diag/lln+conv",
)
KEYS = (
    "softmax",
    "diag",
    "diag/diag@shift=32",
    "diag/softmax",
    "diag/lln_keys@keys=64,offset=-1e4",
    "diag/lln_keys@keys=64,offset=-1e4+random",
    *(f"window/pages@pages={pages}" for pages in (1, 4, 16)),
    "pages",
    "diag+conv",
    "diag/softmax+conv",
    "window/pages+conv",
)
SMOKE = Recipe(4, 4, 1e-3, saves=1, points=4)
LENGTHS = (512, 2048)
TOKENS_PER_STEP = 32_768
RECIPE = Recipe(3_000, 64, 1e-3, 0.06, 0.01, precision="bfloat16")


def _experiment(
    name: str, title: str, methods: tuple[str, ...], precision: str, steps: int
) -> Experiment:
    recipe = replace(RECIPE, precision=precision, steps=steps)
    smoke = Plan(TINY, SMOKE, source_pretraining)
    longer = replace(recipe, steps=20_000, saves=20)
    return Experiment(
        name=name,
        title=title,
        plans={
            "smoke": {"mlm": smoke},
            "small": {"mlm": Plan(SMALL, recipe, partial(pretraining, 8192), observed=12)},
            "full": {"mlm": Plan(SMALL, longer, partial(pretraining, 8192), observed=12)},
        },
        methods=methods,
        needs_data=frozenset({"mlm"}),
        measure="loss",
    )


def _over_length() -> Experiment:
    def plans(steps: int) -> dict[str, Plan]:
        return {
            f"mlm-{length}": Plan(
                replace(SMALL, length=length),
                replace(RECIPE, steps=steps, batch=TOKENS_PER_STEP // length),
                partial(pretraining, 8192, length=length),
            )
            for length in LENGTHS
        }

    return Experiment(
        name="keys",
        title="How many exact keys a length needs",
        plans={
            "smoke": {"mlm-128": Plan(TINY, SMOKE, source_pretraining)},
            "small": plans(3_000),
            "full": plans(20_000),
        },
        methods=KEYS,
        needs_data=frozenset(f"mlm-{length}" for length in LENGTHS),
        measure="loss",
    )


TEMPERATURE = _experiment(
    "temperature", "Figures 9 and 10: α and β fixed against matched", TEMPERATURES, "float16", 600
)
ABLATION = _experiment("parts", "What every part is worth", PARTS, "bfloat16", 1_500)
OVER_LENGTH = _over_length()
