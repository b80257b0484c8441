"""The command line of the experiments, and every experiment from end to end at the smoke scale."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lln.errors import InvalidInputError
from lln_lab.experiments import __main__ as commands
from lln_lab.experiments import cells
from lln_lab.experiments.__main__ import main
from lln_lab.experiments.catalogue import EXPERIMENTS
from lln_lab.experiments.cells import read_all
from lln_lab.experiments.experiment import SCALES
from lln_lab.experiments.methods import Method
from lln_lab.experiments.side_by_side import Job, run_side_by_side
from lln_lab.experiments.training import share_of_batch


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs_and_is_not_run_twice(name, tmp_path, capsys):
    out, work = tmp_path / "out", tmp_path / "work"
    command = ["run", name, "--scale", "smoke", "--method", "diag/lln_keys", "--seed", "0"]
    command += ["--out", str(out), "--work", str(work)]
    assert main(command) == 0
    tasks = EXPERIMENTS[name].plans["smoke"]
    assert f"{len(tasks)} cells run, 0 were finished" in capsys.readouterr().out
    assert main(command) == 0
    assert f"0 cells run, {len(tasks)} were finished" in capsys.readouterr().out
    found = read_all(out, name, "smoke")
    assert {cell["cell"]["task"] for cell in found} == set(tasks)
    for cell in found:
        assert ("chosen" in cell) == (tasks[cell["cell"]["task"]].recipe.choices > 0)
    # What can be repeated, without folders of this machine.
    assert all(str(tmp_path) not in str(cell) for cell in found)
    page = tmp_path / "page.html"
    command = ["report", name, "--scale", "smoke", "--out", str(out), "--page", str(page)]
    assert main(command) == 0
    table, html = capsys.readouterr().out, page.read_text("utf-8")
    assert all(task in table and f"<th>{task}</th>" in html for task in tasks)
    # The training loss of every task, and what was measured on the way.
    observed = sum(3 for cell in found if "observed" in cell)
    assert html.count("<svg") == len(tasks) + observed
    assert bool(observed) == any(plan.observed for plan in tasks.values())
    assert EXPERIMENTS[name].title in page.with_suffix(".md").read_text("utf-8")
    assert main(["status", name, "--scale", "smoke", "--out", str(out)]) == 0
    assert "1 of" in capsys.readouterr().out


def test_encoders_are_trained_before_what_starts_from_them(tmp_path, monkeypatch):
    stages = []

    def record(jobs, most, minutes):
        stages.append([job.title for job in jobs])
        return ["one: its.log"] if len(stages) == 2 else []

    monkeypatch.setattr(commands, "run_side_by_side", record)
    shared = ["--scale", "smoke", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    command = ["run", "table1", *shared, "--task", "cola", "mlm", "--method", "diag", "--seed", "0"]
    # One of them failed, which the exit status says.
    assert main([*command, "--jobs", "2"]) == 1
    assert stages == [["mlm diag 0"], ["cola diag 0"]]


def test_what_fails_and_what_has_no_time_is_said(tmp_path):
    lines = []
    jobs = [
        Job("good", [sys.executable, "-c", "print('fine')"], tmp_path / "good.log"),
        Job("bad", [sys.executable, "-c", "raise SystemExit('broken')"], tmp_path / "bad.log"),
    ]
    failed = run_side_by_side(jobs, 1, echo=lines.append, pause=0.02)
    assert failed == [f"bad: {tmp_path / 'bad.log'}"]
    assert lines[0].endswith("good: fine")
    assert lines[1].endswith("bad: broken")
    late = [Job("long", [sys.executable, "-c", "import time; time.sleep(0.3)"], tmp_path / "l.log")]
    assert run_side_by_side([*late, jobs[1]], 1, 0.001, lines.append, 0.02) == []
    assert "no time for 1 more: bad" in lines[-2:][0] + lines[-1]


def test_the_list_names_everything(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    for experiment in EXPERIMENTS.values():
        assert experiment.title in text
        for method in experiment.methods:
            Method.parse(method)
            assert method in text.split()
        assert set(experiment.plans) == set(SCALES)
        for task in (*experiment.plans["small"], *experiment.plans["full"]):
            assert task in text.split()
        rows = {method.removesuffix("+conv") for method in experiment.methods}
        assert {"softmax", "diag"} <= rows
        assert len(experiment.seeds) >= 3
        assert experiment.needs_data <= set(experiment.plans["small"])
    assert max(map(len, text.splitlines())) <= 100


def test_mistakes_get_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("LLN_DATA", raising=False)
    shared = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--seed", "0"]
    for words, said in (
        (["run", "lra", "--task", "nothing"], "has no task 'nothing'"),
        (["run", "lra", "--method", "nothing"], "nothing"),
        (["run", "lra", "--task", "text", "--method", "lln"], "LLN_DATA"),
        (["run", "table1", "--task", "sst2", "--scale", "smoke"], "run --task mlm"),
    ):
        assert main([*words, *shared]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error


@pytest.mark.parametrize("command", ["run", "time"])
def test_published_cells_come_from_a_commit(command, tmp_path, capsys, monkeypatch):
    asked = []

    def uncommitted(*places):
        asked.append(places)
        return True

    monkeypatch.setattr(cells, "uncommitted", uncommitted)
    monkeypatch.setattr(cells, "PUBLISHED", tmp_path / "results")
    words = [command, "lra", "--scale", "smoke", "--task", "listops", "--method", "diag"]
    words += ["--work", str(tmp_path / "work"), "--out"]
    assert main([*words, str(tmp_path / "results/cells")]) == 2
    assert "uncommitted changes" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()
    # Both the library and the laboratory count, but not the results, which lie beside lab/src.
    assert [Path(place).parts[-2:] for place in asked[0]] == [("src", "lln"), ("lab", "src")]
    monkeypatch.setattr(cells, "uncommitted", lambda *places: False)
    cells.check_publishable(tmp_path / "results/cells")


def test_a_step_of_every_method_is_timed_once(tmp_path, capsys):
    command = [
        "time",
        "lra",
        "--scale",
        "smoke",
        "--task",
        "listops",
        "--method",
        "softmax",
        "diag",
    ]
    command += ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "2 measured" in text
    assert "| Softmax attention |" in text
    kept = json.loads((tmp_path / "out/lra/smoke-costs.json").read_text("utf-8"))["costs"]
    assert all(kept["listops"][name]["milliseconds"] > 0 for name in ("softmax", "diag"))
    command[command.index("diag")] = "elu"
    assert main(command) == 0
    assert "1 measured" in capsys.readouterr().out


def test_table_2_is_measured_by_the_benchmark(tmp_path, monkeypatch, capsys):
    called = []

    def record(words, check):
        called.append(words)
        return subprocess.CompletedProcess(words, 3)

    monkeypatch.setattr(subprocess, "run", record)
    assert main(["run", "table2", "--scale", "smoke", "--out", str(tmp_path)]) == 3
    assert called[0][1:5] == ["-m", "lln_lab", "bench", "roberta"]
    assert "--resume" not in called[0]
    assert main(["report", "table2", "--out", str(tmp_path)]) == 0
    assert "One training step, batch 1" in capsys.readouterr().out
    assert main(["report", "table2", "--scale", "full", "--out", str(tmp_path)]) == 0
    assert "Nothing was run yet" in capsys.readouterr().out


@pytest.mark.slow
def test_processes_of_torchrun_share_every_batch(tmp_path):
    shared = ["-m", "lln_lab.experiments", "run", "lra", "--scale", "smoke", "--task", "listops"]
    shared += ["--method", "lln", "--seed", "0", "--work", str(tmp_path / "work")]
    both = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    curves = []
    for name, start in (("one", [sys.executable]), ("two", both)):
        out = tmp_path / name
        done = subprocess.run(
            [*start, *shared, "--out", str(out)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("1 cells run") == 1
        curves.append(read_all(out, "lra", "smoke")[0]["curve"])
    # The mean of two halves is that of the whole, up to rounding.
    for one, two in zip(*curves, strict=True):
        assert one == pytest.approx(two, abs=2e-5)


def test_a_batch_that_cannot_be_shared_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InvalidInputError, match="cannot be shared by 3 processes"):
        share_of_batch(4)
    assert share_of_batch(6) == 2
