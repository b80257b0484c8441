"""Attentions on a CPU in turn: order, rounds, ratios, the table."""

import json
import os
import re
import time
from pathlib import Path

import pytest
import torch

from lln_lab.benchmarks import cpu_turns
from lln_lab.benchmarks.cpu_turns import (
    BASES,
    COMMAND,
    PASSES,
    RESULTS,
    example_table,
    ratio,
    turns_table,
)

ROOT = Path(__file__).parents[3]
NAMES = ("softmax", "lln", "lln matched", "lln_diag", "softmax causal", "lln causal")


def round_of(**milliseconds):
    """Times of one length: 1 ms, but for those that are given."""
    spent = dict.fromkeys(NAMES, 1.0) | {
        name.replace("_causal", " causal").replace("_matched", " matched"): one
        for name, one in milliseconds.items()
    }
    return {f"{name} 128 {call}": one for name in PASSES for call, one in spent.items()}


@pytest.fixture
def content():
    setup = {"device": "a CPU", "threads": 2, "torch": "2.13", "command": "c", "commit": "0" * 40}
    rounds = [round_of(softmax=3.0, lln_matched=1.1), round_of(softmax=4.0, lln_matched=1.3)]
    rounds.append(round_of(softmax=90.0, lln_matched=1.2))
    plain = [round_of(softmax=4.0, lln=2.0, lln_causal=4.0)] * 3
    ways = {"plain": plain, "compiled": rounds}
    return {"setup": setup, "before": None, "lengths": [128], "ways": ways}


def test_every_length_pass_and_call_is_timed():
    found = cpu_turns.measure([16, 32], 0.0)
    assert found.keys() == {
        f"{name} {tokens} {call}" for name in PASSES for tokens in (16, 32) for call in NAMES
    }
    assert min(found.values()) > 0


def test_the_calls_of_readme_are_timed_by_the_processor(monkeypatch):
    monkeypatch.setattr(cpu_turns, "WIDTH", 16)
    clocks = []
    monkeypatch.setattr(
        cpu_turns,
        "milliseconds",
        lambda call, clock: clocks.append(clock) or 1.0,
    )
    found = cpu_turns.measure([16], 0.0, is_example=True)
    assert set(clocks) == {time.process_time}
    assert found.keys() == {f"{name} 16 {call}" for name in PASSES for call in cpu_turns.example()}
    for attend in cpu_turns.example().values():
        assert attend(*torch.randn(3, 1, 2, 130, 16)).isfinite().all()


def test_the_table_of_what_readme_recommends_says_where_it_is_slower():
    times = {"softmax": 10.0, "lln_diag": 4.0, "lln_keys": 20.0, "diag": 2.0, "keys by query": 38.0}
    rounds = {f"{name} 256 {call}": spent for name in PASSES for call, spent in times.items()}
    setup = {"device": "A processor", "torch": "2.13", "command": COMMAND, "commit": "0" * 40}
    content = {"setup": setup, "lengths": [256], "ways": {"plain": [rounds, rounds]}}
    lines = example_table(content).splitlines()
    cells = "10.0 | 4.00 (2.5×) | 20.0 (0.5×) | 20.0 (0.5×)"
    assert lines[2] == f"| 256 | {cells} | {cells} |"
    assert "below 1 it is slower" in lines[-1]


def test_the_first_screen_of_readme_repeats_its_table():
    readme = (ROOT / "README.md").read_text("utf-8")
    first, rest = readme.split("## Install")
    numbers = re.findall(r"(\d+\.\d) times", first)
    assert len(numbers) == 4
    for number in numbers:
        assert f"{number}×" in rest, number


def test_the_causal_calls_are_causal():
    sides = torch.randn(3, 1, 2, 16, 64).unbind()
    for name, attend in cpu_turns.attentions().items():
        later = [side.clone() for side in sides]
        later[1][..., -1, :] += 1.0
        before, after = (attend(*given)[..., :-1, :] for given in (sides, later))
        assert torch.allclose(before, after, rtol=0, atol=1e-5) == name.endswith("causal")


def test_the_middle_round_counts(content):
    content["ways"]["plain"] = []
    assert ratio(content, "compiled", "forward 128", "lln", BASES[0]) == 4.0
    assert ratio(content, "compiled", "forward 128", "lln", "lln matched") == 1.2


def test_the_table_compares_with_softmax_of_the_same_turns(content):
    lines = turns_table(content).splitlines()
    ratios = "2.0×, 4.0× | 4.0×, 3.1× | 4.0×, 4.0× | -50 %, 20 % | 1 | 0.2×, 1.0×"
    assert lines[2] == f"| 128 | forward | 4 | {ratios} |"
    assert lines[3] == f"| 128 | fwd + bwd | 4 | {ratios} |"
    assert "before" not in lines[-1]
    content["before"] = "1234567890abc"
    assert "*before* is commit `1234567890`" in turns_table(content)


def test_an_older_tree_has_a_process_of_its_own(tmp_path):
    assert list(cpu_turns.ways(None)) == ["plain", "compiled"]
    found = cpu_turns.ways(tmp_path)
    kept = cpu_turns.KEEPS_MEMORY
    path = f"{tmp_path}{os.pathsep}{cpu_turns.LAB}"
    assert found["before"] == {"LLN_CPU": "torch", "PYTHONPATH": path, **kept}
    assert found["compiled"] == kept
    with pytest.raises(SystemExit, match="git worktree add"):
        cpu_turns.commit_of(tmp_path)


def test_every_way_had_five_rounds():
    content = json.loads((ROOT / RESULTS).read_text("utf-8"))
    assert all(len(rounds) == 5 for rounds in content["ways"].values())
