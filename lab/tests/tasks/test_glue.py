"""GLUE: rows, parts, tokens and scores."""

from collections import Counter

import numpy as np
import pytest
from lab.tests.tasks.data_files import is_one_sentence, needs_folder, own_copies, write_rows

from lln.errors import InvalidInputError
from lln_lab.experiments.tasks.data_folder import Row
from lln_lab.experiments.tasks.glue import (
    SETS,
    GlueRows,
    glue_rows,
    glue_task,
    score,
)


def write_set(folder, name, train=120, dev=30):
    known = SETS[name]
    for part, count in (("train", train), (known.dev, dev)):
        rows = [
            (i % len(known.classes), *(f"{part} {c} {i}" for c in known.columns))
            for i in range(count)
        ]
        write_rows(folder / name / f"{part}.tsv.xz", known.columns, rows)


def by_letters(*texts):
    """1, letters, 2, letters, 2."""
    return [1] + [code for text in texts for code in (*(ord(c) for c in text), 2)]


def texts_of(rows):
    return {text for row in rows for text in row.texts}


@own_copies
@pytest.mark.parametrize("name", SETS)
def test_parts_are_disjoint_and_balanced(tmp_path, name):
    write_set(tmp_path, name)
    rows = glue_rows(tmp_path, name)
    assert (len(rows.train), len(rows.valid), len(rows.test)) == (108, 12, 30)
    assert not texts_of(rows.train) & texts_of(rows.valid)
    assert all(text.startswith("dev") for text in texts_of(rows.test))
    classes = len(SETS[name].classes)
    assert Counter(row.label for row in rows.valid) == {i: 12 // classes for i in range(classes)}
    assert {len(row.texts) for row in rows.test} == {len(SETS[name].columns)}


@own_copies
def test_texts_keep_their_order_and_their_labels(tmp_path):
    write_set(tmp_path, "mnli")
    for row in glue_rows(tmp_path, "mnli").train:
        number = int(row.texts[0].split()[-1])
        assert row == Row(number % 3, (f"train premise {number}", f"train hypothesis {number}"))


@own_copies
def test_rows_are_shuffled_the_same_way_every_time(tmp_path):
    write_set(tmp_path, "cola")
    one, other = (glue_rows(tmp_path, "cola") for _ in range(2))
    assert one == other
    numbers = [int(row.texts[0].split()[-1]) for row in one.test]
    assert numbers != sorted(numbers)


@own_copies
def test_the_title_says_what_is_not_official(tmp_path):
    write_set(tmp_path, "qqp")
    title = glue_rows(tmp_path, "qqp").title
    assert "120 of 363,846 training rows" in title
    assert "not GLUE's dev set: 30 rows instead of 40,430" in title
    assert "dev is the test; valid is cut off train" in title


@own_copies
def test_tokens_come_from_the_tokenizer_of_the_caller(tmp_path):
    write_set(tmp_path, "rte")
    rows = glue_rows(tmp_path, "rte")
    task = glue_task(rows, by_letters, vocabulary=128, length=48)
    assert (task.classes, task.vocabulary, task.pairs) == (2, 128, False)
    for row, example in zip(rows.valid, task.valid, strict=True):
        expected = by_letters(*row.texts)
        assert example["input_ids"].tolist() == expected + [0] * (48 - len(expected))
        assert int(example["attention_mask"].sum()) == len(expected)
        assert int(example["labels"]) == row.label


def test_long_rows_are_cut():
    rows = [Row(0, ("a" * 50,))]
    task = glue_task(GlueRows("sst2", rows, rows, rows), by_letters, 128, length=16)
    assert task.train.ids.shape == (1, 16)
    assert task.train[0]["attention_mask"].tolist() == [1] * 16


def test_ids_outside_the_vocabulary_are_refused():
    rows = [Row(0, ("z",))]
    with pytest.raises(InvalidInputError, match="to 122, but the vocabulary is 100") as error:
        glue_task(GlueRows("sst2", rows, rows, rows), by_letters, 100)
    assert is_one_sentence(error)


def test_unknown_sets_are_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="no GLUE set is called 'stsb'; there are mnli"):
        glue_rows(tmp_path, "stsb")


# Scores


def test_every_set_has_its_metric():
    right = np.array([0, 1, 1])
    names = {name: tuple(score(name, right, right)) for name in SETS}
    assert names.pop("cola") == ("matthews",)
    assert names.pop("mrpc") == names.pop("qqp") == ("accuracy", "f1")
    assert set(names.values()) == {("accuracy",)}
    assert all(value == 1 for name in SETS for value in score(name, right, right).values())


def test_scores_of_a_known_table():
    # 4 right ones, 1 wrong one, 2 missed ones, 3 right zeros.
    predicted = np.array([1] * 5 + [0] * 5)
    labels = np.array([1] * 4 + [0] + [1] * 2 + [0] * 3)
    found = score("mrpc", predicted, labels)
    assert found["accuracy"] == pytest.approx(0.7)
    assert found["f1"] == pytest.approx(2 * (4 / 5) * (4 / 6) / (4 / 5 + 4 / 6))
    # Matthews' coefficient is Pearson's of two binary variables.
    expected = np.corrcoef(predicted, labels)[0, 1]
    assert score("cola", predicted, labels)["matthews"] == pytest.approx(expected)


def test_a_constant_answer_scores_nothing():
    labels = np.array([0, 1, 1])
    assert score("cola", np.ones(3), labels) == {"matthews": 0}
    assert score("mrpc", np.zeros(3), labels)["f1"] == 0


def test_answers_must_fit_the_labels():
    with pytest.raises(InvalidInputError, match="one answer per label"):
        score("cola", np.ones(3), np.ones(4))


# The real sets

REAL = {
    "sst2": ([29_780, 37_569], [428, 444]),
    "mnli": ([7_477, 7_491, 7_517], [3_479, 3_123, 3_213]),
    "qnli": ([5_946, 5_856], [2_702, 2_761]),
    "qqp": ([16_888, 11_629], [4_944, 4_973]),
    "cola": ([2_528, 6_023], [322, 721]),
    "rte": ([1_249, 1_241], [146, 131]),
    "mrpc": ([1_194, 2_473], [129, 279]),
}


@needs_folder
@pytest.mark.parametrize("name", REAL)
def test_real_counts(name):
    rows = glue_rows(None, name)
    train, test = REAL[name]
    found = np.bincount([row.label for row in rows.train + rows.valid])
    assert found.tolist() == train
    assert np.bincount([row.label for row in rows.test]).tolist() == test
    valid = np.bincount([row.label for row in rows.valid])
    assert valid == pytest.approx(0.1 * np.array(train), abs=1)
    assert not texts_of(rows.train) & texts_of(rows.valid)
