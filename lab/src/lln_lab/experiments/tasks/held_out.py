"""Cut a validation part off a training set, so that no text is in both.

The sets come with two parts. The second one is reported, so it must not choose the checkpoint
too: that would report the best of many draws. The validation part is therefore cut off train.

A random cut would put the three hypotheses of one MNLI premise, or a question and its copy, on
both sides. Rows that share a text are therefore one *group*, and a group stays together. Groups
are drawn in the order of a hash of their texts: the same for every version of Python and numpy,
and for every order of the rows.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np


def held_out(texts: Sequence[tuple[bytes, ...]], labels: Sequence[int], share: float) -> np.ndarray:
    """Which rows to hold out: a share of every class, in whole groups.

    Args:
        texts: What identifies every row: its texts or its pixels. Rows with a common entry
            stay together.
        labels: The class of every row.
        share: Share of every class to hold out. A group that would exceed it for any class
            stays in train, so classes may fall a little short.

    Returns:
        bool ``[n]``.
    """
    quota = {label: round(share * count) for label, count in Counter(labels).items()}
    digests = [[hashlib.sha256(text).digest() for text in row] for row in texts]
    chosen = np.zeros(len(digests), dtype=bool)
    for rows in sorted(_groups(digests), key=lambda rows: min(min(digests[row]) for row in rows)):
        counts = Counter(labels[row] for row in rows)
        if all(count <= quota[label] for label, count in counts.items()):
            chosen[rows] = True
            for label, count in counts.items():
                quota[label] -= count
    return chosen


def hashed_order(texts: Sequence[tuple[bytes, ...]]) -> list[int]:
    """A fixed shuffled order of rows, so that the first of them are a fair sample."""
    # Another start than above, or the rows that are held out would come first.
    keys = [hashlib.sha256(b"order\0" + b"\0".join(row)).digest() for row in texts]
    return sorted(range(len(keys)), key=keys.__getitem__)


def _groups(digests: list[list[bytes]]) -> list[list[int]]:
    """Rows joined by common entries, directly or by way of other rows."""
    parent = list(range(len(digests)))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    first: dict[bytes, int] = {}
    for row, entries in enumerate(digests):
        for entry in entries:
            parent[root(row)] = root(first.setdefault(entry, row))
    groups = defaultdict(list)
    for row in range(len(digests)):
        groups[root(row)].append(row)
    return list(groups.values())
