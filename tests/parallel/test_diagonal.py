"""Context-parallel LLN + Diag attention: blocks on one rank, across two and across many."""

import pytest
import torch
from tests.parallel.splits import ALONE, assert_same, by_one, by_rank, inputs_of, shard_of

from lln.eager.dropout import drop_keys

FIXED = {"alpha": 1.7, "beta": 1.4}
# Shards that begin with blocks of 4, that do not, and that are shorter than a block.
LENGTHS = {
    "whole": {2: [8, 5], 3: [4, 0, 7], 4: [4, 8, 0, 3]},
    "crossed": {2: [5, 8], 3: [7, 0, 4], 4: [3, 6, 0, 9]},
    "short": {2: [1, 2], 3: [1, 1, 5], 4: [0, 1, 2, 2]},
}
each_size = pytest.mark.parametrize("size", [2, 3, 4])
each_cut = pytest.mark.parametrize("cut", LENGTHS)


def check(pool, size, cut, **case):
    options = {"block_size": 4, **case.pop("options", {})}
    case = {"kind": "lln_diag", "lengths": LENGTHS[cut][size], "options": options, **case}
    assert_same(pool.run(by_rank, size, case), by_one(case))


@each_size
@each_cut
def test_blocks(pool, size, cut):
    check(pool, size, cut, learn=("alpha", "beta", "mix"), options={"scale": 0.7})


@each_size
@each_cut
def test_causal(pool, size, cut):
    check(pool, size, cut, options={**FIXED, "is_causal": True})


@each_size
@each_cut
@pytest.mark.parametrize("causal", [False, True])
def test_padding(pool, size, cut, causal):
    """One sample begins with padding, so that its blocks begin elsewhere than the other's."""
    tokens = sum(LENGTHS[cut][size])
    hidden = [(0, 0, min(6, tokens - 1)), (1, tokens - 2, tokens), (1, 1, 2)]
    options = {**FIXED, "is_causal": True} if causal else {}
    check(pool, size, cut, hidden=hidden, options=options)


def test_padding_at_the_end_moves_nothing(pool):
    check(pool, 2, "whole", hidden=[(0, 9, 13)], masked_ranks=[1])


@pytest.mark.parametrize("kind", ["lln_diag", "lln_keys"])
def test_a_hole_where_a_shard_begins_is_no_padding(pool, kind):
    """Blocks are counted from the first valid token of the sequence, not from that of the shard."""
    options = {"block_size": 4, **({"keys": 2} if kind == "lln_keys" else {})}
    case = {"kind": kind, "lengths": [8, 9], "hidden": [(0, 8, 10)], "options": options}
    assert_same(pool.run(by_rank, 2, case), by_one(case))


def test_a_sample_of_padding_alone(pool):
    check(pool, 3, "crossed", hidden=[(0, 0, 11)])


def test_grouped_queries_and_a_block_wider_than_the_sequence(pool):
    check(pool, 3, "crossed", heads=4, options={"enable_gqa": True, "block_size": 50})


@pytest.mark.parametrize("kind", ["lln_diag", "lln_keys"])
def test_a_block_far_beyond_the_sequence_is_one_block(pool, kind):
    options = {"block_size": 2**40, **({"keys": 2} if kind == "lln_keys" else {})}
    case = {"kind": kind, "lengths": [8, 9], "hidden": [(0, 0, 3)], "options": options}
    assert_same(pool.run(by_rank, 2, case), by_one(case))


def test_lengths_that_are_known(pool):
    for cut in LENGTHS:
        check(pool, 3, cut, lengths_known=True)
        check(pool, 3, cut, lengths_known=True, hidden=[(0, 0, 2)])


def dropped(group, rank, case):
    """The rows of this rank, with dropout by its own random numbers; and what it dropped."""
    torch.manual_seed(rank)
    found = by_rank(group, rank, case)["out"]
    torch.manual_seed(rank)
    value = shard_of(inputs_of(case), case, rank)["value"]
    return found, drop_keys(value, case["options"]["dropout_p"])


@pytest.mark.parametrize("kind", ["lln", "lln_diag"])
def test_dropout_drops_a_key_from_all_rows_of_all_ranks(pool, kind):
    case = {
        "kind": kind,
        "lengths": [7, 0, 14],
        "options": {"dropout_p": 0.4, "matching": "entropy"},
    }
    parts = pool.run(dropped, 3, case)
    tensors = inputs_of(case)
    value = torch.cat([dropped for _, dropped in parts], 2)
    assert bool((value == 0).any())
    sides = (tensors["query"], tensors["key"], value)
    expected = ALONE[kind](*sides, matching="entropy")
    torch.testing.assert_close(
        torch.cat([out for out, _ in parts], 2), expected, rtol=0, atol=1e-12
    )
