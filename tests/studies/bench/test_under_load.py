"""Slow-downs beside busy programs: turns, pairs of phases, the table."""

import json
from pathlib import Path

import pytest
from benchmarks import under_load
from benchmarks.under_load import PAGE, RESULTS, TITLES, load_table, phase, slow_downs

ROOT = Path(__file__).parents[3]


def pair(quiet, busy):
    names = [f"{name} {tokens}" for tokens in under_load.LENGTHS for name in TITLES]
    return {"quiet": dict.fromkeys(names, quiet), "busy": dict.fromkeys(names, busy)}


def test_calls_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in ("one", "two")}
    found = phase(calls, 0.01)
    assert set(found) == {"one", "two"}
    assert all(taken >= 0 for taken in found.values())
    # However many rounds there was time for.
    assert order == ["one", "two"] * (len(order) // 2)
    # Also a phase without time has a round.
    assert phase(calls, 0.0).keys() == found.keys()


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
    assert lines[3] == "| LLN, N = 512 | 2.0 | 2.50 | 2.0 | 2.50 |"
    assert len(lines) == 2 + 2 * len(TITLES) + 2
    assert "beside 2 programs that never rest" in lines[-1]
    del content["runs"]["compiled"]
    assert load_table(content).splitlines()[3] == "| LLN, N = 512 | 2.0 | 2.50 |"


def test_calls_are_those_of_the_table():
    names = {f"{name} {tokens}" for tokens in under_load.LENGTHS for name in TITLES}
    assert under_load.calls().keys() == names


def test_the_published_table():
    content = json.loads((ROOT / RESULTS).read_text("utf-8"))
    assert load_table(content) in (ROOT / PAGE).read_text("utf-8")
    assert content["runs"]["compiled"]["passes"] == "compiled"
    assert content["runs"]["plain"]["passes"].startswith("LLN_CPU=torch")
