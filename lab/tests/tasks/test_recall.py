"""Recall: a plain reader solves every question, answers are far away, and chance is as told."""

import itertools
from collections import Counter

import numpy as np
import pytest

from lln_lab.experiments.tasks import recall

PAIRS = {"pairs": 6, "queries": 4, "keys": 20, "values": 5, "fillers": 30}
NEEDLE = {"decoys": 7, "values": 5, "fillers": 30}
FIRST_VALUE = {"associative": 21, "needle": 3}
MAKE = {
    "associative": lambda *counts, **options: recall.associative(*counts, **PAIRS | options),
    "needle": lambda *counts, **options: recall.needle(*counts, **NEEDLE | options),
}
BOTH = pytest.mark.parametrize("kind", ["associative", "needle"])


def read_pairs(text):
    """Key by key: where its pair starts, its value, and where it is asked for."""
    text = [*text.tolist(), 0]
    pairs, queries = {}, {}
    for place, (token, following) in enumerate(itertools.pairwise(text)):
        if 1 <= token <= 20:
            if 21 <= following <= 25:
                assert token not in pairs
                pairs[token] = (place, following)
            else:
                assert token not in queries
                queries[token] = place
    return {key: (*pairs[key], place) for key, place in queries.items()}, pairs


def read_needle(text):
    """The same for the one question."""
    (start,) = np.flatnonzero(text == 1)
    (place,) = np.flatnonzero(text == 2)
    return {0: (start, int(text[start + 1]), place)}, {0: (start, int(text[start + 1]))}


READ = {"associative": read_pairs, "needle": read_needle}


def read_joined_pairs(text):
    """Pairs are one token each, in the order of keys and then values."""
    pairs = {
        1 + (int(text[place]) - 26) // 5: (place, 21 + (int(text[place]) - 26) % 5)
        for place in np.flatnonzero((text >= 26) & (text < 126))
    }
    asked = {int(text[place]): place for place in np.flatnonzero((text >= 1) & (text <= 20))}
    return {key: (*pairs[key], place) for key, place in asked.items()}, pairs


def read_joined_needle(text):
    """Marked values follow the plain ones."""
    (start,) = np.flatnonzero((text >= 8) & (text < 13))
    (place,) = np.flatnonzero(text == 2)
    assert 1 not in text
    return {0: (start, int(text[start]) - 5, place)}, {0: (start, int(text[start]) - 5)}


JOINED = {"associative": read_joined_pairs, "needle": read_joined_needle}


@BOTH
@pytest.mark.parametrize("least_distance", [None, 200])
def test_joined_pairs_are_found_by_a_reader_too(kind, least_distance):
    options = {"joined": True, "least_distance": least_distance}
    task = MAKE[kind](300, 20, 20, seed=5, **options)
    least = least_distance or 128
    gaps = []
    for text, labels in zip(task.train.ids, task.train.labels, strict=True):
        questions, pairs = JOINED[kind](text)
        assert len(pairs) == (6 if kind == "associative" else 1)
        asked = {int(place): value for _, value, place in questions.values()}
        assert {int(p): int(labels[p]) for p in np.flatnonzero(labels != -100)} == asked
        assert len(asked) == (4 if kind == "associative" else 1)
        gaps += [place - start for start, _, place in questions.values()]
    gaps = np.array(gaps)
    assert abs(gaps).min() >= least
    assert 0.2 < (gaps > 0).mean() < 0.8
    assert task.train.ids.max() < task.vocabulary
    again = MAKE[kind](300, 20, 20, seed=5, **options)
    assert (again.train.ids == task.train.ids).all()


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("questions", "least_distance"), [(5, None), (56, 228)])
def test_all_questions_for_a_needle_are_far_from_it(joined, questions, least_distance):
    options = {"joined": joined, "questions": questions, "least_distance": least_distance}
    task = recall.needle(300, 0, 0, **NEEDLE | options)
    places = []
    for text, labels in zip(task.train.ids, task.train.labels, strict=True):
        asked = np.flatnonzero(text == 2)
        assert len(asked) == questions
        assert (np.flatnonzero(labels != -100) == asked).all()
        start = int(np.flatnonzero((text >= 8) & (text < 13) if joined else text == 1)[0])
        end = start if joined else start + 1
        answer = int(text[start]) - 5 if joined else int(text[end])
        assert (labels[asked] == answer).all()
        assert np.minimum(abs(asked - start), abs(asked - end)).min() >= (least_distance or 128)
        # Nothing was written over.
        assert ((text >= 3) & (text < 8)).sum() == 7 + (not joined)
        places += asked.tolist()
    assert min(places) < 5
    assert max(places) > 506


def answers_of(kind, part):
    """Every question that a reader finds, after a check against the labels."""
    found = []
    for text, labels in zip(part.ids, part.labels, strict=True):
        questions, pairs = READ[kind](text)
        asked = {place: value for _, value, place in questions.values()}
        assert {int(p): int(labels[p]) for p in np.flatnonzero(labels != -100)} == asked
        assert len(asked) == (4 if kind == "associative" else 1)
        assert len(pairs) == (6 if kind == "associative" else 1)
        found += questions.values()
    return np.array(found)


@BOTH
@pytest.mark.parametrize(("length", "least_distance"), [(512, None), (512, 255), (2048, 700)])
def test_a_reader_finds_every_answer_far_away(kind, length, least_distance):
    if kind == "associative" and least_distance == 255:
        least_distance = 240
    task = MAKE[kind](60, 20, 20, seed=1, length=length, least_distance=least_distance)
    for part in (task.train, task.valid, task.test):
        start, value, place = answers_of(kind, part).T
        least = least_distance or length // 4
        assert np.minimum(abs(place - start), abs(place - start - 1)).min() >= least
        assert (value >= FIRST_VALUE[kind]).all()
        assert (value < FIRST_VALUE[kind] + 5).all()
        assert part.ids.shape == part.labels.shape == (len(part), length)
        assert part.ids.min() > 0
        assert part.ids.max() < task.vocabulary
        # In both directions.
        assert 0.2 < (place > start).mean() < 0.8


@BOTH
def test_the_longest_examples(kind):
    task = MAKE[kind](3, 1, 1, length=16_384)
    start, _, place = answers_of(kind, task.train).T
    assert abs(place - start).min() >= 4096


@BOTH
def test_questions_and_answers_lie_everywhere(kind):
    start, _, place = answers_of(kind, MAKE[kind](600, 0, 0).train).T
    # Nearly uniform; questions keep away from the middle, where no pair is far.
    for places in (start, place):
        counts = np.histogram(places, bins=4, range=(0, 512))[0]
        assert counts.min() > len(places) / 10
    assert min(start.min(), place.min()) < 10
    assert max(start.max(), place.max()) > 501


def test_the_smallest_distance_and_the_ends_are_reached():
    task = recall.needle(3000, 0, 0, length=8, least_distance=2, decoys=0)
    start, _, place = answers_of("needle", task.train).T
    found = set(zip(start.tolist(), place.tolist(), strict=True))
    allowed = {
        (start, place)
        for start in range(7)
        for place in range(8)
        if min(abs(place - start), abs(place - start - 1)) >= 2
    }
    assert found == allowed


@BOTH
def test_chance_is_what_guessing_gives(kind):
    task = MAKE[kind](3000, 1, 1, seed=3)
    first = FIRST_VALUE[kind]
    values = answers_of(kind, task.train)[:, 1]
    counts = Counter(values.tolist())
    assert sorted(counts) == [first + place for place in range(5)]
    for count in counts.values():
        assert count / len(values) == pytest.approx(task.chance, abs=0.03)
    assert task.chance == 1 / 5
    right = asked = 0
    for text, labels in zip(task.train.ids, task.train.labels, strict=True):
        seen = text[(text >= first) & (text < first + 5)]
        assert len(seen) == (6 if kind == "associative" else 8)
        guess = Counter(seen.tolist()).most_common(1)[0][0]
        wanted = labels[labels != -100]
        right, asked = right + (wanted == guess).sum(), asked + len(wanted)
    assert task.chance_by_count > task.chance + 0.1
    assert right / asked == pytest.approx(task.chance_by_count, abs=0.03)


@pytest.mark.parametrize(("draws", "values"), [(1, 3), (2, 4), (5, 2), (5, 3), (4, 6)])
def test_the_most_frequent_value_by_counting_all_cases(draws, values):
    cases = itertools.product(range(values), repeat=draws)
    most = [max(Counter(case).values()) for case in cases]
    assert recall.expected_most(draws, values) == pytest.approx(np.mean(most), abs=1e-12)


@BOTH
def test_surroundings_say_nothing_about_the_answer(kind):
    task = MAKE[kind](1500, 1, 1, seed=4)
    first = FIRST_VALUE[kind]
    near, wanted = [], []
    for text, labels in zip(task.train.ids, task.train.labels, strict=True):
        for place in np.flatnonzero(labels != -100):
            around = text[max(0, place - 100) : place + 100]
            seen = around[(around >= first) & (around < first + 5)]
            if len(seen):
                near.append(seen[0])
                wanted.append(labels[place])
    assert len(near) > 500
    assert np.mean(np.array(near) == wanted) == pytest.approx(task.chance, abs=0.05)


@BOTH
def test_the_same_seed_gives_the_same_and_another_other_examples(kind):
    task, again, other = (MAKE[kind](20, 20, 20, seed=seed) for seed in (5, 5, 6))
    for part in ("train", "valid", "test"):
        assert (getattr(task, part).ids == getattr(again, part).ids).all()
        assert (getattr(task, part).labels == getattr(again, part).labels).all()
        assert (getattr(task, part).ids != getattr(other, part).ids).any(axis=1).all()
    assert (task.train.ids != task.valid.ids).any(axis=1).all()
    assert (task.valid.ids != task.test.ids).any(axis=1).all()


@BOTH
def test_a_smaller_task_keeps_its_chance(kind):
    task = MAKE[kind](20, 5, 5)
    small = task.first(3, 2)
    assert (len(small.train), len(small.test)) == (3, 2)
    assert small.chance_by_count == task.chance_by_count
    item = small.train[0]
    assert item["labels"].shape == item["input_ids"].shape == (512,)
    assert "attention_mask" not in item
    assert task.classes == 0


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        ("needle", {"least_distance": 256}, "least_distance is 1 to 255 for 512 tokens"),
        ("needle", {"least_distance": 0}, "least_distance is 1"),
        ("needle", {"decoys": 510}, "510 decoys do not fit"),
        ("needle", {"questions": 0}, "1 to 256 questions fit 512 tokens at a distance of 128"),
        ("needle", {"questions": 257}, "1 to 256 questions"),
        ("needle", {"questions": 200, "decoys": 311}, "311 decoys do not fit"),
        ("needle", {"values": 1}, "two values"),
        ("associative", {"least_distance": 250}, "too many for 512 tokens at a distance of 250"),
        ("associative", {"pairs": 21}, "must not decrease"),
        ("associative", {"queries": 7}, "must not decrease"),
        ("associative", {"fillers": 0}, "one filler"),
    ],
)
def test_what_does_not_fit_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        MAKE[make](1, 1, 1, **options)
