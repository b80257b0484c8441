"""The part cut off train: whole groups, a share of every class, the same in every order."""

import numpy as np

from lln_lab.experiments.tasks.held_out import hashed_order, held_out


def rows(count):
    """Every premise with three hypotheses, one per class."""
    texts = [(f"p{i // 3}".encode(), f"h{i}".encode()) for i in range(count)]
    return texts, [i % 3 for i in range(count)]


def test_a_share_of_every_class_is_held_out():
    texts, labels = rows(300)
    chosen = held_out(texts, labels, 0.1)
    assert np.bincount(np.array(labels)[chosen]).tolist() == [10, 10, 10]


def test_rows_with_a_common_text_stay_together():
    texts, labels = rows(300)
    chosen = held_out(texts, labels, 0.1)
    inside = {text for row, out in zip(texts, chosen, strict=True) if out for text in row}
    outside = {text for row, out in zip(texts, chosen, strict=True) if not out for text in row}
    assert inside
    assert not inside & outside


def test_groups_reach_over_several_rows():
    # a–b, b–c, c–d: one group of all, too large for two rows of five; e and f stand alone.
    texts = [(b"a", b"b"), (b"c", b"b"), (b"c", b"d"), (b"e", b"e"), (b"f", b"f")]
    chosen = held_out(texts, [0] * 5, 0.4)
    assert chosen.tolist() == [False, False, False, True, True]


def test_the_order_of_the_rows_does_not_matter():
    texts, labels = rows(300)
    chosen = held_out(texts, labels, 0.1)
    order = np.random.default_rng(0).permutation(300)
    again = held_out([texts[i] for i in order], [labels[i] for i in order], 0.1)
    assert again.tolist() == chosen[order].tolist()


def test_the_choice_never_changes():
    """Results in files depend on it."""
    texts, labels = rows(60)
    assert np.flatnonzero(held_out(texts, labels, 0.1)).tolist() == [21, 22, 23, 51, 52, 53]
    assert hashed_order(texts[:6]) == [0, 5, 1, 2, 3, 4]
