"""Context-parallel LLN attention gives what one process gives, gradients included."""

import pytest
import torch
from tests.parallel.splits import assert_same, by_one, by_rank, inputs_of, shard_of

from lln.matching.moments import head_moments, tensor_moments

FIXED = {"alpha": 1.7, "beta": 1.4}
LENGTHS = {2: [5, 8], 3: [7, 0, 4], 4: [3, 1, 0, 9]}
each_size = pytest.mark.parametrize("size", [2, 3, 4])


def check(pool, size, **case):
    case = {"kind": "lln", "lengths": LENGTHS[size], **case}
    assert_same(pool.run(by_rank, size, case), by_one(case))


@each_size
def test_given_temperatures(pool, size):
    check(pool, size, options=FIXED)


@each_size
def test_learned_temperatures(pool, size):
    check(pool, size, learn=("alpha", "beta"))


@each_size
@pytest.mark.parametrize(
    "matching", ["variance", "entropy", pytest.param("paper", marks=pytest.mark.slow)]
)
def test_matched_temperatures(pool, size, matching):
    check(pool, size, options={"matching": matching})


@each_size
@pytest.mark.parametrize("options", [FIXED, {}], ids=["given", "matched"])
def test_padding_anywhere(pool, size, options):
    """Sample 0 has padding on the last rank alone, sample 1 at its beginning and once more."""
    last = sum(LENGTHS[size])
    hidden = [(0, last - 2, last), (1, 0, 6), (1, 8, 9)]
    check(pool, size, options=options, hidden=hidden)


def test_a_mask_on_one_rank(pool):
    case = {"hidden": [(0, 7, 9)], "masked_ranks": [1], "lengths": [5, 8]}
    check(pool, 2, **case)
    check(pool, 2, **case, options={**FIXED, "is_causal": True})


def test_a_sample_without_any_key_gives_zeros(pool):
    case = {"kind": "lln", "lengths": [5, 8], "hidden": [(0, 0, 13)], "options": FIXED}
    parts = pool.run(by_rank, 2, case)
    assert_same(parts, by_one(case))
    assert all(bool((part["out"][0] == 0).all()) for part in parts)


@each_size
@pytest.mark.parametrize("hidden", [None, [(0, 0, 4), (1, 6, 7)]], ids=["full", "padded"])
def test_causal(pool, size, hidden):
    case = {} if hidden is None else {"hidden": hidden}
    check(pool, size, learn=("alpha", "beta"), options={"is_causal": True}, **case)


def test_causal_over_many_chunks_and_with_far_outliers(pool):
    """Keys of 200 spreads send single chunks through the exact form, on one rank alone."""
    case = {"lengths": [150, 10, 200], "options": {**FIXED, "is_causal": True}}
    check(pool, 3, **case)
    check(pool, 3, **case, spread=200.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_head_beta", [False, True])
def test_grouped_queries(pool, causal, key_head_beta):
    options = {"enable_gqa": True, "is_causal": causal}
    case = {"heads": 4, "learn": ("alpha", "beta"), "key_head_beta": key_head_beta}
    check(pool, 3, **case, options=options)
    if not causal:
        check(pool, 3, heads=4, options=options)


@pytest.mark.parametrize("lengths", [[6, 2, 5], [0, 13, 0]])
def test_queries_cut_in_other_places_than_keys(pool, lengths):
    check(pool, 3, query_lengths=lengths, options=FIXED)
    check(pool, 3, query_lengths=lengths)
    check(pool, 3, query_lengths=[20, 3, 1], hidden=[(0, 2, 5)])


def test_a_group_whose_ranks_have_other_numbers_in_the_world(pool):
    case = {"kind": "lln", "lengths": [5, 8]}
    assert_same(pool.run(by_rank, "odd", case), by_one(case))


def test_nobody_has_a_token(pool):
    check(pool, 2, lengths=[0, 0], options=FIXED)
    check(pool, 2, lengths=[0, 0])
    check(pool, 2, lengths=[0, 0], options={**FIXED, "is_causal": True})


def test_lengths_that_are_known(pool):
    check(pool, 3, lengths_known=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(pool, dtype):
    """Sums in float32: as exact as one process is."""
    case = {"kind": "lln", "lengths": [50, 80], "dtype": dtype}
    parts, alone = pool.run(by_rank, 2, case), by_one(case)
    assert parts[0]["out"].dtype == dtype
    assert_same(parts, alone, 2e-6 if dtype == torch.float32 else 1e-2)


def statistics(group, rank, case):
    """What `lln.parallel` matches α and β to, without the attention around it."""
    from lln.checks.call import Call
    from lln.parallel.agreement import agree
    from lln.parallel.ranks import find_ranks
    from lln.parallel.summary_merge import measure_shards

    shard = shard_of(inputs_of(case), case, rank)
    sides = [shard[name] for name in ("query", "key", "value")]
    request = Call("lln", *sides, key_mask=shard.get("key_mask"))
    request, shards = agree(lambda: request, None, find_ranks(group, "test"), "test")
    found = measure_shards(request, shards, whole_tensor=False)()
    whole = measure_shards(request, shards, whole_tensor=True)()
    return [*found, *whole]


@each_size
def test_statistics_are_those_of_one_process_and_the_same_on_all_ranks(pool, size):
    """Means that move from shard to shard: sums of plain squares would lose digits."""
    case = {"lengths": LENGTHS[size], "hidden": [(0, 0, 2), (1, 6, 9)]}
    parts = pool.run(statistics, size, case)
    tensors = inputs_of(case)
    sides = (tensors["query"], tensors["key"], tensors["key_mask"])
    expected = [*head_moments(*sides), *tensor_moments(*sides)]
    for found in parts:
        assert all(map(torch.equal, found, parts[0]))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-13, atol=0)


def test_the_comparison_notices_a_wrong_merge(pool):
    """Two summaries averaged, instead of merged by their masses, are found out."""
    case = {"kind": "lln", "lengths": [5, 8], "options": FIXED}
    with pytest.raises(AssertionError, match="out is off"):
        assert_same(pool.run(averaging, 2, case), by_one(case))


def averaging(group, rank, case):
    from lln.parallel.summary_merge import RankSummaries

    right = RankSummaries.merged
    RankSummaries.merged = lambda self: (self.log_mass.logsumexp(0), self.centroid.mean(0))
    try:
        return by_rank(group, rank, case)
    finally:
        RankSummaries.merged = right
