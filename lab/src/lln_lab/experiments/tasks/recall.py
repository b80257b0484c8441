"""Two tasks where the diagonal cannot see: the answer is never near the question.

Attention in diagonal blocks reads the neighbourhood of a token exactly and nothing else. These
tasks ask for something that lies at least `least_distance` tokens away, in either direction, so
that whatever is learnt beyond chance came from afar. Models read in both directions; labels stand
at the questions, and everywhere else there is no question (-100).

**Associative recall.** Pairs of a key and a value, scattered over filler tokens::

    . . k3 v7 . . . . k1 v2 . . . . . . . . . . k3 . . . . k1 .
                                                v7         v2     labels

A key that comes without a value is a query; its label is the value that followed the same key
elsewhere. Keys of one example differ. Values are drawn one by one, so that all other pairs together
say nothing about the one asked for.

**Needle.** Somewhere a marker, and behind it a value; far away question tokens, whose label is
that value. Decoys, which are values without a marker, lie about in the filler, so that finding some
value is not enough. With one question per text softmax rarely begins to learn in 3,000 steps of 64
texts; more of them, all with the same answer, are more to learn from.

**Joined.** Key and value, or marker and value, can be one token instead of two. Then nothing has to
be put together from neighbours before anything can be found afar, which is what small models learn
last: at 512 tokens softmax solves joined recall after 1,800 of 3,000 steps, and does not begin to
solve the other one.

Chance is known exactly. A reader of its surroundings alone can do no better than guess one of all
values: `RecallTask.chance`. A reader that sees the whole example but cannot tell what belongs
together guesses the value that occurs most often: `RecallTask.chance_by_count`, which is more.
Models often rest at that level before they learn to match.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lln_lab.experiments.tasks.task import NO_QUESTION, Examples, Task

# Examples that are made together: more would need more memory, and not be faster.
AT_ONCE = 1024


@dataclass(frozen=True)
class RecallTask(Task):
    """A task of recall, and what guessing gives.

    Attributes:
        chance: Accuracy without anything from afar.
        chance_by_count: Accuracy with all values of an example but without their keys or marker.
    """

    chance: float = 0.0
    chance_by_count: float = 0.0


def expected_most(draws: int, values: int) -> float:
    """How often the most frequent of so many uniformly drawn values occurs, in the mean.

    P(every value at most m times) = draws! / values^draws times the coefficient of x^draws in
    (1 + x + x²/2! + … + x^m/m!)^values, and the mean is the sum over m of P(more than m times).

    >>> round(expected_most(2, 4), 6)  # two of four: equal with probability 1/4
    1.25
    """
    mean = 0.0
    for most in range(draws):
        # Of x / values instead of x, so that large powers stay within range.
        once = np.zeros(draws + 1)
        for times in range(most + 1):
            once[times] = math.exp(-math.lgamma(times + 1) - times * math.log(values))
        power = np.zeros(draws + 1)
        power[0] = 1.0
        for _ in range(values):
            power = np.convolve(power, once)[: draws + 1]
        mean += 1 - power[draws] * math.exp(math.lgamma(draws + 1))
    return float(mean)


def checked_distance(length: int, least_distance: int | None) -> int:
    """The least distance to use: a quarter of the length unless it is given.

    Raises:
        ValueError: If a pair in the middle would leave no place for its question.
    """
    distance = length // 4 if least_distance is None else least_distance
    if not 1 <= distance <= (length - 1) // 2:
        raise ValueError(f"least_distance is 1 to {(length - 1) // 2} for {length} tokens")
    return distance


def parts_of(
    counts: tuple[int, int, int], seed: int, make: Callable[[np.random.Generator, int], Examples]
) -> list[Examples]:
    """Every part from its own stream of random numbers, some examples at a time."""
    streams = np.random.SeedSequence(seed).spawn(3)
    return [
        _joined([make(rng, at_once) for at_once in _portions(count)])
        for rng, count in zip(map(np.random.default_rng, streams), counts, strict=True)
    ]


def _portions(count: int) -> list[int]:
    """Numbers up to `AT_ONCE` with this sum; one of them at least."""
    return [AT_ONCE] * (count // AT_ONCE) + [count % AT_ONCE]


def _joined(portions: list[Examples]) -> Examples:
    ids, labels = zip(*((one.ids, one.labels) for one in portions), strict=True)
    return Examples(np.concatenate(ids), np.concatenate(labels))


def drawn_apart(rng: np.random.Generator, count: int, below: int, draws: int) -> np.ndarray:
    """Different numbers from 0 to below, in any order: int ``[count, draws]``."""
    return np.argsort(rng.random((count, below)), axis=1)[:, :draws]


def associative(
    train: int,
    valid: int,
    test: int,
    seed: int = 0,
    length: int = 512,
    *,
    pairs: int = 16,
    queries: int = 8,
    keys: int = 64,
    values: int = 32,
    fillers: int = 64,
    least_distance: int | None = None,
    joined: bool = False,
) -> RecallTask:
    """Generate associative recall; the same arguments give the same examples.

    Ids are `PAD`, then keys, values, joined pairs (values of the first key, of the second, …) if
    there are any, and fillers.

    Args:
        train: Examples to train on.
        valid: Examples to choose a checkpoint by.
        test: Examples to report.
        seed: Decides everything.
        length: N; all examples are full.
        pairs: Pairs of a key and a value in an example.
        queries: How many of them are asked for.
        keys: Different keys; at least `pairs`.
        values: Different values.
        fillers: Different filler tokens.
        least_distance: From a query to the nearer token of its pair; None = a quarter of N.
        joined: Whether a pair is one token.

    Raises:
        ValueError: If the numbers do not fit each other.
    """
    distance = checked_distance(length, least_distance)
    if not 1 <= queries <= pairs <= keys:
        raise ValueError(f"{queries=}, {pairs=} and {keys=} must not decrease")
    if values < 2 or fillers < 1:
        raise ValueError("give at least two values and one filler")
    span = 1 if joined else 2
    # So that every query finds a free place at its distance, however the others lie.
    if length - 2 * distance < span * pairs + queries:
        raise ValueError(
            f"{pairs} pairs and {queries} queries are too many for {length} tokens at a distance "
            f"of {distance}"
        )
    first_value = 1 + keys
    first_pair = first_value + values
    first_filler = first_pair + (keys * values if joined else 0)
    vocabulary = first_filler + fillers

    def make(rng: np.random.Generator, count: int) -> Examples:
        ids = rng.integers(first_filler, vocabulary, (count, length), dtype=np.int16)
        labels = np.full((count, length), NO_QUESTION, dtype=np.int16)
        rows, places = np.arange(count)[:, None], np.arange(length)
        # Places among N - pairs, then moved apart by one for each pair before.
        room = length - (span - 1) * pairs
        starts = np.sort(drawn_apart(rng, count, room, pairs)) + (span - 1) * np.arange(pairs)
        used = drawn_apart(rng, count, keys, pairs)
        answers = rng.integers(0, values, (count, pairs))
        if joined:
            ids[rows, starts] = first_pair + used * values + answers
        else:
            ids[rows, starts], ids[rows, starts + 1] = 1 + used, first_value + answers
        is_free = ids >= first_filler
        asked = drawn_apart(rng, count, pairs, queries)
        for pair in asked.T[..., None]:
            gap = places - np.take_along_axis(starts, pair, 1)
            far = (gap <= -distance) | (gap >= distance + span - 1)
            place = np.where(far & is_free, rng.random((count, length)), -1).argmax(1)[:, None]
            is_free[rows, place] = False
            ids[rows, place] = 1 + np.take_along_axis(used, pair, 1)
            labels[rows, place] = first_value + np.take_along_axis(answers, pair, 1)
        return Examples(ids, labels)

    parts = parts_of((train, valid, test), seed, make)
    return RecallTask(
        name=f"recall-{length}",
        title=f"Associative recall: {queries} of {pairs} pairs, at least {distance} tokens away",
        classes=0,
        vocabulary=vocabulary,
        chance=1 / values,
        chance_by_count=expected_most(pairs, values) / pairs,
        train=parts[0],
        valid=parts[1],
        test=parts[2],
    )


def needle(
    train: int,
    valid: int,
    test: int,
    seed: int = 0,
    length: int = 512,
    *,
    questions: int = 1,
    decoys: int = 31,
    values: int = 32,
    fillers: int = 64,
    least_distance: int | None = None,
    joined: bool = False,
) -> RecallTask:
    """Generate the needle; the same arguments give the same examples.

    Ids are `PAD`, the marker, the question, then values, marked values if joined, and fillers.

    Args:
        train: Examples to train on.
        valid: Examples to choose a checkpoint by.
        test: Examples to report.
        seed: Decides everything.
        length: N; all examples are full.
        questions: How often an example asks for its needle.
        decoys: Values in the filler; with none, whoever finds the only value has the answer.
        values: Different values.
        fillers: Different filler tokens.
        least_distance: From a question to the nearer token of the needle; None = a quarter of N.
        joined: Whether a marker and its value are one token.

    Raises:
        ValueError: If the numbers do not fit each other.
    """
    distance = checked_distance(length, least_distance)
    if values < 2 or fillers < 1:
        raise ValueError("give at least two values and one filler")
    span = 1 if joined else 2
    # However the needle lies, so many places are far from it.
    far = length - 2 * distance - span + 2
    if not 1 <= questions <= far:
        raise ValueError(f"1 to {far} questions fit {length} tokens at a distance of {distance}")
    if not 0 <= decoys <= length - span - questions:
        raise ValueError(f"{decoys} decoys do not fit {length} tokens")
    marker, question, first_value = 1, 2, 3
    first_filler = first_value + (values if not joined else 2 * values)
    vocabulary = first_filler + fillers

    def make(rng: np.random.Generator, count: int) -> Examples:
        ids = rng.integers(first_filler, vocabulary, (count, length), dtype=np.int16)
        labels = np.full((count, length), NO_QUESTION, dtype=np.int16)
        rows = np.arange(count)
        start = rng.integers(0, length - span + 1, count)
        before = np.maximum(0, start - distance + 1)
        after = np.maximum(0, length - (start + span - 1 + distance))
        if questions == 1:
            drawn = rng.integers(0, before + after)[:, None]
        else:
            order = rng.random((count, length))
            order[np.arange(length) >= (before + after)[:, None]] = 2
            drawn = np.argsort(order, axis=1)[:, :questions]
        behind = (start + span - 1 + distance - before)[:, None]
        place = np.where(drawn < before[:, None], drawn, drawn + behind)
        answers = rng.integers(first_value, first_value + values, count)
        if joined:
            ids[rows, start] = answers + values
        else:
            ids[rows, start], ids[rows, start + 1] = marker, answers
        ids[rows[:, None], place], labels[rows[:, None], place] = question, answers[:, None]
        # Decoys lie where filler is left.
        order = np.where(ids >= first_filler, rng.random((count, length)), 2)
        free = np.argsort(order, axis=1)[:, :decoys]
        lures = rng.integers(first_value, first_value + values, (count, decoys))
        ids[rows[:, None], free] = lures
        return Examples(ids, labels)

    parts = parts_of((train, valid, test), seed, make)
    return RecallTask(
        name=f"needle-{length}",
        title=f"A needle in filler, at least {distance} tokens from its questions",
        classes=0,
        vocabulary=vocabulary,
        chance=1 / values,
        chance_by_count=expected_most(decoys + 1, values) / (decoys + 1),
        train=parts[0],
        valid=parts[1],
        test=parts[2],
    )
