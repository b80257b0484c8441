"""What tasks give without attention: constant answers, counts, frequencies."""

import math

import numpy as np
import pytest
from experiments import baselines
from experiments.tasks.task import NO_QUESTION, PAD, Examples


def test_the_most_frequent_class_by_the_measures_of_a_set():
    labels = np.array([1, 1, 0, 1])
    assert baselines.constant(labels) == {"most frequent class": {"accuracy": 0.75}}
    found = baselines.glue_constant("mrpc", labels)["most frequent class"]
    # Always yes: precision 3/4, recall 1.
    assert found == pytest.approx({"accuracy": 0.75, "f1": 6 / 7})
    assert baselines.glue_constant("cola", labels)["most frequent class"] == {"matthews": 0}


def test_the_outermost_operator_answers_what_it_did_most_often_in_train():
    train = Examples(np.array([[11, 1], [11, 2], [11, 2], [12, 1]]), np.array([9, 9, 3, 0]))
    test = Examples(np.array([[11, 5], [12, 5], [12, 6], [11, 7]]), np.array([9, 0, 4, 3]))
    assert baselines.outermost_operator(train, test) == {"outermost operator": {"accuracy": 0.5}}


def test_byte_counts_tell_texts_of_the_same_bytes_from_others():
    one, other = [65, 65, 66, PAD], [90, 91, 91, PAD]
    ids = np.array([one + one[::-1], other + other, one + other, other + one])
    found = baselines.byte_counts(Examples(ids, np.array([1, 1, 0, 0])))
    assert found == {"byte counts": {"accuracy": 1.0}}
    # Shares, not counts: texts of the same bytes match however much padding they have.
    halves = ids.reshape(4, 2, 4)
    twice = np.concatenate([halves[:, :, :3], halves[:, :, :3]], axis=2)
    mixed = np.stack([np.pad(halves[:, 0], [(0, 0), (0, 2)]), twice[:, 1]], axis=1)
    found = baselines.byte_counts(Examples(mixed.reshape(4, -1), np.array([1, 1, 0, 0])))
    assert found == {"byte counts": {"accuracy": 1.0}}


def test_masked_words_by_how_often_words_occur():
    train = np.array([[1, 1, 2, 3], [1, 1, 2, 3]])
    labels = np.array([[NO_QUESTION, 1], [2, NO_QUESTION]])
    found = baselines.word_frequencies(train, labels, 4)["frequencies of words"]
    # One more of every word, so that none is impossible: 5, 3 of 12.
    assert found["loss"] == pytest.approx(-(math.log(5 / 12) + math.log(3 / 12)) / 2)
    assert found["score"] == 0.5
