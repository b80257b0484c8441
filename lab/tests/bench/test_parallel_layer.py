"""The table of one layer over ranks: where its ratios come from."""

import pytest

from lln_lab.benchmarks import parallel_layer
from lln_lab.benchmarks.parallel_layer import WAYS, compared, in_turn, layer_table

SETUP = {"device": "GPU", "command": "make", "commit": "abc"}


def rows_of(**more):
    both = {"top level": 2.0, "alone": 3.0}
    size = {"kind": "lln", "tokens": 1024, "forward_ms": 1.0, "peak_gib": None, "tensors_gib": 1.0}
    return [
        {**size, "way": way, "both_ms": time, **more.get(way, {})} for way, time in both.items()
    ]


def table_of(rows):
    return layer_table({"setup": SETUP, "heads": 2, "width": 4, "rows": rows})


def test_old_results_keep_the_ratio_of_their_times():
    assert "| `lln` | 1,024 | one rank alone | 1.00 | 3.00 | 1.50 |  |  |" in table_of(rows_of())


def test_ratios_of_rounds_come_with_their_quartiles():
    page = table_of(rows_of(alone={"both_ratio": [0.9, 1.01, 1.1]}))
    assert "| 3.00 | 1.01 (0.90–1.10) |" in page
    assert "took turns" in page


def test_every_way_has_its_turn_in_every_round(monkeypatch):
    order = []

    def timed(call, _):
        order.append(call())
        return {"top level": 2.0, "alone": 3.0, "several": 8.0}[order[-1]]

    monkeypatch.setattr(parallel_layer, "milliseconds", timed)
    calls = {way: (lambda way=way: way) for way in WAYS}
    rounds = in_turn(calls, "cpu", rounds=5, seconds=0.0)
    assert len(rounds) == 5
    turns = [order[start : start + 3] for start in range(0, len(order), 3)]
    assert len(turns) == 6
    assert all(sorted(turn) == sorted(WAYS) for turn in turns)
    assert {turn[0] for turn in turns} == set(WAYS)
    assert compared(rounds, "several") == pytest.approx([4.0] * 3)
