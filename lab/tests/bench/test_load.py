"""How busy the machine is, told from counters that are given here."""

import os

import pytest

from lln_lab.bench import load as module
from lln_lab.bench.load import Load, read_load

# user nice system idle iowait irq softirq steal guest guest_nice
STAT = """cpu  0 0 0 0 0 0 0 0 0 0
cpu0 {0} 0 50 9000 100 0 0 0 0 0
cpu1 100 0 50 9000 100 0 0 {1} 0 0
cpu2 {2} 0 0 0 0 0 0 0 0 0
intr 1 2 3
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of three processors, two of them ours, whose clock moves when somebody sleeps."""
    clock = {"now": 100.0, "own": 7.0}
    stat, before = tmp_path / "stat", {"user": 1000, "steal": 10, "other": 5}

    def write():
        stat.write_text(STAT.format(*before.values()))

    def pass_time(seconds, user=0, steal=0, own=0.0):
        clock["now"] += seconds
        clock["own"] += own
        before["user"] += user
        before["steal"] += steal
        before["other"] += 500
        write()

    write()
    monkeypatch.setattr(module, "_STAT", stat)
    monkeypatch.setattr(module, "own_cpus", lambda: {0, 1})
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(module.time, "process_time", lambda: clock["own"])
    return lambda **used: monkeypatch.setattr(
        module.time, "sleep", lambda seconds: pass_time(seconds, **used)
    )


def test_the_work_of_others_is_what_is_not_ours(machine):
    machine(user=60, steal=10)
    assert read_load(0.5) == Load(pytest.approx(1.4), 2)
    machine(user=60, own=0.6)
    assert read_load(0.5) == Load(pytest.approx(0.0), 2)
    machine()
    assert read_load(0.5).busy == 0.0


def test_systems_that_tell_less(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_STAT", tmp_path / "nothing")
    monkeypatch.setattr(module, "own_cpus", lambda: set(range(4)))
    monkeypatch.setattr(os, "getloadavg", lambda: (1.25, 0.0, 0.0), raising=False)
    assert read_load() == Load(1.25, 4, averaged=True)
    monkeypatch.delattr(os, "getloadavg")
    assert read_load() == Load(None, 4)
    (tmp_path / "nothing").write_text("cpu0 0 0 0 0 0 0 0 0\n")
    assert read_load() == Load(None, 4)


@pytest.mark.parametrize(
    ("load", "is_high"),
    [
        (Load(0.1, 2), False),
        (Load(0.4, 2), True),
        (Load(2.0, 64), False),
        (Load(9.0, 64), True),
        (Load(None, 2), False),
    ],
)
def test_a_high_load_is_one_sentence(load, is_high):
    assert load.is_high is is_high
    assert bool(load.warning) is is_high
    assert load.warning.count(". ") == 0
