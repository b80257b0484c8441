"""Ranks that share a sequence, each with the kernels: what one process computes in float64."""

import pytest
import torch
from tests.kernels.common import ON_GPU
from tests.parallel.events import assert_order, recorded
from tests.parallel.splits import assert_same, by_one, by_rank
from tests.parallel.workers import Pool

pytestmark = pytest.mark.skipif(ON_GPU, reason="tests/parallel/test_on_gpu.py")

GIVEN = {"alpha": 1.3, "beta": 1.1}


@pytest.fixture(scope="module")
def pool():
    pool = Pool()
    yield pool
    pool.close()


def check(pool, **case):
    options = case.get("options", {})
    case = {"kind": "lln", "lengths": [20, 33], "width": 8, "value_width": 8, **case}
    alone = by_one(case)
    case |= {"options": {**options, "impl": "triton"}, "cast": torch.float32}
    parts = pool.run(by_rank, len(case["lengths"]), case)
    wide = [{name: side.double() for name, side in part.items()} for part in parts]
    assert_same(wide, alone, 2e-5)


@pytest.mark.parametrize("options", [GIVEN, {}], ids=["given", "matched"])
def test_lln(pool, options):
    check(pool, options=options)


def test_learned_temperatures_grouped_queries_and_a_rank_without_tokens(pool):
    options = {"enable_gqa": True}
    check(pool, lengths=[20, 0, 9], heads=4, learn=("alpha", "beta"), options=options)


def test_padding(pool):
    hidden = [(0, 0, 4), (1, 18, 25)]
    check(pool, hidden=hidden, options=GIVEN)
    check(pool, hidden=hidden, options=GIVEN, spoils_queries=True)


def test_whole_blocks(pool):
    check(pool, kind="lln_diag", lengths=[32, 23], options={**GIVEN, "block_size": 16})


KEYS = {"kind": "lln_keys", "batch": 1, "key_heads": 1}
LEARN = ("alpha", "beta", "offset")
SMALL = {"batch": 1, "heads": 1, "key_heads": 1, "width": 8, "value_width": 8, "lengths": [16, 16]}
TRAVELS = {
    "lln_diag": [
        ("merging the summaries", "blocks"),
        ("merging the summaries (backward)", "blocks (backward)"),
    ],
    "lln_keys": [
        ("exchanging the mean queries", "summary"),
        ("merging the summaries", "candidates"),
        ("fetching the chosen keys (backward)", "summary (backward)"),
    ],
}


@pytest.mark.parametrize("kind", TRAVELS)
def test_collectives_travel_while_the_kernels_run(pool, kind):
    """As in tests/parallel/test_overlap.py, which has more cases."""
    options = {**GIVEN, "block_size": 16, "impl": "triton"}
    options |= {"offset": -0.5, "keys": 3} if kind == "lln_keys" else {}
    case = {**SMALL, "kind": kind, "dtype": torch.float32, "options": options}
    for events in pool.run(recorded, 2, case):
        for pair in TRAVELS[kind]:
            assert_order(events, *pair)


def test_exact_keys(pool):
    options = {**GIVEN, "offset": -0.5, "block_size": 16, "keys": 5, "enable_gqa": True}
    check(pool, **KEYS, lengths=[32, 20], options=options)


def test_exact_keys_in_blocks_that_cross_ranks(pool):
    options = {"block_size": 32, "group_size": 16, "keys": 20, "enable_gqa": True, "scale": -0.4}
    hidden = [(0, 0, 3), (0, 30, 34)]
    check(pool, **KEYS, lengths=[20, 0, 29], learn=LEARN, hidden=hidden, options=options)


def test_exact_keys_without_a_chosen_key(pool):
    """No row travels, but the ranks must still meet."""
    options = {**GIVEN, "offset": -0.5, "block_size": 16, "keys": 0}
    check(pool, **KEYS, heads=1, lengths=[16, 0, 5], options=options)


def exact_keys_without_a_kernel(group, rank):
    from lln import BackendUnavailableError, parallel

    said = []
    for options in ({"block_size": 48}, {"keys": 300}):
        sides = torch.randn(3, 1, 1, 20, 8)
        try:
            parallel.lln_keys_attention(*sides, group=group, **GIVEN, **options, impl="triton")
        except BackendUnavailableError as error:
            said.append(str(error))
    return said


def test_exact_keys_that_the_kernels_do_not_take_are_refused(pool):
    for block, keys in pool.run(exact_keys_without_a_kernel, 2):
        assert "blocks of 48" in block
        assert "at most 256" in keys


def blocks_that_cross(group, rank):
    from lln import BackendUnavailableError, parallel

    sides = torch.randn(3, 1, 1, 20, 8)
    options = {**GIVEN, "block_size": 16, "impl": "triton"}
    try:
        parallel.lln_diag_attention(*sides, group=group, **options)
    except BackendUnavailableError as error:
        return str(error)


def test_blocks_that_cross_ranks_have_no_kernel(pool):
    assert all("cross ranks" in message for message in pool.run(blocks_that_cross, 2))
