"""What takes turns: the order of calls, and processes of their own."""

import subprocess
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from lln_lab.benchmarks import turns
from lln_lab.benchmarks.turns import forward_and_both, in_own_process, in_turn, milliseconds


def test_calls_take_turns_in_changing_order(monkeypatch):
    order = []

    def timed(name):
        return lambda: order.append(name) or milliseconds(lambda: None)

    # Every look at the clock takes a second, so a round of both takes five.
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=count().__next__))
    calls = {name: timed(name) for name in ("one", "two")}
    assert in_turn(calls, 100) == [{"one": 1e3, "two": 1e3}] * 20
    rounds = list(zip(order[::2], order[1::2], strict=True))
    assert len(rounds) == 20
    assert set(rounds) == {("one", "two"), ("two", "one")}


@pytest.mark.parametrize(
    ("seconds", "bounds", "rounds"),
    [(0, {}, 1), (0, {"fewest": 7}, 7), (1e9, {"most": 3}, 3), (0, {"fewest": 2, "most": 3}, 2)],
)
def test_how_many_rounds(seconds, bounds, rounds):
    assert in_turn({"one": lambda: 1.0}, seconds, **bounds) == [{"one": 1.0}] * rounds


def test_both_passes_of_a_call():
    inputs = [torch.ones(3, requires_grad=True) for _ in range(2)]
    forward, both = forward_and_both(lambda a, b: 2 * a * b, inputs, torch.ones(3))
    (out,) = forward()
    assert not out.requires_grad
    again, *gradients = both()
    assert again.requires_grad
    assert [gradient.tolist() for gradient in gradients] == [[2.0] * 3] * 2


def test_a_process_has_an_environment_of_its_own(tmp_path, monkeypatch):
    lines = ["import json, os, sys", "case = sys.argv[2].removeprefix('--case=')"]
    lines += ["json.dump([sys.argv[1], os.environ.get('A'), os.environ.get('B')], open(case, 'w'))"]
    (tmp_path / "leaves_a_case.py").write_text("\n".join(lines))
    monkeypatch.setenv("A", "removed")
    path = {"PYTHONPATH": str(tmp_path), "A": None, "B": "2"}
    assert in_own_process(["leaves_a_case", "word"], path) == ["word", None, "2"]
    with pytest.raises(subprocess.CalledProcessError):
        in_own_process(["no_such_module"], {})
