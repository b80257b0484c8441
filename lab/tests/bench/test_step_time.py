"""The simulated times: what they count, how they grow, and that the page shows them."""

from dataclasses import replace

import pytest
from lab.tests.bench.test_traffic import Counter
from tests.parallel.splits import inputs_of, shard_of

import lln
import lln.parallel
from lln.parallel.agreement import trusting
from lln_lab.benchmarks.step_time import Machine, layer_time
from lln_lab.benchmarks.traffic import KINDS, LayerShape, layer_traffic


def shape_of(tokens, ranks, **options):
    return LayerShape((tokens // ranks,) * ranks, heads=16, width=64, asked=False, **options)


def calls(group, rank, case):
    shard = shard_of(inputs_of(case), case, rank)
    upstream = shard.pop("upstream")
    sides = {name: side.requires_grad_() for name, side in shard.items()}
    attend = getattr(lln.parallel, f"{case['kind']}_attention")
    with trusting(), Counter(rank, group.size()) as forward:
        out = attend(**sides, **case["options"], group=group, lengths=case["lengths"])
    with Counter(rank, group.size()) as backward:
        (out * upstream).sum().backward()
    return forward.calls, backward.calls


@pytest.mark.parametrize("kind", ["lln", "lln_diag", "lln_keys"])
def test_a_latency_is_counted_for_every_collective(pool, kind):
    options = {"lln": {}, "lln_diag": {"block_size": 4}, "lln_keys": {"block_size": 4, "keys": 3}}
    case = {"kind": kind, "lengths": [8, 8], "options": options[kind]}
    shape = LayerShape((8, 8), heads=2, width=5, value_width=3, block_size=4, keys=3, asked=False)
    traffic = layer_traffic(kind, shape)
    for found in pool.run(calls, 2, case):
        assert found == (len(traffic.forward), len(traffic.backward))
    waiting = layer_time(kind, shape, Machine(collective_latency=1.0)).waiting
    assert waiting == len(traffic.forward) + len(traffic.backward)


def test_one_rank_neither_sends_nor_waits():
    for kind in KINDS:
        found = layer_time(kind, shape_of(65_536, 1))
        assert found.waiting == 0, kind
        assert kind == "ring" or found.transfer == 0, kind
        assert found.total == pytest.approx(found.passes), kind


def test_softmax_grows_with_the_square_and_ours_with_the_length():
    for kind, power in {"lln": 1, "lln_diag": 1, "ring": 2, "ulysses": 2}.items():
        short, long = (layer_time(kind, shape_of(n, 8)).passes for n in (2**18, 2**22))
        assert long / short == pytest.approx(16**power, rel=0.02), kind
    short, long = (layer_time("lln_keys", shape_of(n, 8)).passes for n in (2**18, 2**22))
    # Every key is scored with the mean query of every block: a square over the block size.
    assert 16 < long / short < 16**2


def test_every_assumption_counts():
    shape = shape_of(2**20, 16)
    before = {kind: layer_time(kind, shape) for kind in KINDS}
    for name, number in vars(Machine()).items():
        larger = Machine(**{name: type(number)(number * 2)})
        changed = [kind for kind in KINDS if layer_time(kind, shape, larger) != before[kind]]
        if name in ("node_bandwidth", "memory"):
            near = layer_time("lln", shape_of(2**20, 8), replace(Machine(), node_bandwidth=1e9))
            assert near.transfer > layer_time("lln", shape_of(2**20, 8)).transfer
            assert not layer_time("lln", shape, Machine(memory=1e6)).fits
        else:
            assert changed, name


def test_ulysses_has_no_more_ranks_than_heads():
    with pytest.raises(lln.InvalidInputError, match="16 key heads cannot be divided between 32"):
        layer_time("ulysses", shape_of(2**20, 32))
