"""The table of one layer over ranks: where its ratios come from."""

import pytest

from lln_lab.benchmarks import parallel_layer
from lln_lab.benchmarks.parallel_layer import WAYS, compared, layer_table, turn_of

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


def test_ways_are_compared_round_by_round():
    rounds = [{"top level": 2.0 * slow, "several": 8.0 * slow} for slow in (1, 5, 2)]
    assert compared(rounds, "several") == pytest.approx([4.0] * 3)


def test_one_rank_goes_the_way_of_several_in_its_turn(monkeypatch):
    seen = []
    before = parallel_layer.together.is_alone
    monkeypatch.setattr(parallel_layer, "CALLS", 2)
    for way in WAYS:
        turn_of(way, lambda: seen.append(parallel_layer.together.is_alone is before), "cpu")
    assert seen == [True, True, True, True, False, False]
