"""Compiled by Inductor: no collective is lost or moved, results are those of one process.

Ranks that hold equally many tokens compile one graph; other calls stay outside of it.
"""

import pytest
import torch
from tests.parallel.splits import TOGETHER, assert_same, by_one, call, inputs_of, shard_of
from torch.utils.checkpoint import checkpoint

OPTIONS = {
    "lln": {},
    "lln_diag": {"block_size": 4},
    "lln_keys": {"block_size": 4, "keys": 3},
}
CAUSAL = {"alpha": 1.3, "beta": 1.1, "is_causal": True}
# Neighbours lend each other nothing, one has no tokens, blocks lie on three ranks.
UNEVEN = [[6, 9], [5, 0, 8], [3, 1, 7]]


def compiled(group, rank, case):
    """A rank's part of the call and its backward pass."""
    torch._dynamo.reset()
    options = dict(case["options"], group=group)
    if case.get("lengths_known", True):
        options["lengths"] = case["lengths"]
    attend = TOGETHER[case["kind"]]
    if case.get("checkpointed"):
        inner = attend

        def attend(**given):
            return checkpoint(inner, **given, use_reentrant=False)

    attend = torch.compile(attend, fullgraph=case.get("whole", False))
    return call(attend, shard_of(inputs_of(case), case, rank), options)


def check(pool, kind, lengths, **case):
    options = OPTIONS[kind] | case.pop("options", {})
    case = {"kind": kind, "lengths": lengths, "options": options, **case}
    assert_same(pool.run(compiled, len(lengths), case), by_one(case))


@pytest.mark.parametrize("lengths", UNEVEN)
@pytest.mark.parametrize("kind", OPTIONS)
def test_shards_of_different_lengths(pool, kind, lengths):
    check(pool, kind, lengths)


@pytest.mark.parametrize("kind", OPTIONS)
def test_lengths_that_the_ranks_tell_each_other(pool, kind):
    check(pool, kind, [6, 9], lengths_known=False)


def test_blocks_that_cross_equal_shards(pool):
    check(pool, "lln_diag", [6, 6])
    check(pool, "lln_diag", [8, 8], hidden=[(0, 0, 3)])


def test_a_checkpoint_inside(pool):
    """It repeats the collectives, on all ranks or on none."""
    check(pool, "lln_diag", [5, 0, 8], checkpointed=True)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [{}, CAUSAL], ids=["all", "causal"])
@pytest.mark.parametrize("kind", ["lln", "lln_diag"])
def test_equal_shards_are_one_graph(pool, kind, causal):
    check(pool, kind, [8, 8], whole=True, options=causal)
