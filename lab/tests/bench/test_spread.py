"""Times with their noise: what is kept, marked and told, from timings that are given here."""

import json
import subprocess
import sys
import xml.etree.ElementTree as tree

import pytest
from lab.tests.commands import app
from typer.testing import CliRunner

from lln_lab.bench import attention_bench, environment, timing
from lln_lab.bench.attention_table import table_of, text_of
from lln_lab.bench.crossover import Crossover, crossover
from lln_lab.bench.load import Load
from lln_lab.bench.record import Record
from lln_lab.bench.speed_figure import draw_speed
from lln_lab.bench.spread import Timed, about, noise_note, timed, timed_in

SMALL = ("--device", "cpu", "--lengths", "16", "32", "--width", "8", "--seconds", "0.001")


def exact(times):
    return {n: Timed(value, value, value) for n, value in times.items()}


def spread(times, share):
    return {n: Timed(v, v * (1 - share), v * (1 + share)) for n, v in times.items()}


def test_median_and_quartiles_go_into_a_row_and_come_back():
    found = timed([4.0, 1.0, 2.0, 3.0, 5.0])
    assert found == Timed(3.0, 2.0, 4.0)
    row = found.times(10).fields("milliseconds")
    assert row == {"milliseconds": 30.0, "milliseconds_quartiles": [20.0, 40.0]}
    assert timed_in(row, "milliseconds") == Timed(30.0, 20.0, 40.0)
    assert timed_in(row, "graph_milliseconds") is None
    assert timed([7.0]) == Timed(7.0, 7.0, 7.0)
    # A file from before quartiles were kept.
    assert timed_in({"milliseconds": 2.0}, "milliseconds") == Timed(2.0, 2.0, 2.0)


def test_noisy_times_are_marked_and_counted():
    steady = Timed(10.0, 9.5, 10.5).fields("milliseconds")
    noisy = Timed(10.0, 8.0, 11.0).fields("milliseconds")
    assert about("10.0", steady, "milliseconds") == "10.0"
    assert about("10.0", noisy, "milliseconds") == "~10.0"
    assert noise_note([steady], ("milliseconds",)) == ""
    assert noise_note([steady, noisy], ("milliseconds",)).startswith("~ 1 time is noisy: ")
    assert noise_note([noisy, noisy], ("milliseconds",)).startswith("~ 2 times are noisy: ")


def test_crossover_is_where_two_lines_meet_in_the_log_log_plane():
    slow = exact({n: float(n) for n in (100, 1000, 10000)})
    found = crossover(slow, exact(dict.fromkeys(slow, 300.0)))
    assert found.place == pytest.approx(300.0)
    assert found.since == 1000
    assert crossover(slow, exact(dict.fromkeys(slow, 1.0))).verdict("faster") == "faster at every N"
    never = crossover(slow, exact(dict.fromkeys(slow, 1e6)))
    assert never == Crossover((100, 1000, 10000))
    assert never.verdict("faster") == "not faster at N = 10000"
    assert crossover({}, exact({1: 1.0})) is None


def test_equal_numbers_without_noise_are_not_unclear():
    same = exact({1: 2.0, 2: 2.0})
    assert crossover(same, same).verdict("smaller") == "not smaller at N = 2"
    assert crossover(exact({1: 2.0, 2: 4.0}), same).place == pytest.approx(1.0)


def test_crossover_is_the_last_one():
    slow = exact({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0})
    fast = exact({1: 2.0, 2: 0.5, 4: 2.0, 8: 0.5})
    assert 4 < crossover(slow, fast).place < 8


def test_noise_on_either_side_of_a_crossover_is_said_instead():
    slow, fast = {1: 1.0, 2: 2.0, 4: 4.0}, {1: 1.5, 2: 1.5, 4: 1.5}
    clear = crossover(spread(slow, 0.05), spread(fast, 0.05))
    assert 1 < clear.place < 2
    # Between one and two the order changes, but at two the middle halves of the runs overlap.
    unclear = crossover(spread(slow, 0.2), spread(fast, 0.2))
    assert unclear == Crossover((1, 2, 4), since=4, unclear=2)
    assert unclear.verdict("faster") == "faster from N = 4, within noise at N = 2"
    # The other side: below it clearly, above it not.
    near = {1: 1.1, 2: 1.1, 4: 1.1}
    unclear = crossover(spread(slow, 0.06), spread(near, 0.06))
    assert unclear == Crossover((1, 2, 4), since=2, unclear=1)
    lost = crossover(spread(slow, 0.9), spread(fast, 0.9))
    assert lost == Crossover((1, 2, 4), unclear=4)
    assert lost.verdict("faster") == "within noise at N = 4"


def test_a_difference_counts_if_it_is_larger_than_either_spread():
    softmax = Timed(0.8, 0.7, 0.9)
    assert Timed(2.0, 1.9, 2.1).differs_from(softmax)
    assert softmax.differs_from(Timed(2.0, 1.9, 2.1))
    # Three quarters of the runs are slower, but they lie further apart than that.
    assert not Timed(5.6, 2.0, 8.0).differs_from(softmax)
    # As far apart as the runs of either, but these overlap.
    assert not Timed(2.0, 1.0, 2.1).differs_from(Timed(3.2, 2.05, 3.3))


def row(operation, tokens, milliseconds, share, field="milliseconds"):
    found = Timed(milliseconds, milliseconds * (1 - share), milliseconds * (1 + share))
    return {
        "name": f"{operation} {tokens}",
        "operation": operation,
        "batch": 1,
        "heads": 12,
        "tokens": tokens,
        "width": 64,
        "dtype": "float32",
        "backward": False,
        "status": "timed",
        **found.fields(field),
    }


@pytest.mark.parametrize(
    ("share", "says", "lines"),
    [
        (0.01, "LLN + Diag: faster from N ≈ 181", 1),
        (0.4, "LLN + Diag: faster from N = 1024, within noise at N = 256", 0),
    ],
)
def test_a_figure_draws_no_crossover_from_noise(tmp_path, share, says, lines):
    cases = []
    for tokens, softmax, diag in ((128, 1.0, 1.5), (256, 2.0, 1.3333), (1024, 16.0, 2.0)):
        cases += [row("sdpa", tokens, softmax, share), row("lln_diag", tokens, diag, share)]
    results = {"environment": {"device": "x", "threads": 2, "torch": "2"}, "cases": cases}
    written = draw_speed(results, tmp_path / "speed.svg")
    assert says in " ".join(tree.parse(written[0]).getroot().itertext())
    # A dotted line is a path with dashes; grids and curves have none.
    dotted = [
        one.get("style", "")
        for one in tree.parse(written[0]).getroot().iter()
        if "stroke-dasharray" in one.get("style", "")
    ]
    assert len(dotted) == lines


def test_table_and_line_show_noisy_times_as_such():
    noisy, steady = row("lln", 128, 2.0, 0.3), row("sdpa", 128, 1.0, 0.01)
    heads, cells = table_of([steady, noisy])
    assert [line[heads.index("ms")] for line in cells] == ["1.000", "~2.000"]
    assert text_of(noisy) == "~2.000 ms"
    graph = row("lln", 128, 2.0, 0.3) | row("lln", 128, 1.0, 0.3, "graph_milliseconds")
    assert text_of(graph) == "~2.000 ms, as a CUDA graph ~1.000"


def test_few_long_runs_are_repeated_until_their_spread_shows(monkeypatch):
    first, *runs = [9.0, 4.0, 3.0, 5.0]
    clock = iter([first, *runs])
    monkeypatch.setattr(timing.timeit.Timer, "timeit", lambda self, calls: next(clock) * calls)
    found = timing.cpu_milliseconds(lambda: None, 0.1)
    assert found == Timed(4000.0, 3500.0, 4500.0), "the first run warms up"
    assert next(clock, None) is None


def test_short_calls_are_timed_in_blocks(monkeypatch):
    blocks = []

    def timeit(self, calls):
        blocks.append(calls)
        return 1e-5 * calls

    monkeypatch.setattr(timing.timeit.Timer, "timeit", timeit)
    found = timing.cpu_milliseconds(lambda: None, 0.02)
    assert found.median == pytest.approx(0.01)
    assert blocks[:4] == [1, 10, 100, 100]
    assert sum(blocks[3:]) * 1e-5 == pytest.approx(0.02)


def test_timing_on_a_cpu_does_not_look_for_cuda():
    """A CUDA build of torch warns on a machine without CUDA as soon as that module is loaded."""
    script = """
import sys
from lln_lab.bench import attention_bench, timing
from lln_lab.fitting import command
timing.cpu_milliseconds(int, 0.001)
print("torch.utils.cpp_extension" in sys.modules)
"""
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(attention_bench, "copy_speed", lambda device: 0.01)
    shown = {"lln": Timed(2.0, 1.5, 2.5)}

    def measure(operation, case, inputs, seconds):
        return shown.get(case.operation, Timed(1.0, 1.0, 1.0)).fields("milliseconds")

    monkeypatch.setattr(attention_bench, "measure", measure)


@pytest.mark.usefixtures("quick")
def test_bench_warns_of_load_keeps_it_and_counts_noisy_times(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "read_load", lambda: Load(1.4, 2))
    out = tmp_path / "results.json"
    words = ["bench", *SMALL, "--operations", "sdpa", "lln", "--out", str(out)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    said = " ".join(done.output.split())
    assert "This machine is not idle (other programs keep 1.4 of 2 cores busy): times" in said
    assert said.index("not idle") < said.index("a copy moves"), "before anything is timed"
    assert "~ 4 times are noisy: the middle half of the runs spans more than 20%" in said
    kept = json.loads(out.read_text())
    assert (kept["environment"]["busy_cores"], kept["environment"]["cores"]) == (1.4, 2)
    noisy = [row for row in kept["cases"] if row["operation"] == "lln"]
    assert all(row["milliseconds_quartiles"] == [1.5, 2.5] for row in noisy)
    # An idle machine is not talked about; the file remembers its busiest part.
    monkeypatch.setattr(environment, "read_load", lambda: Load(0.1, 2))
    done = CliRunner().invoke(app, [*words, "--resume"], catch_exceptions=False)
    assert "not idle" not in done.output
    assert json.loads(out.read_text())["environment"]["busy_cores"] == 1.4


def test_a_file_from_before_the_load_was_kept_can_be_resumed(tmp_path):
    path = tmp_path / "old.json"
    here = environment.describe("cpu", "lln bench", [].append)
    old = {name: value for name, value in here.items() if name not in ("cores", "busy_cores")}
    cases = [{"name": "a", "status": "timed", "milliseconds": 1.0}]
    path.write_text(json.dumps({"kind": "attention", "environment": old, "cases": cases}))
    record = Record(path, "attention", here, resume=True)
    assert record.rows == cases
    assert record.environment["busy_cores"] == 0.0


def test_a_gpus_median_and_quartiles_are_asked_for_by_name(monkeypatch):
    testing = pytest.importorskip("triton.testing")

    def do_bench(call, warmup, rep, quantiles):
        return [{0.25: 1.0, 0.5: 2.0, 0.75: 3.0}[each] for each in quantiles]

    monkeypatch.setattr(testing, "do_bench", do_bench)
    assert timing.gpu_milliseconds(lambda: None, 0.01) == Timed(2.0, 1.0, 3.0)
