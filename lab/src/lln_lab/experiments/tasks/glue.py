"""Seven sets of GLUE: what a sentence or a pair of sentences says.

The official test labels are not public, so published tables report dev, and mostly choose the
checkpoint on dev as well. Here dev is the test part and chooses nothing: valid is cut off train
(`held_out`), so that no text of valid occurs in train. SST-2 is the exception
in spirit: its train holds phrases of one sentence as rows of their own, so its valid is easier
than its test. Train and dev are as they were published: CoLA has 16 sentences in both.

Rows come from the data folder (`glue_rows`); `glue_task` turns them into token ids with the
tokenizer of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lln.errors import InvalidInputError
from lln_lab.experiments.tasks.data_folder import Row, read_rows
from lln_lab.experiments.tasks.held_out import hashed_order, held_out
from lln_lab.experiments.tasks.task import Examples, Task, padded

# One text, or two texts, to token ids with the special tokens around them.
Encode = Callable[..., Sequence[int]]


@dataclass(frozen=True)
class GlueSet:
    """What is fixed about one set.

    Attributes:
        title: Its usual name.
        columns: Names of its texts, one or two.
        classes: Names of its classes.
        official: Rows of the official train and dev.
        metrics: What is reported, the main one first; see `score`.
        dev: Name of the dev part.
    """

    title: str
    columns: tuple[str, ...]
    classes: tuple[str, ...]
    official: tuple[int, int]
    metrics: tuple[str, ...] = ("accuracy",)
    dev: str = "dev"


SETS = {
    "mnli": GlueSet(
        "MNLI (matched)",
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        (392_702, 9_815),
        dev="dev_matched",
    ),
    "qnli": GlueSet(
        "QNLI", ("question", "sentence"), ("entailment", "not_entailment"), (104_743, 5_463)
    ),
    "qqp": GlueSet(
        "QQP",
        ("question1", "question2"),
        ("different", "duplicate"),
        (363_846, 40_430),
        ("accuracy", "f1"),
    ),
    "sst2": GlueSet("SST-2", ("sentence",), ("negative", "positive"), (67_349, 872)),
    "cola": GlueSet(
        "CoLA", ("sentence",), ("unacceptable", "acceptable"), (8_551, 1_043), ("matthews",)
    ),
    "rte": GlueSet(
        "RTE", ("sentence1", "sentence2"), ("entailment", "not_entailment"), (2_490, 277)
    ),
    "mrpc": GlueSet(
        "MRPC",
        ("sentence1", "sentence2"),
        ("different", "paraphrase"),
        (3_668, 408),
        ("accuracy", "f1"),
    ),
}


@dataclass(frozen=True)
class GlueRows:
    """Labelled texts of one set.

    Attributes:
        name: A key of `SETS`.
        train: Rows of train, without those of valid.
        valid: Rows cut off train, a share of every class.
        test: Rows of dev.
    """

    name: str
    train: list[Row]
    valid: list[Row]
    test: list[Row]

    @property
    def title(self) -> str:
        """The name of the set, and where these rows are not the official ones."""
        known = SETS[self.name]
        train, dev = known.official
        found = len(self.train) + len(self.valid)
        notes = ["dev is the test", "valid is cut off train"]
        if found != train:
            notes.append(f"{found:,} of {train:,} training rows")
        if len(self.test) != dev:
            notes.append(f"not GLUE's dev set: {len(self.test):,} rows instead of {dev:,}")
        return f"GLUE {known.title}: {'; '.join(notes)}"


def glue_rows(folder: Path | None, name: str, share: float = 0.1) -> GlueRows:
    """Rows of the data folder, from ``NAME/train.tsv`` and ``NAME/dev.tsv`` (``.xz`` or not).

    Args:
        folder: See `data_folder`.
        name: A key of `SETS`. MNLI's dev is ``dev_matched``.
        share: Share of train that becomes valid.
    """
    known = _known(name)
    train, test = (
        read_rows(folder, name, part, known.columns, len(known.classes))
        for part in ("train", known.dev)
    )
    return _cut(name, train, test, share)


def glue_task(rows: GlueRows, encode: Encode, vocabulary: int, length: int = 128) -> Task:
    """Token ids of the rows.

    Args:
        rows: See `glue_rows`.
        encode: Called with the one text or the two texts of a row, returns token ids. For a
            Hugging Face tokenizer: ``lambda *texts: tokenizer(*texts)["input_ids"]``.
            Models that tell the two texts apart by ``token_type_ids`` do without them here.
        vocabulary: Size of the tokenizer's vocabulary.
        length: N; longer rows are cut at the end. A tokenizer that can cut the longer text of
            a pair, and keep the last special token, does better.

    Raises:
        InvalidInputError: If a token id is not in the vocabulary.
    """
    train, valid, test = (
        _examples(part, encode, vocabulary, length) for part in (rows.train, rows.valid, rows.test)
    )
    classes = len(SETS[rows.name].classes)
    return Task(rows.name, rows.title, classes, vocabulary, train, valid, test)


def score(name: str, predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The metrics of a set, in the order of `GlueSet.metrics`.

    Accuracy is the share of right answers. F1 is the harmonic mean of precision and recall of
    class 1. Matthews' is the correlation of two binary variables, 0 for a constant answer.

    Args:
        name: A key of `SETS`.
        predicted: Classes ``[n]``.
        labels: The right ones ``[n]``.
    """
    predicted, labels = np.asarray(predicted), np.asarray(labels)
    if predicted.shape != labels.shape or not labels.size:
        raise InvalidInputError(
            f"score needs one answer per label, got {predicted.shape} and {labels.shape}."
        )
    measures = {"accuracy": _accuracy, "f1": _f1, "matthews": _matthews}
    return {metric: measures[metric](predicted, labels) for metric in _known(name).metrics}


def _known(name: str) -> GlueSet:
    if name not in SETS:
        raise InvalidInputError(f"no GLUE set is called {name!r}; there are {', '.join(SETS)}.")
    return SETS[name]


def _cut(name: str, train: list[Row], test: list[Row], share: float) -> GlueRows:
    """Cut valid off train, and shuffle: some files are sorted by their source."""
    chosen = held_out(
        [tuple(text.encode("utf-8") for text in row.texts) for row in train],
        [row.label for row in train],
        share,
    )
    parts = (
        [row for row, out in zip(train, chosen, strict=True) if not out],
        [row for row, out in zip(train, chosen, strict=True) if out],
        test,
    )
    return GlueRows(name, *([part[place] for place in _order(part)] for part in parts))


def _order(rows: list[Row]) -> list[int]:
    return hashed_order([tuple(text.encode("utf-8") for text in row.texts) for row in rows])


def _examples(rows: list[Row], encode: Encode, vocabulary: int, length: int) -> Examples:
    texts = [np.asarray(encode(*row.texts), dtype=np.int64) for row in rows]
    ids, lengths = padded(texts, length, np.int32)
    if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
        raise InvalidInputError(
            f"encode gave token ids from {ids.min()} to {ids.max()}, but the vocabulary is "
            f"{vocabulary}; pass the size that goes with the tokenizer."
        )
    return Examples(ids, np.array([row.label for row in rows], dtype=np.int64), lengths)


def _accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    return float((predicted == labels).mean())


def _counts(predicted: np.ndarray, labels: np.ndarray) -> tuple[int, int, int, int]:
    """Right ones, wrong ones, missed ones and right zeros."""
    said, true = predicted == 1, labels == 1
    right, wrong, missed, zeros = said & true, said & ~true, ~said & true, ~said & ~true
    return int(right.sum()), int(wrong.sum()), int(missed.sum()), int(zeros.sum())


def _f1(predicted: np.ndarray, labels: np.ndarray) -> float:
    right, wrong, missed, _ = _counts(predicted, labels)
    return 2 * right / max(2 * right + wrong + missed, 1)


def _matthews(predicted: np.ndarray, labels: np.ndarray) -> float:
    right, wrong, missed, zeros = _counts(predicted, labels)
    sizes = (right + wrong) * (right + missed) * (zeros + wrong) * (zeros + missed)
    return (right * zeros - wrong * missed) / max(sizes, 1) ** 0.5
