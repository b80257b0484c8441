"""Fewer cases than all combinations, in which any two values of two options still meet."""

from itertools import combinations, product

import pytest


def pairs(**axes):
    """Instead of one `pytest.mark.parametrize` per axis: what two options do together is tried.

    What three of them do together may not be.
    """
    values = [list(axis) for axis in axes.values()]
    cases = [
        [axis[place] for axis, place in zip(values, places, strict=True)]
        for places in places_of([len(axis) for axis in values])
    ]
    return pytest.mark.parametrize(tuple(axes), cases)


def places_of(sizes):
    """Always the first case with the most pairs that no case had before."""
    left = {places: pairs_of(places) for places in product(*map(range, sizes))}
    chosen = []
    while left:
        best = max(left, key=lambda places: len(left[places]))
        if not (found := left.pop(best)):
            break
        chosen.append(best)
        left = {places: rest - found for places, rest in left.items()}
    return sorted(chosen)


def pairs_of(places):
    return set(combinations(enumerate(places), 2))
