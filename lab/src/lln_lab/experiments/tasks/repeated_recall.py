"""Recall at any length, with the same share of the text that counts.

`recall.associative` has as many pairs in a long text as in a short one. At 16,384 tokens a single
token answers a question, a start that looks everywhere alike sees it with a weight of 1/16,384, and
few texts fit a batch: at 1,024 tokens softmax did not learn it in 3,000 steps. Such a task measures
how long a training has to last as much as what an attention can see.

Here a text repeats what it says. At `LEAST_LENGTH` tokens a pair stands once, and at c times that
length c times; so does every question. A pair's share of the text, and a question's, is the same at
every length, and only the distance grows::

    16 segments  | . a7 . . a7 | . b2 b2 . . | … | . . a . a . |    a7: key a with value 7, joined
    labels       |             |             |   |     7   7   |    a: a question for a's value

The copies of a pair lie at random places of one segment, those of its question in another, and five
segments at least are from one to the other: more than a quarter of the text is between them.
"""

from __future__ import annotations

import numpy as np

from lln_lab.experiments.tasks.recall import RecallTask, drawn_apart, expected_most, parts_of
from lln_lab.experiments.tasks.task import NO_QUESTION, Examples

LEAST_LENGTH = 512
SEGMENTS = 16
# From a pair's segment to its question's: four whole segments lie between them.
SEGMENTS_APART = 5


def repeated(
    train: int,
    valid: int,
    test: int,
    seed: int = 0,
    length: int = 2048,
    *,
    pairs: int = 16,
    queries: int = 8,
    values: int = 16,
    fillers: int = 64,
) -> RecallTask:
    """Generate recall of repeated pairs; the same arguments give the same examples.

    Ids are `PAD`, then keys, values, joined pairs (values of the first key, of the second, …) and
    fillers.

    Args:
        train: Examples to train on.
        valid: Examples to choose a checkpoint by.
        test: Examples to report.
        seed: Decides everything.
        length: N, a multiple of `LEAST_LENGTH`; all examples are full.
        pairs: Different pairs in an example; there are as many keys.
        queries: How many of them are asked for.
        values: Different values.
        fillers: Different filler tokens.

    Raises:
        ValueError: If the numbers do not fit each other.
    """
    copies, rest = divmod(length, LEAST_LENGTH)
    if rest or not copies:
        raise ValueError(f"{length=} is not a multiple of {LEAST_LENGTH}")
    # However they are drawn: all of them may share a segment.
    most = LEAST_LENGTH // SEGMENTS
    if not 1 <= queries <= pairs <= most - queries:
        raise ValueError(
            f"{queries=} and {pairs=} are more than {most}, or fewer than one, or decrease"
        )
    if values < 2 or fillers < 1:
        raise ValueError("give at least two values and one filler")
    first_value = 1 + pairs
    first_pair = first_value + values
    first_filler = first_pair + pairs * values

    def make(rng: np.random.Generator, count: int) -> Examples:
        ids = rng.integers(first_filler, first_filler + fillers, (count, length), dtype=np.int16)
        labels = np.full((count, length), NO_QUESTION, dtype=np.int16)
        answers = rng.integers(0, values, (count, pairs))
        asked = drawn_apart(rng, count, pairs, queries)
        homes = rng.integers(0, SEGMENTS, (count, pairs))
        apart = np.abs(np.arange(SEGMENTS) - np.take_along_axis(homes, asked, 1)[..., None])
        lots = np.where(apart >= SEGMENTS_APART, rng.random(apart.shape), -1)
        segments = np.concatenate([homes, lots.argmax(-1)], axis=1)
        places = _places(rng, segments, copies, length)
        rows = np.arange(count)[:, None, None]
        said, questions = places[:, :pairs], places[:, pairs:]
        pair = first_pair + np.arange(pairs) * values + answers
        right = first_value + np.take_along_axis(answers, asked, 1)
        ids[rows, said] = pair[..., None]
        ids[rows, questions], labels[rows, questions] = 1 + asked[..., None], right[..., None]
        return Examples(ids, labels)

    parts = parts_of((train, valid, test), seed, make)
    between = (SEGMENTS_APART - 1) * length // SEGMENTS
    return RecallTask(
        name=f"repeated-{length}",
        title=f"Recall of pairs that stand {copies} times, more than {between} tokens away",
        classes=0,
        vocabulary=first_filler + fillers,
        chance=1 / values,
        chance_by_count=expected_most(pairs, values) / pairs,
        train=parts[0],
        valid=parts[1],
        test=parts[2],
    )


def _places(rng: np.random.Generator, segments: np.ndarray, copies: int, length: int) -> np.ndarray:
    """Different places for all copies: int ``[count, groups, copies]``.

    Args:
        rng: Draws them.
        segments: int ``[count, groups]``; where the copies of a group lie.
        copies: In a group.
        length: N.
    """
    count, groups = segments.shape
    inside = length // SEGMENTS
    order = np.argsort(rng.random((count, SEGMENTS, inside)), axis=-1)
    order += inside * np.arange(SEGMENTS)[:, None]
    # A group takes what the groups before it in the same segment have left.
    same = segments[:, :, None] == segments[:, None, :]
    before = (same & np.tri(groups, k=-1, dtype=bool)).sum(-1)
    taken = before[..., None] * copies + np.arange(copies)
    return order[np.arange(count)[:, None, None], segments[..., None], taken]
