"""The bytes that ranks really send are those of the cost model."""

import re

import pytest
import torch
import torch.distributed as dist
from tests.pages import ROOT, needs_pages
from tests.parallel.splits import TOGETHER, inputs_of, shard_of

from lln.parallel import collectives
from lln.parallel.agreement import trusting
from lln_lab.benchmarks.traffic import KINDS, LayerShape, layer_traffic

TOKENS = (8192, 65_536, 1_048_576)
CASES = {
    "given": {"options": {"alpha": 1.5, "beta": 1.5}},
    "matched": {},
    "grouped": {"heads": 4, "options": {"enable_gqa": True}},
    "float32": {"dtype": torch.float32},
    "known": {"lengths_known": True},
    "padded": {"hidden": [(0, 0, 2)]},
    "whole": {"lengths": [8, 4, 0, 7]},
    "padded behind": {"lengths": [8, 4, 0, 7], "hidden": [(0, 17, 19)]},
}


class Counter:
    """Counts, at the calls of torch.distributed, what leaves this rank for another one."""

    def __init__(self, rank, size):
        self.rank, self.size, self.sent, self.calls = rank, size, 0, 0

    def gather(self, out, own, **options):
        assert out.numel() == self.size * own.numel()
        self.calls += 1
        self.sent += (self.size - 1) * own.numel() * own.element_size()
        return REAL_GATHER(out, own, **options)

    def exchange(self, out, rows, receive, send, **options):
        self.calls += 1
        leaving = sum(rows.split(send)[one].numel() for one in range(self.size) if one != self.rank)
        self.sent += leaving * rows.element_size()
        return REAL_EXCHANGE(out, rows, receive, send, **options)

    def __enter__(self):
        collectives._all_gather, dist.all_to_all_single = self.gather, self.exchange
        return self

    def __exit__(self, *_):
        collectives._all_gather, dist.all_to_all_single = REAL_GATHER, REAL_EXCHANGE


REAL_GATHER, REAL_EXCHANGE = collectives._all_gather, dist.all_to_all_single


def counted(group, rank, case):
    """Bytes that a rank sends in the forward and in the backward pass."""
    shard = shard_of(inputs_of(case), case, rank)
    upstream = shard.pop("upstream")
    sides = {name: side.requires_grad_(side.is_floating_point()) for name, side in shard.items()}
    options = dict(case["options"], group=group)
    if case.get("lengths_known"):
        options["lengths"] = case["lengths"]
    # Not the first call of a group, which compares also where lengths are known.
    with trusting(), Counter(rank, group.size()) as forward:
        out = TOGETHER[case["kind"]](**sides, **options)
    with Counter(rank, group.size()) as backward:
        (out * upstream).sum().backward()
    return forward.sent, backward.sent


def shape_of(case):
    options = case["options"]
    hidden = case.get("hidden", ())
    return LayerShape(
        tuple(case["lengths"]),
        heads=case.get("heads", 2),
        width=5,
        batch=2,
        key_heads=2,
        value_width=3,
        dtype=case.get("dtype", torch.float64),
        block_size=4,
        keys=3,
        group_size=options.get("group_size"),
        matched="alpha" not in options,
        asked=not case.get("lengths_known"),
        masked=bool(hidden),
        padded=any(start == 0 for _, start, _ in hidden),
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", TOGETHER)
def test_what_ranks_send_is_what_the_model_says(pool, kind, name):
    case = {"kind": kind, "lengths": [3, 6, 0, 9], **CASES[name]}
    options = dict(case.get("options", {}))
    if kind != "lln":
        options["block_size"] = 4
    if kind == "lln_keys":
        options |= {"keys": 3, "group_size": 2} | ({"offset": 0.5} if "alpha" in options else {})
    case["options"] = options
    shape = shape_of(case)
    counts = pool.run(counted, 4, case)
    models = [layer_traffic(kind, shape, rank) for rank in range(4)]
    if kind != "lln_keys":
        assert counts == [sure(model) for model in models]
        return
    # Which rows travel depends on the data: at least none, at most as many as were wanted.
    for direction, steps in enumerate(("forward", "backward")):
        least = sum(sure(model)[direction] for model in models)
        most = sum(sum(getattr(model, steps).values()) for model in models)
        assert least < sum(count[direction] for count in counts) <= most


def sure(model):
    """The bytes that do not depend on the data."""
    return tuple(
        sum(sent for step, sent in side.items() if not step.endswith("at most"))
        for side in (model.forward, model.backward)
    )


def chosen_rows(group, rank, case):
    """How many rows this rank gets from others and lends to them, besides all bytes."""
    from lln.parallel import key_rows

    found, real = {}, key_rows._orders

    def orders(*arguments):
        told = real(*arguments)
        found["lent"] = sum(told.send) - told.send[rank]
        found["fetched"] = sum(told.receive) - told.receive[rank]
        return told

    key_rows._orders = orders
    try:
        return *counted(group, rank, case), found
    finally:
        key_rows._orders = real


def test_bytes_of_exact_keys_are_those_of_the_rows_chosen(pool):
    options = {"block_size": 4, "keys": 3}
    case = {"kind": "lln_keys", "lengths": [3, 6, 0, 9], "options": options}
    shape = shape_of(case)
    row = 8 * (5 + 3)
    everyone = pool.run(chosen_rows, 4, case)
    assert sum(rows["fetched"] for *_, rows in everyone) > 0
    for rank, (forward, backward, rows) in enumerate(everyone):
        model = layer_traffic("lln_keys", shape, rank)
        first, second = sure(model)
        assert forward == first + rows["lent"] * row + rows["fetched"] * 8
        assert backward == second + rows["fetched"] * row


def test_other_methods_send_more_the_longer_the_sequence():
    def total(kind, tokens):
        return layer_traffic(kind, LayerShape((tokens,) * 8, heads=16, width=64)).total

    assert total("lln", 1 << 20) == total("lln", 1 << 10)
    for kind in ("ring", "ulysses"):
        assert total(kind, 1 << 20) == 1024 * total(kind, 1 << 10)
    assert total("lln", 65_536) < total("ulysses", 65_536) / 50 < total("ring", 65_536)
    assert total("lln_keys", 65_536) < total("ring", 65_536)


@needs_pages
def test_the_table_of_the_page_is_what_the_model_says():
    page = (ROOT / "docs/parallel.md").read_text("utf-8")
    page = page.split("Megabytes that a rank sends")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `?(\w+)`?[^|]*\|(.+)\|$", page, re.MULTILINE))
    for kind in KINDS:
        shapes = [LayerShape((n // 8,) * 8, heads=16, width=64, asked=False) for n in TOKENS]
        expected = [f"{layer_traffic(kind, shape).total / 1e6:,.1f}" for shape in shapes]
        assert [cell.strip() for cell in rows[kind].split("|")] == expected, kind
