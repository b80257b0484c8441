"""Collectives travel while a rank computes: the order in which it starts, computes and waits."""

import pytest
import torch
from tests.parallel.events import assert_order, recorded
from tests.parallel.splits import TOGETHER, inputs_of, shard_of

FIXED = {"alpha": 1.7, "beta": 1.4}
DIAGONAL = {"kind": "lln_diag", "options": {**FIXED, "block_size": 4}}
KEYS = {"kind": "lln_keys", "options": {"block_size": 4, "keys": 3}}

STATISTICS, SUMMARIES = "merging the statistics", "merging the summaries"
MEANS, ROWS = "exchanging the mean queries", "fetching the chosen keys"
BORROWED, GIVEN_BACK = (
    "borrowing tokens of blocks that cross ranks",
    "giving back rows of blocks that cross ranks",
)
# What travels, what is computed meanwhile, and the case.
CASES = {
    "summaries behind blocks": (SUMMARIES, "blocks", {**DIAGONAL, "lengths": [8, 8]}),
    "tokens borrowed behind the summary": (BORROWED, "summary", {**DIAGONAL, "lengths": [6, 9]}),
    "rows given back behind the reading": (GIVEN_BACK, "reading", {**DIAGONAL, "lengths": [6, 9]}),
    "summaries behind the choice": (SUMMARIES, "candidates", {**KEYS, "lengths": [8, 8]}),
    "mean queries behind the summary": (MEANS, "summary", {**KEYS, "lengths": [8, 8]}),
    "statistics behind the means": (STATISTICS, "means", {**KEYS, "lengths": [8, 8]}),
    "statistics behind dropout": (
        STATISTICS,
        "dropout",
        {"kind": "lln", "lengths": [6, 9], "options": {"dropout_p": 0.5}},
    ),
    "summaries behind the chunks": (
        SUMMARIES,
        "chunks",
        {"kind": "lln", "lengths": [6, 9], "options": {**FIXED, "is_causal": True}},
    ),
}
BACKWARD = {
    "summaries behind blocks": CASES["summaries behind blocks"],
    "tokens borrowed behind the summary": CASES["tokens borrowed behind the summary"],
    "rows given back behind the reading": CASES["rows given back behind the reading"],
    "chosen rows behind the summary": (ROWS, "summary", {**KEYS, "lengths": [8, 8]}),
    "summaries behind the chunks": CASES["summaries behind the chunks"],
}


def check(pool, travels, computed, case):
    """The order holds, and the record would show a rank that waits at once."""
    for events in pool.run(recorded, 2, case):
        assert_order(events, travels, computed)
    for events in pool.run(recorded, 2, case, True):
        with pytest.raises(AssertionError, match="waits before it computes"):
            assert_order(events, travels, computed)


@pytest.mark.parametrize("name", CASES)
def test_forward(pool, name):
    check(pool, *CASES[name])


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(pool, name):
    travels, computed, case = BACKWARD[name]
    check(pool, f"{travels} (backward)", f"{computed} (backward)", case)


def test_chosen_rows_and_summaries_travel_at_once(pool):
    """Keys need the gradients of summaries, but not yet those of the rows."""
    for events in pool.run(recorded, 2, {**KEYS, "lengths": [8, 8]}):
        waited = events.index(f"wait: {SUMMARIES}")
        assert events.index(f"start: {ROWS}") < waited < events.index(f"wait: {ROWS}")
        waited = events.index(f"wait: {SUMMARIES} (backward)")
        assert events.index(f"start: {ROWS} (backward)") < waited
        assert waited < events.index("begin: summary (backward)")


def repeated(group, rank, case):
    """The gradients of one graph, twice."""
    shard = shard_of(inputs_of(case), case, rank)
    upstream = shard.pop("upstream")
    sides = {name: side.requires_grad_() for name, side in shard.items()}
    out = TOGETHER[case["kind"]](**sides, **case["options"], group=group)
    wanted = [sides[name] for name in ("query", "key", "value")]
    return [torch.autograd.grad(out, wanted, upstream, retain_graph=True) for _ in range(2)]


@pytest.mark.parametrize("case", [DIAGONAL, KEYS], ids=["lln_diag", "lln_keys"])
def test_a_graph_can_be_used_again(pool, case):
    for first, second in pool.run(repeated, 2, {**case, "lengths": [6, 9]}):
        assert all(map(torch.equal, first, second))
