"""Repeated recall: a reader finds every answer, far away; a pair's share of a text is fixed."""

import numpy as np
import pytest

from lln_lab.experiments.tasks.repeated_recall import repeated

FIRST_VALUE, FIRST_PAIR, FIRST_FILLER = 17, 33, 33 + 256


def read(text):
    """Key by key, from the ids alone: places of its pair, its value, places of its questions."""
    found = {}
    for key in range(1, 17):
        own = FIRST_PAIR + (key - 1) * 16
        said = np.flatnonzero((text >= own) & (text < own + 16))
        (token,) = set(text[said].tolist())
        found[key] = (said, FIRST_VALUE + token - own, np.flatnonzero(text == key))
    return found


@pytest.mark.parametrize("length", [512, 1024, 4096])
def test_a_reader_finds_every_answer_far_away(length):
    task = repeated(40, 10, 10, seed=3, length=length)
    copies, afterwards = length // 512, []
    for part in (task.train, task.valid, task.test):
        for text, labels in zip(part.ids, part.labels, strict=True):
            right = np.full(length, -100)
            found = read(text)
            for said, value, questions in found.values():
                assert len(said) == copies
                right[questions] = value
                if len(questions):
                    assert len(questions) == copies
                    gaps = questions[:, None] - said
                    assert abs(gaps).min() > length // 4
                    afterwards.append(gaps[0, 0] > 0)
            assert (labels == right).all()
            assert sum(len(questions) > 0 for *_, questions in found.values()) == 8
            assert (text >= FIRST_FILLER).sum() == length - 24 * copies
    assert 0.3 < np.mean(afterwards) < 0.7
    assert task.train.ids.min() > 0
    assert task.train.ids.max() < task.vocabulary == FIRST_FILLER + 64


def test_places_values_and_questions_are_drawn_evenly():
    task = repeated(400, 0, 0, length=512)
    ids = task.train.ids
    said = (ids >= FIRST_PAIR) & (ids < FIRST_FILLER)
    asked = task.train.labels >= 0
    # 6,400 pairs and 3,200 questions over 512 places; questions avoid the middle only a little.
    by_segment = said.reshape(400, 16, 32).sum((0, 2))
    assert by_segment.min() > 0.8 * 400
    assert by_segment.max() < 1.2 * 400
    assert asked.reshape(400, 16, 32).sum((0, 2)).min() > 30
    values = np.bincount(task.train.labels[asked] - FIRST_VALUE, minlength=16)
    assert len(values) == 16
    assert values.min() > 0.7 * 200
    assert (asked & said).sum() == 0


def test_the_seed_decides_and_parts_differ():
    first, again, other = (repeated(20, 20, 20, seed=seed) for seed in (1, 1, 2))
    assert (first.train.ids == again.train.ids).all()
    assert (first.train.ids != other.train.ids).any()
    assert (first.train.ids != first.test.ids).any()


def test_chance_is_that_of_sixteen_values():
    task = repeated(200, 0, 0)
    assert task.chance == 1 / 16
    best = []
    for text in task.train.ids:
        values = [value for _, value, _ in read(text).values()]
        best.append(max(values.count(one) for one in values) / 16)
    assert np.mean(best) == pytest.approx(task.chance_by_count, abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 768}, "multiple of 512"),
        ({"length": 0}, "multiple of 512"),
        ({"pairs": 25, "queries": 8}, "more than 32"),
        ({"queries": 17}, "more than 32, or fewer"),
        ({"queries": 0}, "fewer than one"),
        ({"values": 1}, "two values"),
        ({"fillers": 0}, "one filler"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        repeated(1, 1, 1, **options)
