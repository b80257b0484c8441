"""Retrieval with matched byte counts, and the baselines of the gates."""

from collections import Counter

import numpy as np

from lln_lab.experiments.gate_baselines import most_frequent, of_pairs, of_trees
from lln_lab.experiments.tasks import listops
from lln_lab.experiments.tasks.matched_retrieval import Judge, features, judged, matched_pairs
from lln_lab.experiments.tasks.retrieval import Pair


def articles(count=60):
    """Each with letters of its own, so that byte counts tell whose a text is."""
    rng = np.random.default_rng(0)
    found = {}
    for number in range(count):
        shares = rng.dirichlet(np.full(26, 0.5))
        letters = rng.choice(list("abcdefghijklmnopqrstuvwxyz"), (2, 400), p=shares)
        found[str(number)] = ["".join(row) for row in letters]
    return found


def test_every_text_is_in_one_positive_and_in_one_negative_pair():
    pairs = matched_pairs(articles(), 300, 0.5)
    for side in (0, 1):
        seen = Counter((pair.texts[side], pair.label) for pair in pairs)
        assert len(seen) == 120
        assert set(seen.values()) == {1}
    assert len({len(text) for pair in pairs for text in pair.texts}) == 1


def test_partners_are_nearer_than_chance_and_a_judge_is_heard():
    pairs = matched_pairs(articles(), 300, 0.5)
    first, second, labels = judged(pairs)
    cosines = (first * second).sum(1)
    chance = (first @ second[labels == 0].T).mean()
    assert cosines[labels == 0].mean() > chance + 0.02
    weights = np.zeros(512, np.float32)
    weights[ord("a")] = 1000
    judge = Judge(weights, 0.0, np.zeros(512, np.float32), np.ones(512, np.float32))
    sides = judged(matched_pairs(articles(), 300, 0.5, judge))

    def gap(first, second, labels):
        seen = features(first, second)[:, ord("a")]
        return abs(np.sort(seen[labels == 1]) - np.sort(seen[labels == 0])).mean()

    assert gap(*sides) < gap(first, second, labels)


def test_byte_counts_answer_what_is_not_matched():
    pairs = matched_pairs(articles(), 300, 0.5)
    own = {pair.titles[0]: pair for pair in pairs if pair.label}
    titles = sorted(own)
    strangers = [
        Pair((own[one].texts[0], own[other].texts[1]), (one, other))
        for one, other in zip(titles, titles[1:] + titles[:1], strict=True)
    ]
    found = of_pairs([*own.values(), *strangers], [*own.values(), *strangers])
    assert found["byte counts"]["accuracy"] > 0.9
    assert found["cosine of byte counts"]["accuracy"] > 0.9


def test_the_outermost_operator_is_answered_by_its_most_frequent_value():
    given = most_frequent(np.array([1, 1, 1, 2]), np.array([5, 5, 3, 0]), np.array([2, 1]))
    assert given.tolist() == [0, 5]


def test_baselines_of_trees_are_scored_by_depth():
    train = listops.fresh_trees(0, (2, 3), 600, 64)
    test = listops.fresh_trees(0, (2, 3), 200, 64, test=True)
    assert np.bincount(test["depths"]).tolist() == [0, 0, 100, 100]
    found = of_trees(train, test)
    for one in found.values():
        mean = (one["depth 2"] + one["depth 3"]) / 2
        assert abs(one["accuracy"] - mean) < 1e-9
    assert found["outermost operator"]["accuracy"] > found["majority"]["accuracy"]
