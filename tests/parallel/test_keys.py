"""Context-parallel attention with exact keys: the same keys are chosen, and the same rows read."""

import pytest
from tests.parallel.splits import assert_same, by_one, by_rank

LEARN = ("alpha", "beta", "offset")
LENGTHS = {
    "whole": {2: [8, 13], 3: [12, 0, 7], 4: [4, 8, 0, 11]},
    "crossed": {2: [9, 12], 3: [7, 0, 14], 4: [3, 6, 0, 14]},
    "short": {2: [1, 9], 3: [1, 1, 9], 4: [0, 2, 1, 9]},
}
each_size = pytest.mark.parametrize("size", [2, 3, 4])
each_cut = pytest.mark.parametrize("cut", LENGTHS)


def check(pool, size, cut, **case):
    options = {"block_size": 4, "keys": 3, **case.pop("options", {})}
    case = {"kind": "lln_keys", "lengths": LENGTHS[cut][size], "options": options, **case}
    assert_same(pool.run(by_rank, size, case), by_one(case))


@each_size
@each_cut
def test_chosen_keys(pool, size, cut):
    check(pool, size, cut, learn=LEARN)


@each_size
@each_cut
def test_everything_matched(pool, size, cut):
    check(pool, size, cut)


@each_size
@each_cut
def test_padding(pool, size, cut):
    tokens = sum(LENGTHS[cut][size])
    hidden = [(0, 0, min(6, tokens - 1)), (1, tokens - 2, tokens), (1, 1, 2)]
    check(pool, size, cut, learn=LEARN, hidden=hidden)


def test_small_groups(pool):
    for group_size in (1, 2):
        options = {"group_size": group_size, "scale": -0.4}
        check(pool, 3, "crossed", learn=LEARN, options=options)
        check(pool, 3, "whole", learn=LEARN, hidden=[(0, 0, 3)], options=options)


def test_grouped_queries(pool):
    options = {"enable_gqa": True}
    case = {"heads": 4, "learn": LEARN, "options": options}
    check(pool, 3, "crossed", **case)
    check(pool, 3, "crossed", **case, key_head_beta=True)


@pytest.mark.parametrize("matching", ["entropy", "paper"])
def test_other_criteria(pool, matching):
    check(pool, 3, "crossed", options={"matching": matching})


@pytest.mark.parametrize("keys", [0, 1, 100])
def test_no_key_and_all_keys(pool, keys):
    check(pool, 3, "crossed", options={"keys": keys})


def test_equal_scores_are_taken_in_the_order_of_positions(pool):
    """Keys that are all zero: every score is a tie, on one rank and across ranks."""
    check(pool, 3, "crossed", learn=LEARN, spread=0.0, shift=0.0)


def test_a_sample_of_padding_alone(pool):
    check(pool, 3, "crossed", learn=LEARN, hidden=[(0, 0, 21)])


def test_nobody_has_a_token(pool):
    check(pool, 2, "whole", lengths=[0, 0], learn=LEARN)


def test_lengths_that_are_known(pool):
    check(pool, 3, "crossed", lengths_known=True)
