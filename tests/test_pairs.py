"""Every two values of two axes meet in a case."""

from itertools import combinations, product

import pytest
from tests.pairs import pairs_of, places_of


@pytest.mark.parametrize("sizes", [(2, 2), (5, 3, 2), (4, 1, 3, 2), (2, 2, 2, 2, 2)])
def test_every_pair_is_there(sizes):
    found = places_of(sizes)
    assert set().union(*map(pairs_of, found)) == {
        ((one, left), (other, right))
        for one, other in combinations(range(len(sizes)), 2)
        for left, right in product(range(sizes[one]), range(sizes[other]))
    }
    assert len(found) == len(set(found))
    largest, second = sorted(sizes)[:-3:-1]
    assert largest * second <= len(found) <= largest * second + 3
