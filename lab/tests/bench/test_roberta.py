"""`lln bench roberta`: the model, its attentions, and the table of training steps."""

import json
from functools import partial

import pytest
import torch
from lab.tests.commands import app
from typer.testing import CliRunner

from lln import reference
from lln.cpu.building import find_compiler
from lln.errors import InvalidInputError
from lln_lab.bench import roberta_bench
from lln_lab.bench.roberta import SYSTEMS, Roberta, RobertaSize, TrainingStep, naive_softmax
from lln_lab.bench.roberta_bench import RobertaCell, filling_tokens, measure_cell, plan
from lln_lab.bench.roberta_figure import draw_roberta
from lln_lab.bench.roberta_table import table_of

ON_GPU = torch.cuda.is_available()
TINY = {"heads": 2, "width": 32, "inner": 64, "words": 50}
SMALL = ("--device", "cpu", "--lengths", "64", "128", "--layers", "1", "--seconds", "0.001")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(roberta_bench, "RobertaSize", partial(RobertaSize, **TINY))


def roberta(*words):
    return CliRunner().invoke(app, ["bench", "roberta", *words], catch_exceptions=False)


def rows_of(path):
    return json.loads(path.read_text())["cases"]


def test_default_size_is_roberta_base():
    model = Roberta(RobertaSize(layers=1), 512, SYSTEMS["lln"][1])
    layer = sum(weight.numel() for weight in model.layers.parameters())
    # Query, key, value, out; feed-forward; two norms.
    assert layer == 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    rest = sum(weight.numel() for weight in model.parameters()) - layer
    head = 768 * 768 + 768 + 2 * 768 + 50265
    assert rest == 50265 * 768 + 512 * 768 + 2 * 768 + head


@pytest.mark.parametrize("attend", [naive_softmax, SYSTEMS["softmax_sdpa"][1](RobertaSize())])
def test_softmaxes_are_softmax(attend):
    query, key, value = torch.randn(3, 2, 2, 128, 8)
    expected = reference.softmax_attention(query, key, value).float()
    torch.testing.assert_close(attend(query, key, value), expected)


def test_blocks_are_block_diagonal_softmax_for_strided_views():
    split = torch.randn(2, 100, 3, 2, 8)
    query, key, value = (side.transpose(1, 2) for side in split.unbind(2))
    expected = reference.block_diagonal_attention(query, key, value, 64).float()
    attend = SYSTEMS["diag"][1](RobertaSize())
    torch.testing.assert_close(attend(query, key, value), expected)


@pytest.mark.parametrize("name", SYSTEMS)
def test_training_learns_its_batch(name):
    size = RobertaSize(layers=2, dropout=0.0, **TINY)
    training = TrainingStep(size, SYSTEMS[name][1], batch=2, tokens=64, device="cpu")
    losses = [training.step().item() for _ in range(25)]
    assert losses[-1] < 0.9 * losses[0]
    moved = [weight for weight in training.model.parameters() if training.optimiser.state[weight]]
    assert len(moved) == len(list(training.model.parameters()))


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_captured_step_takes_the_steps_that_a_called_one_takes(name):
    size = RobertaSize(layers=2, dropout=0.0, **TINY)
    called, replayed = (TrainingStep(size, SYSTEMS[name][1], 2, 64, "cuda") for _ in range(2))
    replay = replayed.captured()
    # Three steps warm up; the capture itself takes none.
    losses = [called.step().item() for _ in range(10)]
    again = [replay().item() for _ in range(7)]
    torch.testing.assert_close(torch.tensor(again), torch.tensor(losses[3:]), rtol=1e-2, atol=1e-2)
    assert again[-1] < losses[0]


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.skipif(not ON_GPU, reason="needs a GPU")),
    ],
)
@pytest.mark.parametrize("name", ["softmax_sdpa", "lln", "lln_diag"])
def test_a_compiled_model_takes_the_steps_that_a_plain_one_takes(name, device):
    """Under ``mode="reduce-overhead"``, which replays CUDA graphs on a GPU."""
    if find_compiler() is None:
        pytest.skip("Inductor needs a C++ compiler")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    size = RobertaSize(layers=2, dropout=0.0, **TINY)
    plain, compiled = (
        TrainingStep(size, SYSTEMS[name][1], 2, 64, device, mode)
        for mode in (None, "reduce-overhead")
    )
    losses, again = ([one.step().item() for _ in range(8)] for one in (plain, compiled))
    near = 1e-2 if device == "cuda" else 1e-4
    torch.testing.assert_close(torch.tensor(again), torch.tensor(losses), rtol=near, atol=near)
    assert torch._dynamo.utils.counters["graph_break"] == {}
    if device == "cuda":
        assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.slow
def test_table_runs_on_a_cpu(tmp_path):
    out = tmp_path / "roberta.json"
    done = roberta(*SMALL, "--out", str(out), "--figure")
    assert done.exit_code == 0, done.output
    results = json.loads(out.read_text())
    assert results["kind"] == "roberta"
    assert results["model"]["layers"] == 1
    assert results["autocast"] is None
    rows = {row["name"]: row for row in results["cases"]}
    assert len(rows) == 2 * 2 * len(SYSTEMS)
    assert rows["filled: lln B4 N64"]["status"] == "timed"
    assert all(row["milliseconds"] > 0 for row in rows.values())
    assert "Nyströmformer" in done.output
    assert "256 tokens per batch" in done.output
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".png", ".svg"]


@pytest.mark.slow
def test_interrupt_and_resume(tmp_path, monkeypatch):
    out, calls, measure = tmp_path / "roberta.json", [], roberta_bench.measure_cell

    def interrupted(cell, *rest):
        calls.append(cell)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(cell, *rest)

    monkeypatch.setattr(roberta_bench, "measure_cell", interrupted)
    words = [*SMALL, "--systems", "lln", "diag", "--out", str(out)]
    done = CliRunner().invoke(app, ["bench", "roberta", *words])
    assert done.exit_code == 130 or isinstance(done.exception, KeyboardInterrupt)
    assert len(rows_of(out)) == 2
    assert roberta(*words, "--resume").exit_code == 0
    assert len(rows_of(out)) == 8
    assert len(calls) == 3 + 6


def test_resume_refuses_cells_of_another_model(tmp_path):
    out = tmp_path / "roberta.json"
    words = (*SMALL, "--systems", "lln", "--tokens", "0", "--out", str(out))
    assert roberta(*words).exit_code == 0
    before = out.read_text()
    with pytest.raises(InvalidInputError, match=r"its model is .*'layers': 1.*'layers': 2"):
        roberta(*words, "--layers", "2", "--resume")
    assert out.read_text() == before


@pytest.mark.slow
def test_out_of_memory_is_a_cell_and_longer_ones_are_not_tried(tmp_path, monkeypatch):
    tried = []

    def fail(cell, size, device, seconds):
        tried.append((cell.system, cell.tokens))
        if cell.system == "softmax_naive" and cell.tokens > 64:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return {"status": "timed", "milliseconds": 1.0, "peak_bytes": 2e9}

    monkeypatch.setattr(roberta_bench, "_measure", fail)
    out = tmp_path / "roberta.json"
    words = ("--device", "cpu", "--lengths", "64", "128", "256", "--tokens", "0")
    done = roberta(*words, "--systems", "softmax_naive", "lln", "--out", str(out))
    assert done.exit_code == 0
    assert ("softmax_naive", 256) not in tried
    heads, cells = table_of(rows_of(out), "batch 1")
    assert heads == ["", "64", "128", "256"]
    assert cells[0] == ["GB, softmax (N×N written)", "2.0", "out of memory", "out of memory"]
    assert cells[1] == ["GB, LLN", "2.0", "2.0", "2.0"]
    results = json.loads(out.read_text())
    written = draw_roberta(results, tmp_path / "figure.svg")
    assert written[0].read_text().count("out of memory") == 1
    assert "dashed" not in written[0].read_text()
    replayed = [row | {"part": "graph"} for row in results["cases"] if row["system"] == "lln"]
    results["cases"] += replayed
    assert "dashed" in draw_roberta(results, tmp_path / "figure.svg")[0].read_text()


def test_memory_of_a_cell_is_free_before_the_next(monkeypatch):
    import gc
    import weakref

    models = []
    step = TrainingStep.step

    def fail(self):
        models.append(weakref.ref(self.model))
        step(self)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(TrainingStep, "step", fail)
    size = RobertaSize(layers=1, **TINY)
    row = measure_cell(RobertaCell("batch 1", "lln", 1, 64), size, "cpu", 0.001)
    assert row["status"] == "out of memory"
    gc.collect()
    assert models[0]() is None


def test_a_loss_that_is_no_number_fails_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingStep, "step", lambda self: torch.tensor(torch.nan))
    out = tmp_path / "roberta.json"
    assert roberta(*SMALL, "--systems", "lln", "--out", str(out)).exit_code == 1
    assert {row["reason"] for row in rows_of(out)} == {
        "FloatingPointError: the loss is not a number"
    }


@pytest.mark.slow
def test_a_step_that_would_take_too_long_is_not_tried(tmp_path, monkeypatch):
    def slow(cell, size, device, seconds):
        second = 4.1 if cell.system == "softmax_sdpa" else 3.9
        return {"status": "timed", "milliseconds": 1e3 * second}

    monkeypatch.setattr(roberta_bench, "_measure", slow)
    monkeypatch.setattr(roberta_bench, "PATIENCE", 16.0)
    out = tmp_path / "roberta.json"
    words = ("--device", "cpu", "--lengths", "64", "128", "256", "--tokens", "0")
    assert roberta(*words, "--systems", "softmax_sdpa", "lln", "--out", str(out)).exit_code == 0
    _, cells = table_of(rows_of(out), "batch 1")
    assert cells == [
        ["ms, softmax (SDPA)", "4100", "over 16 s", ""],
        ["ms, LLN", "3900", "3900", "3900"],
    ]


def test_plan_doubles_behind_the_papers_lengths_and_fills_with_equal_tokens():
    cells = plan(None, ["lln"], 65536, graphs=True)
    single = [cell.tokens for cell in cells if cell.part == "batch 1"]
    assert single[:7] == [512, 1024, 2048, 4096, 8192, 16384, 32768]
    graphs = [cell for cell in cells if cell.part == "graph"]
    assert [(cell.batch, cell.tokens) for cell in graphs] == [(1, n) for n in single[:6]]
    assert not [c for c in plan(None, ["lln"], 65536, graphs=False) if c.part == "graph"]
    filled = [cell for cell in cells if cell.part == "filled"]
    assert [cell.tokens for cell in filled] == single[:6]
    assert {cell.batch * cell.tokens for cell in filled} == {65536}
    assert filling_tokens("cpu", (64, 128)) == 256
    asked = plan([32768, 512, 131072], ["lln"], 65536, graphs=True)
    assert [(cell.part, cell.batch, cell.tokens) for cell in asked] == [
        *(("batch 1", 1, tokens) for tokens in (512, 32768, 131072)),
        ("graph", 1, 512),
        ("filled", 128, 512),
        ("filled", 2, 32768),
    ]
