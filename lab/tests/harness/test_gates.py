"""The gates of the tables: their recipes train, go on where they were, and are judged honestly."""

import itertools
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lln.errors import InvalidInputError
from lln_lab.experiments import gates
from lln_lab.experiments.captured import Course, Phase, Steps, train_captured
from lln_lab.experiments.cells import Cell, read_all, write
from lln_lab.experiments.gate_data import Place, Words
from lln_lab.experiments.gate_fresh import Paths, Trees
from lln_lab.experiments.gate_hosts import (
    Frame,
    PathHost,
    PhotoHost,
    ShiftedSum,
    TreeHost,
    WordHost,
    framed_encoder,
)
from lln_lab.experiments.gates import NAME, gate_of, main, measured
from lln_lab.experiments.hosts import Sizes
from lln_lab.experiments.tasks.made_ahead import MadeAhead

FRAME = Frame(Sizes(1, 16, 2, 32, 64))
STAGES = ((4, (2, 3)), (4, (2, 3, 4)))
# They wait for the device, or send it something: neither can be in a graph.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "is_nonzero", "equal")


def trees(folder, workers=0):
    Trees.FILE = 16
    return Trees(Place(None, folder, workers), 8, 64, STAGES, tested=6)


@pytest.fixture(autouse=True)
def _whole_files(monkeypatch):
    monkeypatch.setattr(Trees, "FILE", Trees.FILE)
    monkeypatch.setattr(Paths, "FILE", 12)


def words(folder):
    rng = np.random.default_rng(0)
    parts = {part: rng.integers(3, 40, (9, 32)).astype(np.uint16)
             for part in ("train", "valid", "test")}  # fmt: skip
    path = folder / "data" / "words-32-40.npz"
    path.parent.mkdir(parents=True)
    np.savez(path, **parts, code=np.array([40, 1, 3, 40]))
    return Words(Place(None, folder, 0), 4, 32, 40)


def trained(folder, course, until=None, looks=None):
    source = trees(folder)
    source.open(torch.device("cpu"))
    torch.manual_seed(0)
    model = source.host("softmax", FRAME)
    found = train_captured(
        model, source, course, folder / "kept.pt", capture=False, until=until,
        look=lambda: measured(model, source.tests("valid"))[0],
        tell=looks or (lambda step, words: None),
    )  # fmt: skip
    return model, found


def test_a_training_that_was_stopped_ends_as_one_that_was_not(tmp_path, monkeypatch):
    course = Course((Phase(3, 1e-2), Phase(5, 1e-3)), 8, points=4)
    whole, first = trained(tmp_path / "a", course)
    clock = itertools.count()
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    assert trained(tmp_path / "b", course, until=9)[1] is None
    monkeypatch.undo()
    Trees.FILE = 16
    seen = []
    resumed, second = trained(tmp_path / "b", course, looks=lambda step, words: seen.append(step))
    assert 1 < seen[0] < 8
    assert second["curve"][-1][2:] == first["curve"][-1][2:]
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], weight, rtol=0, atol=0)


def test_the_rate_rises_and_falls_in_every_phase():
    course = Course((Phase(10, 1.0, 0.2), Phase(10, 0.5, 0.2)), 1)
    rates = [course.rate_at(step) for step in range(20)]
    assert rates[0] == 0.5
    assert max(rates[:10]) == 1.0
    assert rates[9] == pytest.approx(0.125)
    assert rates[10:] == pytest.approx([rate / 2 for rate in rates[:10]])


class Noted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.waiting = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in WAITING:
            self.waiting.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def longs(*shape):
    return torch.ones(shape, dtype=torch.int64)


# LLN is left out: what it does on a GPU is not what it does here.
@pytest.mark.parametrize("method", ["softmax", "elu", "nystromformer"])
@pytest.mark.parametrize(
    ("build", "batch"),
    [
        (
            lambda name: WordHost(name, Frame(FRAME.sizes, convolution=True), 40),
            {"ids": longs(2, 64), "places": longs(2, 9), "labels": longs(2, 9)},
        ),
        (
            lambda name: WordHost(name, Frame(FRAME.sizes, rotary=True), 40),
            {"ids": longs(2, 64), "places": longs(2, 9), "labels": longs(2, 9)},
        ),
        (lambda name: TreeHost(name, FRAME, 16, 10), {"ids": longs(2, 64), "labels": longs(2)}),
        (
            lambda name: PhotoHost(name, Frame(Sizes(1, 16, 2, 32, 256)), 2),
            {"photos": torch.ones(2, 3, 64, 64), "labels": torch.ones(2, 2) / 2},
        ),
        (
            lambda name: PathHost(name, Frame(Sizes(1, 16, 2, 32, 256)), 2),
            {"pixels": torch.ones(2, 32, 32), "covered": torch.ones(2, 32, 32)},
        ),
        (
            lambda name: PathHost(name, Frame(Sizes(1, 16, 2, 32, 256)), 2),
            {"pixels": torch.ones(2, 32, 32), "labels": longs(2)},
        ),
    ],
    ids=["words", "rotary", "trees", "photos", "painting", "paths"],
)
def test_a_step_never_waits_for_the_device(method, build, batch):
    steps = Steps(build(method), Course((Phase(2, 1e-3),), 2), capture=False)
    with Noted() as noted:
        loss = steps.model(**batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(steps.model.parameters(), 1.0)
    assert noted.waiting == []


def test_shifted_sums_are_the_convolution():
    filters = nn.Conv2d(3, 3, (5, 1), padding=(2, 0), groups=3, bias=False)
    value = torch.randn(2, 3, 11, 4)
    torch.testing.assert_close(ShiftedSum(filters)(value), filters(value))


def test_systems_with_heads_of_their_own_get_the_same_convolution():
    sizes = Sizes(2, 16, 2, 32, 64)
    frame = Frame(sizes, convolution=True)
    softmax = framed_encoder("softmax", frame)
    wide = framed_encoder("longformer@window=256,global_tokens=0", frame)
    wide.load_state_dict(softmax.state_dict())
    x = torch.randn(2, 64, 16)
    torch.testing.assert_close(wide(x), softmax(x))
    for name in ("reformer", "transformer_ls", "transnormer_t1", "transnormer_t2"):
        built = framed_encoder(name, frame).eval()
        before = built(x)
        with torch.no_grad():
            for module in built.modules():
                if isinstance(module, ShiftedSum):
                    module.weight.zero_()
        assert not torch.equal(built(x), before), name
    with pytest.raises(InvalidInputError, match="no values for the convolution"):
        framed_encoder("set_transformer", frame)


def test_rotary_answers_depend_on_distances_alone():
    torch.manual_seed(0)
    host = WordHost("softmax", Frame(FRAME.sizes, rotary=True), 40)
    layer = host.encoder.layers[0].attention
    x = torch.randn(1, 1, 16).expand(1, 8, 16)
    query, key, _ = layer.heads(x)
    scores = query @ key.mT
    torch.testing.assert_close(scores[0, 0, 0, 3], scores[0, 0, 4, 7])
    assert abs(scores[0, 0, 0, 3] - scores[0, 0, 0, 4]) > 1e-4
    with pytest.raises(InvalidInputError, match="no heads to turn"):
        WordHost("flash", Frame(FRAME.sizes, rotary=True), 40)


def test_every_window_hides_as_many_plain_words(tmp_path):
    source = words(tmp_path)
    source.open(torch.device("cpu"))
    batch = source.batch(3)
    assert batch["places"].shape == (4, 5)
    assert (batch["labels"] >= 3).all()
    changed = batch["ids"].gather(1, batch["places"]) != batch["labels"]
    assert changed.float().mean() > 0.5
    assert all(len(set(row.tolist())) == 5 for row in batch["places"])
    again = source.batch(3)
    assert all(torch.equal(side, again[name]) for name, side in batch.items())


def test_trees_to_test_by_are_never_trained_on(tmp_path):
    source = trees(tmp_path)
    tested = {row.tobytes() for row in source.test_trees("test")["ids"]}
    keys = {key for step in range(8) for key, _, _ in source.pieces(step)}
    trained_on = {row.tobytes() for key in keys for row in source.files[key]["ids"]}
    assert len(keys) == 4
    assert not tested & trained_on


def test_steps_of_paths_follow_each_other_without_gap_or_overlap(tmp_path):
    stages = ((5, (3, 6), True), (3, (6,), False))
    source = Paths(Place(None, tmp_path, 0), 8, stages, files=3, patch=2, tested=8)
    rows = [(key[1] * 12 + row) for step in range(8) for key, first, last in source.pieces(step)
            for row in range(first, last) if key[0] == 6]  # fmt: skip
    assert rows == [row % 36 for row in range(44)]


def test_workers_make_what_would_be_made_without_them(tmp_path):
    alone = MadeAhead(tmp_path / "a", _numbers, 0)
    ahead = MadeAhead(tmp_path / "b", _numbers, 2)
    ahead.begin([(1, 2), (3, 4)])
    try:
        for key in ((1, 2), (3, 4), (5, 6)):
            np.testing.assert_array_equal(ahead[key]["sum"], alone[key]["sum"])
    finally:
        ahead.close()


def _numbers(key):
    return {"sum": np.arange(sum(key))}


def test_a_cell_is_trained_tested_and_kept_once(tmp_path, monkeypatch, capsys):
    words(tmp_path)
    recipe = gates._words(Frame(Sizes(1, 16, 2, 32, 32), convolution=True), 4, 4, 40)
    monkeypatch.setitem(gates.RECIPES["small"], "table1", recipe)
    line = ["run", "table1", "--scale", "small", "--seed", "1", "--out", str(tmp_path / "out")]
    line += ["--work", str(tmp_path)]
    assert main(line) == 0
    (cell,) = read_all(tmp_path / "out", NAME, "small")
    assert cell["questions"] == 45
    assert len(bytes.fromhex(cell["right"])) == 6
    assert cell["setup"]["command"].endswith(" ".join(line))
    assert not list(tmp_path.rglob("*.pt"))
    capsys.readouterr()
    assert main(line) == 0
    assert "finished before" in capsys.readouterr().out


# PyTorch's compiler looks at gradients of what is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_training_is_the_same_one_and_says_so(tmp_path, monkeypatch):
    words(tmp_path)
    recipe = gates._words(Frame(Sizes(2, 16, 2, 32, 32), convolution=True), 4, 4, 40)
    monkeypatch.setitem(gates.RECIPES["small"], "table1", recipe)
    seen = []

    def backend(graph, inputs):
        def call(*values):
            seen.append(torch.is_grad_enabled())
            return graph(*values)

        return call

    def compile_layers(model):
        for layer in model.encoder.layers:
            layer.compile(backend=backend)

    monkeypatch.setattr(gates, "compile_layers", compile_layers)
    line = ["run", "table1", "--scale", "small", "--seed", "1", "--work", str(tmp_path)]
    for form in ("plain", "compiled"):
        more = ["--compile"] if form == "compiled" else []
        assert main([*line, "--out", str(tmp_path / form), *more]) == 0
    (plain,), (compiled,) = (
        read_all(tmp_path / form, NAME, "small") for form in ("plain", "compiled")
    )
    assert (plain["compiled"], compiled["compiled"]) == (False, True)
    assert compiled["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    # Four steps of two layers; what only looks at the model runs as it is written.
    assert seen == [True] * 8


def cell(task, method, seed=0, **found):
    setup = {"commit": "abc", "changed": False}
    return {"cell": {"task": task, "method": method, "seed": seed}, "setup": setup, **found}


def test_gates_are_judged_over_seeds_and_against_baselines():
    listops = [cell("listops", "softmax", seed, accuracy=value)
               for seed, value in enumerate((0.5, 0.6))]  # fmt: skip
    assert gate_of("lra/listops", listops) is None
    listops.append(cell("listops", "outermost operator", accuracy=0.34))
    found = gate_of("lra/listops", listops)
    assert found["reached"] == 0.55
    assert found["met"]
    assert found["seeds"] == [0, 1]
    listops[-1]["accuracy"] = 0.37
    assert not gate_of("lra/listops", listops)["claims"]
    loss = cell("table1", "softmax", loss=3.5)
    assert not gate_of("table1/mlm", [loss])["met"]


def test_the_summary_stands_beside_the_cells(tmp_path):
    found = {"accuracy": 0.58, "setup": {"commit": "abc", "changed": False}}
    write(Cell(NAME, "gpu", "retrieval", "byte counts", 0), {}, found, tmp_path / "cells")
    assert main(["summary", "--out", str(tmp_path / "cells")]) == 0
    kept = json.loads((tmp_path / "gates.json").read_text("utf-8"))
    assert kept["retrieval"]["met"]
    assert set(kept) == {"retrieval"}
