"""Slow-downs beside busy programs: turns, pairs of phases, the table."""

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from lln_lab.benchmarks import under_load
from lln_lab.benchmarks.under_load import RESULTS, TITLES, load_table, phase, slow_downs

ROOT = Path(__file__).parents[3]


def pair(quiet, busy):
    names = [f"{name} {tokens}" for tokens in under_load.LENGTHS for name in TITLES]
    return {"quiet": dict.fromkeys(names, quiet), "busy": dict.fromkeys(names, busy)}


def test_calls_take_turns_in_changing_order(monkeypatch):
    order = []
    calls = {name: lambda name=name: order.append(name) for name in ("one", "two")}
    # Every look at the clock takes a second, so a round takes five.
    monkeypatch.setattr(under_load, "time", SimpleNamespace(perf_counter=count().__next__))
    assert phase(calls, 100) == {"one": 1e3, "two": 1e3}
    rounds = list(zip(order[::2], order[1::2], strict=True))
    assert len(rounds) == 20
    assert set(rounds) == {("one", "two"), ("two", "one")}
    order.clear()
    # Also a phase without time has a round.
    phase(calls, 0)
    assert sorted(order) == ["one", "two"]


def test_the_middle_pair_counts():
    found = slow_downs([pair(2.0, 4.0), pair(1.0, 9.0), pair(4.0, 10.0)])
    assert set(found.values()) == {2.5}


@pytest.fixture
def content():
    run = {"pairs": [pair(2.0, 5.0)], "passes": "compiled"}
    setup = {"device": "a CPU", "threads": 2, "torch": "2.13", "command": "c", "commit": "0" * 40}
    sizes = {"programs": 2, "seconds": 12.0, "pairs": 1}
    return {"setup": setup, **sizes, "runs": {"plain": run, "compiled": run}}


def test_the_table_has_every_call(content):
    lines = load_table(content).splitlines()
    assert lines[0] == (
        "| call | quiet ms, plain | slow-down, plain | quiet ms, compiled | slow-down, compiled |"
    )
    assert lines[3] == "| LLN, N = 256 | 2.0 | 2.50 | 2.0 | 2.50 |"
    assert len(lines) == 2 + 3 * len(TITLES) + 2
    assert "beside 2 programs that never rest" in lines[-1]
    del content["runs"]["compiled"]
    assert load_table(content).splitlines()[3] == "| LLN, N = 256 | 2.0 | 2.50 |"
    for pairs in content["runs"]["plain"]["pairs"]:
        pairs["quiet"] = {name: 1.0 for name in pairs["quiet"] if not name.endswith(" 256")}
    # Results without a length have a table, too.
    assert len(load_table(content).splitlines()) == 2 + 2 * len(TITLES) + 2


def test_calls_are_those_of_the_table():
    names = {f"{name} {tokens}" for tokens in under_load.LENGTHS for name in TITLES}
    assert under_load.calls().keys() == names


@pytest.mark.parametrize("end", ["", "-x86"])
def test_the_passes_are_those_that_were_asked_for(end):
    content = json.loads((ROOT / f"{RESULTS.with_suffix('')}{end}.json").read_text("utf-8"))
    assert content["runs"]["compiled"]["passes"] == "compiled"
    assert content["runs"]["plain"]["passes"].startswith("LLN_CPU=torch")
