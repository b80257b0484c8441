"""What the tasks give without any attention: constant answers, counts, tokens by themselves.

    python -m lln_lab.experiments.baselines --data FOLDER

The tables show these rows below the trained ones, so that a score at their level is seen for what
it is. They are of the scale `small` and of the test part, and take a few minutes on a CPU.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np

from lln.errors import InvalidInputError
from lln.files import write_atomically
from lln_lab.bench.environment import describe
from lln_lab.compact import compact_json
from lln_lab.experiments import table1
from lln_lab.experiments.catalogue import EXPERIMENTS
from lln_lab.experiments.report_page import BASELINES
from lln_lab.experiments.tasks import glue, pathfinder
from lln_lab.experiments.tasks.byte_tokens import BYTE_VOCABULARY
from lln_lab.experiments.tasks.masked_text import TextCode
from lln_lab.experiments.tasks.task import NO_QUESTION, PAD, Examples

COMMAND = "python -m lln_lab.experiments.baselines"
MOST_FREQUENT = "most frequent class"
OPERATOR, BYTES, ALONE = "outermost operator", "byte counts", "every token by itself"
GUESS, VALUE = "guessing", "most frequent value of the text"
# Of the same text and tokenizer as the pre-training of Table 1.
MASKED = ("table1/mlm", "temperature/mlm", "parts/mlm", "keys/mlm-512", "keys/mlm-2048")
# Name → measure → value.
Measures = dict[str, dict[str, float]]


def constant(labels: np.ndarray) -> Measures:
    """The constant answer that is right most often in the test part."""
    return {MOST_FREQUENT: {"accuracy": float(np.bincount(labels).max() / len(labels))}}


def glue_constant(name: str, labels: np.ndarray) -> Measures:
    """The same by the measures of a set of GLUE; in QQP and MRPC it is "yes"."""
    answer = np.full_like(labels, np.bincount(labels).argmax())
    return {MOST_FREQUENT: glue.score(name, answer, labels)}


def outermost_operator(train: Examples, test: Examples) -> Measures:
    """ListOps by its first token alone: the most frequent value of that operator in train."""
    first = {
        operator: int(np.bincount(train.labels[train.ids[:, 0] == operator]).argmax())
        for operator in np.unique(train.ids[:, 0])
    }
    given = np.array([first[operator] for operator in test.ids[:, 0]])
    return {OPERATOR: {"accuracy": float((given == test.labels).mean())}}


def byte_counts(test: Examples) -> Measures:
    """Retrieval by the cosine of both texts' standardised counts of bytes, cut at its median.

    Nothing is trained, and no label is used: half of the pairs are positive by their making.
    """
    sides = np.split(test.ids, 2, axis=1)
    counts = [[np.bincount(row, minlength=BYTE_VOCABULARY) for row in side] for side in sides]
    shares = np.array(counts, dtype=float)
    shares[..., PAD] = 0
    shares /= shares.sum(-1, keepdims=True)
    spread = shares.std((0, 1))
    first, second = (shares - shares.mean((0, 1)))[..., spread > 0] / spread[spread > 0]
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    cosine = (first * second).sum(1) / lengths
    return {BYTES: {"accuracy": float(((cosine > np.median(cosine)) == test.labels).mean())}}


def tokens_alone(code: TextCode, train: np.ndarray, test: Examples) -> Measures:
    """Masked words by the place itself, whatever stands around it.

    A mask says nothing, so words have the frequencies of train. A visible token is the right one,
    or one drawn at random, which happens as often (`masked_text.hide`). Trainings rest at this
    level until they use a neighbour.
    """
    low, high = code.plain
    counts = np.bincount(train.ravel(), minlength=code.vocabulary)[low:high] + 1.0
    share, drawn = counts / counts.sum(), 1 / (high - low)
    asked = test.labels != NO_QUESTION
    seen, right = test.ids[asked], test.labels[asked] - low
    visible = seen != code.mask
    chance = share[right]
    own = np.where(visible, seen, low) - low
    chance[visible] *= ((own == right) + drawn)[visible] / (share[own] + drawn)[visible]
    most = share.argmax()
    trusted = visible & (share[own] * (1 + drawn) >= share[most] * drawn)
    given = np.where(trusted, own, most)
    found = {"score": float((given == right).mean()), "loss": float(-np.log(chance).mean())}
    return {ALONE: found}


def measured(data: Path) -> dict[str, Measures]:
    """Every baseline, by experiment and task."""
    found: dict[str, Measures] = {}
    for name in table1.SETS:
        labels = np.array([row.label for row in glue.glue_rows(data, name).test])
        found[f"table1/{name}"] = glue_constant(name, labels)
    plans = EXPERIMENTS["lra"].plans["small"]
    for name in ("text", "image", "listops", "retrieval"):
        task: Any = plans[name].load(data)
        found[f"lra/{name}"] = constant(task.test.labels)
        if name == "listops":
            found["lra/listops"] |= outermost_operator(task.train, task.test)
        if name == "retrieval":
            found["lra/retrieval"] |= byte_counts(task.test)
    # Parts of Pathfinder do not depend on each other's size, and drawing takes long.
    found["lra/pathfinder"] = constant(pathfinder.load(1, 1, 2_000).test.labels.astype(int))
    task = EXPERIMENTS["table3"].plans["small"]["cats_dogs"].load(data)
    found["table3/cats_dogs"] = constant(np.asarray(task.test.labels, dtype=int))
    for name, plan in EXPERIMENTS["distance"].plans["small"].items():
        task = plan.load(None)
        found[f"distance/{name}"] = {GUESS: {"accuracy": task.chance}}
        if not name.startswith("needle"):
            found[f"distance/{name}"][VALUE] = {"accuracy": task.chance_by_count}
    return found | masked_words(data)


def masked_words(data: Path) -> dict[str, Measures]:
    """Of every length of masked-language training."""
    by_length: dict[int, Measures] = {}
    found = {}
    for place in MASKED:
        experiment, task = place.split("/")
        length = EXPERIMENTS[experiment].plans["small"][task].sizes.length
        if length not in by_length:
            read: Any = table1.pretraining(8192, data, length)
            by_length[length] = tokens_alone(read.train.code, read.train.ids, read.test)
        found[place] = by_length[length]
    return found


def main() -> None:
    """Compute and keep all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    folder = os.environ.get("LLN_DATA")
    parser.add_argument("--data", type=Path, default=folder and Path(folder), help="or LLN_DATA")
    options = parser.parse_args()
    if options.data is None:
        raise InvalidInputError("the folder with the data is not given; pass --data FOLDER.")
    content = {"setup": describe("cpu", f"{COMMAND} --data FOLDER"), "rows": measured(options.data)}
    write_atomically(BASELINES, compact_json(content))
    print(f"wrote {BASELINES}")


if __name__ == "__main__":
    main()
