"""`lln bench peers`: what is built, what is measured, where it stops, and what is shown."""

import json
from dataclasses import replace

import pytest
import torch
from lab.tests.commands import app
from typer.testing import CliRunner

from lln.errors import InvalidInputError
from lln_lab import peers
from lln_lab.bench import peers_bench, peers_cells
from lln_lab.bench.peers_bench import plan
from lln_lab.bench.peers_cells import (
    ALONE,
    FILLED,
    FRAME,
    LayerSize,
    PeerCell,
    build_layers,
    foreseen,
    measure_cell,
)
from lln_lab.bench.peers_figure import draw_peers
from lln_lab.bench.peers_table import TABLES, Measure, table_of
from lln_lab.bench.spread import Timed
from lln_lab.documents.peer_tables import efficiency, summary

TINY = LayerSize(32, 2, "float32")
FEW = ("--systems", "softmax", "elu", FRAME)
SMALL = ("--device", "cpu", "--lengths", "32", "64", "--tokens", "128", "--seconds", "0.001")
TIME = Measure(ALONE, "both", "milliseconds")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(peers_bench.SIZES, "cpu", TINY)


def bench(*words):
    return CliRunner().invoke(app, ["bench", "peers", *words], catch_exceptions=False)


def row(tokens, system="softmax", status="timed", batch=1, part=ALONE, **more):
    cell = PeerCell(part, system, "both", batch, tokens)
    known = {"milliseconds": 10.0, "peak_bytes": 1e6, "weights_bytes": 1e5, "setup_seconds": 0.01}
    found = known if status == "timed" else {}
    fields = {"part": part, "system": system, "passes": "both", "batch": batch, "tokens": tokens}
    return {"name": cell.name, **fields, "status": status, **found, **more}


def results(*rows):
    environment = {"device": "machine", "threads": 2, "torch": "2", "commit": "0123456789ab"}
    environment |= {"command": "lln bench peers", "triton": None}
    layer = {"width": 32, "heads": 2, "dtype": "float32"}
    return {"environment": environment, "layer": layer, "limit_seconds": 5.0, "cases": list(rows)}


def test_command_measures_draws_and_exits_with_zero(tmp_path):
    out = tmp_path / "peers.json"
    done = bench(*SMALL, *FEW, "--out", str(out), "--figure")
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert found["kind"] == "peers"
    assert found["layer"] == {"width": 32, "heads": 2, "dtype": "float32"}
    rows = {one["name"]: one for one in found["cases"]}
    # Three systems, two passes; batch 1 at two lengths, and 128 tokens at both.
    assert len(rows) == 3 * 2 * 4
    assert all(one["status"] == "timed" for one in rows.values())
    assert all(one["milliseconds"] > 0 and one["peak_bytes"] > 0 for one in rows.values())
    assert rows["filled: elu both B4 N32"]["batch"] == 4
    assert "Milliseconds, forward + backward, 128 tokens per batch" in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "peers-memory.png",
        "peers-memory.svg",
        "peers-time.png",
        "peers-time.svg",
        "peers.json",
    ]


def test_lengths_that_the_second_part_leaves_out_are_said(tmp_path):
    said = "The second part leaves out N = 40, 64: a batch of 50 tokens does not hold two"
    words = ("--device", "cpu", "--systems", "elu", "--seconds", "0.001")
    done = bench(*words, "--lengths", "64", "40", "--tokens", "50", "--out", str(tmp_path / "a"))
    assert said in " ".join(done.output.split())
    # One sample of all tokens is the first part's; 0 asks for no second part.
    for tokens in ("64", "0"):
        more = ("--lengths", "16", "64", "--tokens", tokens, "--out", str(tmp_path / tokens))
        assert "leaves out" not in bench(*words, *more).output


def test_unknown_systems_get_all_names_that_are_allowed():
    with pytest.raises(InvalidInputError, match=f"lion_s.*{FRAME}, got foo"):
        bench("--device", "cpu", "--systems", "foo", FRAME)


@pytest.mark.parametrize("name", peers.available())
@pytest.mark.parametrize("passes", ["forward", "both"])
def test_every_system_can_be_measured(name, passes):
    cell = PeerCell(ALONE, name, passes, 2, 64)
    found = measure_cell(cell, LayerSize(64, 2, "float32"), "cpu", 1e-6, 60.0)
    assert found["status"] == "timed", found


def test_interrupt_and_resume(tmp_path, monkeypatch):
    out, calls, measure = tmp_path / "peers.json", [], peers_bench.measure_cell

    def interrupted(cell, *rest):
        calls.append(cell.name)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return measure(cell, *rest)

    monkeypatch.setattr(peers_bench, "measure_cell", interrupted)
    words = ["bench", "peers", *SMALL, *FEW, "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 130 or isinstance(done.exception, KeyboardInterrupt)
    assert len(json.loads(out.read_text())["cases"]) == 5
    assert bench(*words[2:], "--resume").exit_code == 0
    assert len(json.loads(out.read_text())["cases"]) == 24
    assert len(calls) == 6 + 19


def test_a_call_over_the_limit_is_made_twice_at_most(monkeypatch):
    calls = []

    def spent(call):
        calls.append(call)
        return 0.02

    monkeypatch.setattr(peers_cells, "_seconds_of", spent)
    found = measure_cell(PeerCell(ALONE, "softmax", "forward", 1, 8), TINY, "cpu", 0.1, 0.01)
    assert found["status"] == "over 0.01 s"
    assert "milliseconds" not in found
    assert len(calls) == 2


def test_a_slow_call_is_timed_by_the_clock(monkeypatch):
    # The first call compiles; the median of the three after it.
    times = iter([9.0, 0.4, 0.9, 0.6])
    monkeypatch.setattr(peers_cells, "_seconds_of", lambda call: next(times))
    found = measure_cell(PeerCell(ALONE, "elu", "forward", 1, 8), TINY, "cpu", 0.1, 5.0)
    assert found["milliseconds"] == 600.0
    assert next(times, None) is None


@pytest.mark.slow
def test_numbers_that_are_not_finite_fail(tmp_path, monkeypatch):
    class Broken(torch.nn.Module):
        def forward(self, x):
            return x / 0.0

    monkeypatch.setattr(peers_cells, "build_layers", lambda *_: Broken())
    out = tmp_path / "peers.json"
    done = bench(*SMALL, "--systems", "elu", "--out", str(out))
    assert done.exit_code == 1
    assert "the output is not finite" in done.output
    assert {one["status"] for one in json.loads(out.read_text())["cases"]} == {"failed"}


def test_out_of_memory_is_a_cell_and_longer_ones_are_not_tried(tmp_path, monkeypatch):
    tried = []

    def fail(cell, *_):
        tried.append((cell.system, cell.part, cell.tokens))
        if cell.system == "softmax" and cell.tokens > 32:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return {"status": "timed", "milliseconds": 1.0, "peak_bytes": 2e6, "weights_bytes": 1} | {
            "setup_seconds": 0.0
        }

    monkeypatch.setattr(peers_cells, "_measure", fail)
    out = tmp_path / "peers.json"
    words = ("--device", "cpu", "--lengths", "32", "64", "128", "--tokens", "0")
    assert bench(*words, "--systems", "softmax", "elu", "--out", str(out)).exit_code == 0
    assert ("softmax", ALONE, 128) not in tried
    assert ("elu", ALONE, 128) in tried
    found = json.loads(out.read_text())
    heads, lines = table_of(found, TIME)
    assert heads == ["", "32", "64", "128"]
    assert lines == [
        ["softmax", "1.00", "out of memory", "out of memory"],
        ["elu", "1.00", "1.00", "1.00"],
    ]
    assert "softmax ×" in draw_peers(found, tmp_path / "figure.svg")[0].read_text()


@pytest.mark.parametrize(
    ("system", "before", "tokens", "expected"),
    [
        # 10 ms at 64 are 2.6 s at 1024 if quadratic.
        ("softmax", {}, 1024, None),
        ("softmax", {}, 4096, "over 1 s"),
        ("elu", {}, 4096, None),
        ("elu", {"milliseconds": 60.0}, 4096, "over 1 s"),
        ("elu", {"peak_bytes": 1e30}, 128, "out of memory"),
        ("elu", {"weights_bytes": 1e30}, 128, "out of memory"),
        ("elu", {"weights_bytes": 2e9, "setup_seconds": 4.0}, 128, "over 10 s"),
        ("elu", {"status": "over 1 s"}, 128, "over 1 s"),
        ("elu", {"status": "failed"}, 128, None),
        (FRAME, {}, 4096, "over 1 s"),
    ],
)
def test_what_shorter_lengths_foretell(monkeypatch, system, before, tokens, expected):
    monkeypatch.setattr(peers_cells, "_memory", lambda device: int(1e12))
    cell = PeerCell(ALONE, system, "both", 1, tokens)
    others = [row(tokens, system, part=FILLED), row(32, "lln"), row(2 * tokens, system)]
    told = foreseen(cell, [row(64, system, **before), *others], "cpu", 1.0)
    assert (told and told["status"]) == expected


def test_batches_of_equal_tokens_grow_slower():
    cell = PeerCell(FILLED, "softmax", "both", 1, 4096)
    told = foreseen(cell, [row(64, part=FILLED, batch=64)], "cpu", 1.0)
    assert told is None


def test_blocks_are_measured_as_one_layer(monkeypatch):
    monkeypatch.setattr(
        peers_cells.peers, "card", lambda name: replace(peers.find(name).card, kind="block")
    )
    layers = build_layers("elu", TINY, 64)
    assert isinstance(layers, peers.Encoder)
    assert isinstance(build_layers(FRAME, TINY, 64), peers.Encoder)


def test_layers_that_differ_are_measured_by_their_period(monkeypatch):
    real = peers.find("elu").card
    monkeypatch.setattr(peers_cells.peers, "card", lambda name: replace(real, period=3))
    layers = build_layers("elu", TINY, 64)
    assert [(one.host.layer, one.host.layers) for one in layers] == [(0, 3), (1, 3), (2, 3)]
    monkeypatch.setattr(
        peers_cells, "milliseconds", lambda call, seconds, on_gpu: Timed(30.0, 27.0, 33.0)
    )
    monkeypatch.setattr(peers_cells, "peak_bytes", lambda call, on_gpu: 0)
    cell = PeerCell(ALONE, "elu", "forward", 1, 64)
    found = measure_cell(cell, TINY, "cpu", 0.01, 5.0)
    assert found["milliseconds"] == 10.0
    assert found["milliseconds_quartiles"] == pytest.approx([9.0, 11.0])
    weights = 4 * 3 * 4 * (32 * 32 + 32)
    assert found["weights_bytes"] == weights
    assert found["peak_bytes"] == (weights + 4 * 64 * 32) / 3


def test_a_system_that_cost_the_process_is_not_tried_again():
    fatal = row(64, "elu", "failed", fatal=True)
    told = foreseen(PeerCell(FILLED, "elu", "forward", 4, 32), [fatal], "cpu", 1.0)
    assert told == {"status": "failed", "reason": "not tried after batch 1: elu both B1 N64"}
    assert foreseen(PeerCell(FILLED, "lln", "forward", 4, 32), [fatal], "cpu", 1.0) is None


def test_plan():
    cells = plan([256, 1024], None, 1024)
    assert {cell.system for cell in cells} == {FRAME, *peers.available()}
    own = [cell for cell in cells if cell.system == "elu"]
    shapes = {(cell.part, cell.batch, cell.tokens) for cell in own}
    assert shapes == {(ALONE, 1, 256), (ALONE, 1, 1024), (FILLED, 4, 256)}
    assert len(own) == 2 * len(shapes)
    parts = [cell.part for cell in cells]
    assert parts == sorted(parts, key=[ALONE, FILLED].index)


def test_page_and_readme_are_made_of_results(tmp_path):
    rows = [row(256, "softmax", milliseconds=4.0), row(1024, "softmax", milliseconds=64.0)]
    rows += [row(256, "elu", milliseconds=2.0), row(1024, "elu", "over 5 s")]
    page = efficiency(results(*rows))
    assert "| system | fwd + bwd ms, 256 | 1024 | fwd + bwd MB, 256 | 1024 |" in page
    assert "| `elu` | 2.00 | over 5 s | 1.00 | over 5 s |" in page
    assert "0123456789`" in page
    lines = summary(results(*rows)).splitlines()
    assert lines[0] == "| family | systems | fastest at N = 1,024 |"
    assert lines[2].endswith("| `softmax`, 64.00 ms |")
    assert any("`elu`" in line and line.endswith("|  |") for line in lines)
    assert summary(None).splitlines()[0] == "| family | systems |"


def test_tables_without_rows_are_left_out():
    for measure in TABLES:
        assert table_of(results(), measure) == ([], [])
