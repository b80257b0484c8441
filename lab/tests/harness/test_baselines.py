"""What tasks give without attention: constant answers, counts, frequencies."""

import math

import numpy as np
import pytest

from lln_lab.experiments import baselines
from lln_lab.experiments.tasks.masked_text import TextCode, hide
from lln_lab.experiments.tasks.task import NO_QUESTION, PAD, Examples


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


def test_masked_words_by_the_token_itself():
    code = TextCode(vocabulary=6, mask=5, end=4, plain=(1, 4), encode=list)
    train = np.array([[1, 1, 1, 1, 2, 4]])
    # One more of every word, so that none is impossible: 5, 2 and 1 of 8.
    one, two, three = 5 / 8, 2 / 8, 1 / 8
    labels = np.array([[1, 2, 2, 3, NO_QUESTION]])
    ids = np.array([[5, 5, 2, 1, 2]])
    found = baselines.tokens_alone(code, train, Examples(ids, labels))["every token by itself"]
    # Two masks, a token that stayed and one that was drawn from three.
    chances = [one, two, two * (1 + 1 / 3) / (two + 1 / 3), three * (1 / 3) / (one + 1 / 3)]
    assert found["loss"] == pytest.approx(-sum(map(math.log, chances)) / 4)
    # Right: the first mask, and the token that stayed.
    assert found["score"] == 0.5


def test_no_answer_without_neighbours_has_a_lower_loss():
    rng = np.random.default_rng(0)
    code = TextCode(vocabulary=12, mask=10, end=11, plain=(1, 10), encode=list)
    text = rng.choice(np.arange(1, 10), (200, 500), p=np.arange(1, 10) / 45)
    seen, labels = hide(text, code, rng)
    found = baselines.tokens_alone(code, text, Examples(seen, labels))["every token by itself"]
    asked = labels != NO_QUESTION
    pairs = np.zeros((12, 12))
    np.add.at(pairs, (seen[asked], labels[asked]), 1)
    share = pairs / np.maximum(pairs.sum(1, keepdims=True), 1)
    best = -np.log(share[seen[asked], labels[asked]]).mean()
    assert found["loss"] == pytest.approx(best, abs=0.01)
    assert found["score"] == pytest.approx(pairs.max(1).sum() / pairs.sum(), abs=0.002)
