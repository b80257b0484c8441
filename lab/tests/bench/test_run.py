"""`lln bench`: the file it leaves behind, whatever happens on the way."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from lab.tests.commands import app
from typer.testing import CliRunner

from lln.cli import main
from lln.errors import InvalidInputError
from lln_lab.bench import attention_bench, suites, timing
from lln_lab.bench.attention_table import table_of, text_of
from lln_lab.bench.cases import Case
from lln_lab.bench.operations import OPERATIONS
from lln_lab.cli import add_to

SMALL = ("--device", "cpu", "--lengths", "16", "32", "--width", "8", "--seconds", "0.001")
FEW = ("--operations", "sdpa", "lln")


@pytest.fixture(autouse=True)
def _quick_copy(monkeypatch):
    monkeypatch.setattr(attention_bench, "copy_speed", lambda device: 0.01)


def bench(*words):
    return CliRunner().invoke(app, ["bench", *words], catch_exceptions=False)


def rows_of(path):
    return json.loads(path.read_text())["cases"]


def swap(monkeypatch, name, function):
    monkeypatch.setitem(OPERATIONS, name, replace(OPERATIONS[name], run=function))


def test_every_case_is_timed_compared_and_printed(tmp_path):
    out = tmp_path / "deep" / "results.json"
    done = bench(*SMALL, "--out", str(out))
    assert done.exit_code == 0, done.output
    results = json.loads(out.read_text())
    assert results["kind"] == "attention"
    assert results["environment"]["command"] == (
        "lln bench --device cpu --lengths 16 32 --width 8 --seconds 0.001"
    )
    assert results["copy_terabytes_per_second"] == 0.01
    rows = {row["name"]: row for row in results["cases"]}
    assert len(rows) == 24
    row = rows["lln forward+backward B1 H12 N32 D8 float32"]
    assert row["status"] == "timed"
    assert row["error"] <= row["allowed"]
    unit = 12 * 32 * 8 * 4 / (0.01 * 1e9)
    assert row["floors"] == pytest.approx(row["milliseconds"] / (11 * unit))
    assert row["units"] == pytest.approx(11 * row["floors"])
    base = rows["sdpa forward+backward B1 H12 N32 D8 float32"]
    assert row["softmax_ratio"] == pytest.approx(base["milliseconds"] / row["milliseconds"])
    assert row["peak_bytes"] >= 8 * 12 * 32 * 8 * 4 * 0.9
    assert row["memory_ratio"] == pytest.approx(row["peak_bytes"] / (8 * 12 * 32 * 8 * 4))
    for word in ("softmax (SDPA)", "LLN + Diag", "vs softmax", "floors", str(out)):
        assert word in done.output.replace("\n", "")
    assert list(out.parent.iterdir()) == [out], "a temporary file was left behind"


def test_an_interrupt_leaves_a_whole_file_and_resume_goes_on(tmp_path, monkeypatch):
    out, calls = tmp_path / "results.json", []

    def interrupted(case, *rest):
        calls.append(case.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(case, *rest)

    measure = attention_bench.measure_case
    monkeypatch.setattr(attention_bench, "measure_case", interrupted)
    done = CliRunner().invoke(app, ["bench", *SMALL, *FEW, "--out", str(out)])
    assert done.exit_code == 130 or isinstance(done.exception, KeyboardInterrupt)
    assert "--resume" in done.output
    assert [row["name"] for row in rows_of(out)] == calls[:2]
    before = rows_of(out)
    done = bench(*SMALL, *FEW, "--out", str(out), "--resume")
    assert done.exit_code == 0, done.output
    assert len(calls) == 3 + 6
    after = rows_of(out)
    assert len(after) == 8
    assert [row["milliseconds"] for row in after[:2]] == [row["milliseconds"] for row in before]


def test_an_interrupt_before_the_first_case_leaves_a_whole_file(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(attention_bench, "measure_case", stop)
    done = CliRunner().invoke(app, ["bench", *SMALL, "--out", str(tmp_path / "results.json")])
    assert done.exit_code == 130 or isinstance(done.exception, KeyboardInterrupt)
    assert rows_of(tmp_path / "results.json") == []


def test_resume_refuses_measurements_from_elsewhere(tmp_path):
    out = tmp_path / "results.json"
    bench(*SMALL, *FEW, "--passes", "forward", "--out", str(out))
    results = json.loads(out.read_text())
    results["environment"]["device"] = "another machine"
    out.write_text(json.dumps(results))
    with pytest.raises(InvalidInputError, match="its device is 'another machine'"):
        bench(*SMALL, *FEW, "--out", str(out), "--resume")
    assert json.loads(out.read_text()) == results


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"kind": "roberta", "cases": []}'])
def test_resume_refuses_files_of_other_programs(tmp_path, text):
    out = tmp_path / "results.json"
    out.write_text(text)
    with pytest.raises(InvalidInputError, match="not a file of this command"):
        bench(*SMALL, "--out", str(out), "--resume")
    assert out.read_text() == text


def test_resume_with_other_options_keeps_both_commands(tmp_path):
    out = tmp_path / "results.json"
    common = ("--device", "cpu", "--width", "8", "--seconds", "0.001", "--operations", "sdpa")
    for length in ("16", "32"):
        done = bench(*common, "--lengths", length, "--out", str(out), "--resume")
        assert done.exit_code == 0
    results = json.loads(out.read_text())
    assert len(results["cases"]) == 4
    assert "--lengths 16 " in results["environment"]["command"]
    assert "; lln bench" in results["environment"]["command"]


def test_a_wrong_operation_prints_its_error_and_fails_the_command(tmp_path, monkeypatch):
    right = OPERATIONS["lln"].run
    swap(monkeypatch, "lln", lambda *inputs: right(*inputs) * 1.01)
    out = tmp_path / "results.json"
    done = bench(*SMALL, *FEW, "--out", str(out))
    assert done.exit_code == 1
    name = "lln forward B1 H12 N16 D8 float32"
    row = next(one for one in rows_of(out) if one["name"] == name)
    sentence = (
        f"{name}: refused and not timed, because its output differs from float64 by "
        f"{row['error']:.1e}, and {row['allowed']:.1e} is allowed"
    )
    assert sentence in done.output
    assert "4 of 8 cases have no time for these reasons; the others were measured" in done.output
    assert done.output.count("refused") >= 8, "a line and a cell each"
    wrong = [row for row in rows_of(out) if row["operation"] == "lln"]
    assert all(row["status"] == "wrong" and "milliseconds" not in row for row in wrong)
    assert all("milliseconds" in row for row in rows_of(out) if row["operation"] == "sdpa")


@pytest.mark.slow
def test_a_refused_case_is_judged_again_by_resume(tmp_path, monkeypatch):
    right, out = OPERATIONS["lln"].run, tmp_path / "results.json"
    with monkeypatch.context() as patch:
        swap(patch, "lln", lambda *inputs: right(*inputs) * 1.01)
        assert bench(*SMALL, *FEW, "--out", str(out)).exit_code == 1
    done = bench(*SMALL, *FEW, "--out", str(out), "--resume")
    assert done.exit_code == 0, done.output
    assert {row["status"] for row in rows_of(out)} == {"timed"}
    assert len(rows_of(out)) == 8


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        pytest.param(
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 12345 bytes"),
            marks=pytest.mark.slow,
        ),
        pytest.param(MemoryError(), marks=pytest.mark.slow),
    ],
)
def test_out_of_memory_is_a_row_and_the_next_case_runs(tmp_path, monkeypatch, error):
    def fail(*_):
        raise error

    swap(monkeypatch, "sdpa", fail)
    out = tmp_path / "results.json"
    done = bench(*SMALL, *FEW, "--out", str(out))
    assert done.exit_code == 0
    assert "out of memory" in done.output
    states = {row["operation"]: row["status"] for row in rows_of(out)}
    assert states == {"sdpa": "out of memory", "lln": "timed"}


def test_failures_of_ours_fail_the_command_and_are_tried_again(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel for this\nand more")

    out = tmp_path / "results.json"
    with monkeypatch.context() as patch:
        swap(patch, "lln", fail)
        assert bench(*SMALL, *FEW, "--out", str(out)).exit_code == 1
    (reason,) = {row["reason"] for row in rows_of(out) if row["operation"] == "lln"}
    assert reason == "RuntimeError: no kernel for this"
    assert bench(*SMALL, *FEW, "--out", str(out), "--resume").exit_code == 0
    assert {row["status"] for row in rows_of(out)} == {"timed"}


@pytest.mark.slow
def test_a_rival_that_lacks_a_shape_does_not_fail_the_command(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("No available kernel. Aborting execution.")

    swap(monkeypatch, "sdpa", fail)
    assert bench(*SMALL, *FEW, "--out", str(tmp_path / "r.json")).exit_code == 0


def test_an_operation_whose_package_is_missing_is_left_out_with_a_sentence(tmp_path, monkeypatch):
    missing = replace(OPERATIONS["fla_causal"], missing=lambda: "it needs the package fla")
    monkeypatch.setitem(OPERATIONS, "fla_causal", missing)
    out = tmp_path / "results.json"
    done = bench(*SMALL, "--operations", "sdpa_causal", "fla_causal", "--out", str(out))
    assert "No rows for fla_causal: it needs the package fla." in done.output
    assert {row["operation"] for row in rows_of(out)} == {"sdpa_causal"}


def test_a_fall_back_to_plain_pytorch_is_noted(tmp_path, monkeypatch):
    import warnings

    right = OPERATIONS["lln"].run

    def warn(*inputs):
        warnings.warn("lln runs in plain PyTorch here", stacklevel=2)
        return right(*inputs)

    swap(monkeypatch, "lln", warn)
    out = tmp_path / "results.json"
    bench(*SMALL, "--operations", "lln", "--out", str(out))
    assert all(row["note"] == "lln runs in plain PyTorch here" for row in rows_of(out))


def test_threads_are_put_back(tmp_path):
    before = torch.get_num_threads()
    out = tmp_path / "results.json"
    bench(*SMALL, "--operations", "sdpa", "--threads", "1", "--out", str(out))
    assert json.loads(out.read_text())["environment"]["threads"] == 1
    assert torch.get_num_threads() == before


def test_help_teaches():
    text = " ".join(bench("--help").output.split())
    for word in ("--resume", "--figure", "roberta", "floors", "CUDA graph", "Ctrl-C", "minutes"):
        assert word in text


def test_lengths_are_whole_numbers_written_in_a_row_or_with_commas(tmp_path):
    done = bench("--lengths", "many")
    assert done.exit_code == 2
    assert "Invalid value for '--lengths'" in done.output
    assert bench("--lengths").exit_code == 2
    out = tmp_path / "results.json"
    common = ("--device", "cpu", "--width", "8", "--operations", "sdpa", "--passes", "forward")
    for words in (("--lengths", "8", "16"), ("--lengths", "8,16"), ("--lengths=8,16",)):
        assert bench(*common, *words, "--seconds", "0.001", "--out", str(out)).exit_code == 0
        assert [row["tokens"] for row in rows_of(out)] == [8, 16]


def test_our_errors_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lln", "bench", "--device", "abacus"])
    with pytest.raises(SystemExit) as stop:
        main(add_to)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "lln: --device must be cpu or cuda, got 'abacus'.\n"


# Suites


def test_gpu_suite_covers_what_is_asked():
    cases = suites.default_cases("cuda")
    assert len({case.name for case in cases}) == len(cases)
    main = {(c.operation, c.tokens, c.backward) for c in cases if c.width == 64 and c.batch > 1}
    for tokens in (512, 1024, 2048, 4096, 8192, 16384):
        for name in ("sdpa_flash", "sdpa_cudnn", "lln", "lln_matched", "lln_diag"):
            assert {(name, tokens, False), (name, tokens, True)} <= main
    assert {c.width for c in cases} == {32, 64, 128, 256}
    assert {c.operation for c in cases} == set(OPERATIONS) - {"sdpa", "sdpa_causal"}
    assert not any(c.backward for c in cases if c.operation.endswith("decode"))
    assert all(c.dtype == "bfloat16" and c.heads == 12 for c in cases)


def test_operations_and_passes_choose_from_the_suite():
    cases = suites.choose_cases("cuda", operations=["lln"], passes=["forward"])
    assert {(c.operation, c.backward) for c in cases} == {("lln", False)}
    assert {c.width for c in cases} == {32, 64, 128, 256}
    chosen = suites.choose_cases("cuda", lengths=[256], operations=["lln"], width=96)
    assert chosen == [
        Case("lln", 256, 12, 256, 96, "bfloat16", backward) for backward in (False, True)
    ]


# Timing and the terminal


def test_peak_memory_counts_the_square_matrices_of_naive_softmax():
    query, key, value = torch.randn(3, 1, 2, 64, 8)
    square = 2 * 64 * 64 * 4
    peak = timing.cpu_peak(lambda: (query @ key.mT).softmax(-1) @ value)
    assert peak == 2 * square
    assert timing.cpu_peak(lambda: query.view(-1)) == 0


def test_gpu_peak_waits_until_the_last_calls_gradients_are_gone(monkeypatch):
    allocated, order = iter([700, 400, 100, 100]), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "memory_allocated", lambda: order.append("look") or next(allocated)
    )
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: order.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 900)
    assert timing.gpu_peak(lambda: order.append("call")) == 800
    assert order == [*["look"] * 4, "reset", "call"]


def test_a_problem_is_written_where_the_time_would_be():
    case = {"name": "x", "operation": "lln", "backward": False, "batch": 1, "tokens": 8}
    case |= {"width": 4, "status": "out of memory"}
    heads, cells = table_of([case])
    assert cells[0][heads.index("ms")] == "out of memory"
    assert "graph ms" not in heads
    assert text_of(case) == "out of memory"


def test_help_names_every_operation():
    help_text = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "500"}).output
    words = set(re.findall(r"[a-z_0-9]+", help_text))
    assert words >= set(OPERATIONS)


@pytest.mark.slow
def test_a_killed_run_leaves_a_whole_file_that_resume_goes_on_with(tmp_path):
    out = tmp_path / "results.json"
    lengths = [str(16 * length) for length in range(1, 13)]
    words = ["bench", "--device", "cpu", "--lengths", *lengths, "--width", "8", *FEW]
    words += ["--seconds", "0.05", "--out", str(out)]
    start = [sys.executable, "-m", "lln_lab", *words, "--resume"]
    for rows in (1, 9, 23):
        process = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 200
        # Whoever reads meanwhile finds a whole file too.
        while not (out.exists() and len(rows_of(out)) >= rows):
            assert process.poll() is None or len(rows_of(out)) >= rows
            assert time.monotonic() < end
        process.kill()
        process.wait()
        assert len(rows_of(out)) >= rows
    subprocess.run(start, check=True, capture_output=True, timeout=200)
    names = [row["name"] for row in rows_of(out)]
    assert len(names) == len(set(names)) == 4 * len(lengths)


@pytest.mark.slow
def test_two_runs_with_one_file_leave_the_whole_results_of_one(tmp_path):
    out = tmp_path / "results.json"
    words = ["bench", *SMALL, *FEW, "--out", str(out)]
    both = [
        subprocess.Popen([sys.executable, "-m", "lln_lab", *words], stdout=subprocess.DEVNULL)
        for _ in range(2)
    ]
    while any(process.poll() is None for process in both):
        if out.exists():
            rows_of(out)
    assert [process.returncode for process in both] == [0, 0]
    assert len(rows_of(out)) == 8
    assert list(tmp_path.iterdir()) == [out]
