"""Slow-downs beside busy programs: turns, pairs of phases, the table."""

import json
from pathlib import Path

import pytest

from lln_lab.benchmarks import under_load
from lln_lab.benchmarks.under_load import RESULTS, TITLES, load_table, phase, slow_downs

ROOT = Path(__file__).parents[3]


def pair(quiet, busy):
    names = [f"{name} {tokens}" for tokens in under_load.LENGTHS for name in TITLES]
    return {"quiet": dict.fromkeys(names, quiet), "busy": dict.fromkeys(names, busy)}


def test_a_phase_is_the_mean_of_its_rounds(monkeypatch):
    times = iter([1.0, 3.0])
    monkeypatch.setattr(under_load, "milliseconds", lambda call: next(times))
    monkeypatch.setattr(under_load, "in_turn", lambda timed, _: [{"a": timed["a"]()} for _ in "12"])
    assert phase({"a": print}, 1.0) == {"a": 2.0}


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
