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

**Needle.** Somewhere a marker, and behind it a value; far away a question token, whose label is
that value. Decoys, which are values without a marker, lie about in the filler, so that finding some
value is not enough.

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

from experiments.tasks.task import NO_QUESTION, Examples, Task


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
    """Every part from its own stream of random numbers."""
    streams = np.random.SeedSequence(seed).spawn(3)
    return [
        make(np.random.default_rng(stream), count)
        for stream, count in zip(streams, counts, strict=True)
    ]


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
) -> RecallTask:
    """Generate associative recall; the same arguments give the same examples.

    Ids are `PAD`, then keys, values and fillers.

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

    Raises:
        ValueError: If the numbers do not fit each other.
    """
    distance = checked_distance(length, least_distance)
    if not 1 <= queries <= pairs <= keys:
        raise ValueError(f"{queries=}, {pairs=} and {keys=} must not decrease")
    if values < 2 or fillers < 1:
        raise ValueError("give at least two values and one filler")
    # So that every query finds a free place at its distance, however the others lie.
    if length - 2 * distance < 2 * pairs + queries:
        raise ValueError(
            f"{pairs} pairs and {queries} queries are too many for {length} tokens at a distance "
            f"of {distance}"
        )
    first_value = 1 + keys
    first_filler = first_value + values
    vocabulary = first_filler + fillers

    def make(rng: np.random.Generator, count: int) -> Examples:
        ids = rng.integers(first_filler, vocabulary, (count, length), dtype=np.int16)
        labels = np.full((count, length), NO_QUESTION, dtype=np.int16)
        for text, label in zip(ids, labels, strict=True):
            # Places among N - pairs, then moved apart by one for each pair before.
            starts = np.sort(rng.choice(length - pairs, pairs, replace=False)) + np.arange(pairs)
            used = rng.choice(keys, pairs, replace=False) + 1
            answers = rng.integers(first_value, first_filler, pairs)
            text[starts], text[starts + 1] = used, answers
            is_free = np.ones(length, dtype=bool)
            is_free[starts] = is_free[starts + 1] = False
            for pair in rng.choice(pairs, queries, replace=False):
                start = starts[pair]
                before = np.flatnonzero(is_free[: max(0, start - distance + 1)])
                after = np.flatnonzero(is_free[start + 1 + distance :]) + start + 1 + distance
                drawn = rng.integers(len(before) + len(after))
                place = before[drawn] if drawn < len(before) else after[drawn - len(before)]
                is_free[place] = False
                text[place], label[place] = used[pair], answers[pair]
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
    decoys: int = 31,
    values: int = 32,
    fillers: int = 64,
    least_distance: int | None = None,
) -> RecallTask:
    """Generate the needle; the same arguments give the same examples.

    Ids are `PAD`, the marker, the question, then values and fillers.

    Args:
        train: Examples to train on.
        valid: Examples to choose a checkpoint by.
        test: Examples to report.
        seed: Decides everything.
        length: N; all examples are full.
        decoys: Values in the filler; with none, whoever finds the only value has the answer.
        values: Different values.
        fillers: Different filler tokens.
        least_distance: From the question to the nearer token of the needle; None = a quarter of N.

    Raises:
        ValueError: If the numbers do not fit each other.
    """
    distance = checked_distance(length, least_distance)
    if values < 2 or fillers < 1:
        raise ValueError("give at least two values and one filler")
    if not 0 <= decoys <= length - 3:
        raise ValueError(f"{decoys} decoys do not fit {length} tokens")
    marker, question, first_value = 1, 2, 3
    first_filler = first_value + values
    vocabulary = first_filler + fillers

    def make(rng: np.random.Generator, count: int) -> Examples:
        ids = rng.integers(first_filler, vocabulary, (count, length), dtype=np.int16)
        labels = np.full((count, length), NO_QUESTION, dtype=np.int16)
        rows = np.arange(count)
        start = rng.integers(0, length - 1, count)
        before = np.maximum(0, start - distance + 1)
        after = np.maximum(0, length - 1 - (start + distance))
        drawn = rng.integers(0, before + after)
        place = np.where(drawn < before, drawn, drawn - before + start + 1 + distance)
        for text, taken in zip(ids, np.stack([start, start + 1, place], axis=1), strict=True):
            free = rng.choice(length - 3, decoys, replace=False)
            for token in np.sort(taken):
                free += free >= token
            text[free] = rng.integers(first_value, first_filler, decoys)
        answers = rng.integers(first_value, first_filler, count)
        ids[rows, start], ids[rows, start + 1] = marker, answers
        ids[rows, place], labels[rows, place] = question, answers
        return Examples(ids, labels)

    parts = parts_of((train, valid, test), seed, make)
    return RecallTask(
        name=f"needle-{length}",
        title=f"A needle in filler, at least {distance} tokens from its question",
        classes=0,
        vocabulary=vocabulary,
        chance=1 / values,
        chance_by_count=expected_most(decoys + 1, values) / (decoys + 1),
        train=parts[0],
        valid=parts[1],
        test=parts[2],
    )
