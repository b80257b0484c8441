"""How busy the machine is, told from counters that are given here."""

import os

import pytest

from lln.testing import doctor
from lln.testing import load as module
from lln.testing.load import Load, read_load

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


def test_doctor_prints_the_load(monkeypatch):
    for load, end in (
        (Load(0.0, 2), "load         other programs keep 0.0 of 2 cores busy"),
        (
            Load(1.4, 2),
            "load         other programs keep 1.4 of 2 cores busy; times measured now would be "
            "noisy",
        ),
        (Load(None, 2), "load         unknown on this system"),
    ):
        lines = []
        monkeypatch.setattr(doctor, "read_load", lambda load=load: load)
        doctor.examine(lines.append)
        assert end in lines


@pytest.mark.parametrize("where", ["why_not", "lln_diag_attention"])
def test_doctor_tells_of_a_failing_triton_in_one_line(monkeypatch, where):
    class CompilationError(Exception):
        pass

    own = getattr(doctor.ways if where == "why_not" else doctor, where)

    def fail(*given, impl):
        if impl != "triton":
            return own(*given, impl=impl)
        try:
            raise AssertionError("no room for a tile\nmore")
        except AssertionError as error:
            raise CompilationError("at 12:8:\ndef kernel(\n   ^") from error

    monkeypatch.setattr(doctor.ways, "why_not", lambda call, impl: None)
    monkeypatch.setattr(doctor.ways, "implementations", lambda kind: ("triton", "eager"))
    if where == "why_not":
        monkeypatch.setattr(doctor.ways, where, lambda call, impl: fail(call, impl=impl))
    else:
        monkeypatch.setattr(doctor, where, fail)
    monkeypatch.setattr(doctor, "read_load", lambda: Load(0.0, 2))
    lines = []
    assert not doctor.examine(lines.append)
    assert lines[-3].startswith("cpu          right")
    assert lines[-4] == "cpu          FAILED: CompilationError: no room for a tile, impl 'triton'"
