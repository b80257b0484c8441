"""Figure 1: a training that can be interrupted, measured on held-out text."""

import gzip
import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lln.errors import InvalidInputError
from lln_lab.demo.corpus import load_corpus
from lln_lab.documents.study_sections import RESULTS
from lln_lab.figures import single_head
from lln_lab.figures.command import run
from lln_lab.figures.setting import Setting
from lln_lab.figures.single_head import QUICK, Run, TrainingRecipe
from lln_lab.figures.single_head_model import MASK, SingleHeadRoberta, Size, masked

ROOT = Path(__file__).resolve().parents[3]
TEXT = " ".join(f"word{index % 97} and {index % 31}." for index in range(3000)).encode()


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return load_corpus(path)


def finish(training, work=None):
    for _ in training.train(work):
        pass
    return training.results()


def test_curves_of_every_layer(corpus):
    found = finish(Run(QUICK, corpus))
    assert found["step"] == [0, 3, 6, 9, 12]
    for name in ("temperature", "entropy", "spectral_gap"):
        assert [len(curve) for curve in found[name]] == [5, 5]
    assert len(found["held_out_loss"]) == len(found["training_loss"]) == 5
    assert all(0 < value <= 5 + 1e-9 for curve in found["entropy"] for value in curve)
    json.dumps(found)


def test_it_learns(corpus):
    recipe = replace(QUICK, size=Size(32, 2, 64), steps=150, batch=8)
    found = finish(Run(recipe, corpus))
    assert found["held_out_loss"][-1] < found["unigram_loss"] - 0.3
    assert abs(found["held_out_loss"][0] - found["unigram_loss"]) < 0.3


def test_an_interrupted_training_goes_on_as_if_nothing_had_happened(corpus, tmp_path):
    whole = finish(Run(QUICK, corpus))
    work = tmp_path / "work.pt"
    first = Run(QUICK, corpus)
    for share in first.train(work):
        # Two updates after the last measurement: those are lost and done again.
        if share > 0.6:
            break
    assert first.done == 8
    second = Run(QUICK, corpus)
    second.resume(work)
    assert second.done == 6
    assert finish(second, work) == whole


def test_files_of_other_trainings_are_refused(corpus, tmp_path):
    work = tmp_path / "work.pt"
    Run(QUICK, corpus).save(work)
    with pytest.raises(InvalidInputError, match="other text or sizes; remove it"):
        Run(replace(QUICK, steps=13), corpus).resume(work)
    other = replace(corpus, train=corpus.train.flip(0))
    with pytest.raises(InvalidInputError, match="other text or sizes"):
        Run(QUICK, other).resume(work)
    for content in (b"", b"not a checkpoint", work.read_bytes()[:2000]):
        work.write_bytes(content)
        with pytest.raises(InvalidInputError, match="is not a training under way"):
            Run(QUICK, corpus).resume(work)
    assert [path.name for path in tmp_path.glob("*work*")] == ["work.pt"]


def test_the_command_resumes_and_tidies_up(tmp_path, monkeypatch):
    data, work = tmp_path / "books", tmp_path / "work.pt"
    data.mkdir()
    with lzma.open(data / "train.txt.xz", "wb") as file:
        file.write(TEXT)
    options = {"out": tmp_path, "results": None, "device": "cpu", "quick": True}
    options |= {"data": data, "work": work}
    original, calls = Run._update, []

    def failing(self):
        calls.append(self.done)
        if len(calls) == 8:
            raise KeyboardInterrupt
        original(self)

    monkeypatch.setattr(Run, "_update", failing)
    with pytest.raises(KeyboardInterrupt):
        run("1", **options, echo=lambda _: None)
    assert work.exists()
    run("1", **options, echo=lambda _: None)
    # Update 7 was under way; the last measurement was after update 6.
    assert calls == [*range(8), *range(6, 12)]
    assert not work.exists()
    record = json.loads((tmp_path / "figure-1.json").read_text("utf-8"))
    assert record["corpus"] == "books"
    assert record["held_out"] == QUICK.held_out
    assert record["held_out_text"] == "the last tenth of the text"
    assert record["made_by"]["command"] == "lln figure 1 --device cpu --quick --data books"
    assert str(tmp_path) not in (tmp_path / "figure-1.json").read_text("utf-8")


def test_measured_is_what_the_model_does(corpus):
    training = Run(QUICK, corpus)
    record = training._measure()
    text, size = corpus.held_out, QUICK.size
    start = torch.linspace(0, len(text) - size.length, QUICK.held_out).long()
    tokens = text[start[:, None] + torch.arange(size.length)].long()
    shown, _ = masked(tokens, 0.15, torch.Generator().manual_seed(0))
    model = training.model.double()
    with torch.no_grad():
        hidden = model.norm(model.embedding(shown) + model.position)
        layer = model.layers[0]
        query, key, _ = layer.qkv(layer.attention_norm(hidden)).chunk(3, -1)
        weights = (query @ key.mT / size.width**0.5).softmax(-1)
    expected = -(weights * weights.log2()).sum(-1).mean(-1)
    # The median of two sequences is their mean.
    assert record["entropy"][0] == pytest.approx(expected.mean().item(), abs=1e-5)


def test_the_start_is_roberta_bases(corpus):
    model = SingleHeadRoberta(Size(64, 6, 128), torch.zeros(256))
    hidden = torch.randn(4, 128, 64)
    with torch.no_grad():
        query, key, _ = model.layers[0].qkv(hidden).chunk(3, -1)
    # RoBERTa-base: σ² = 768 · 0.02² for unit inputs.
    assert query.var().item() == pytest.approx(768 * 0.02**2, rel=0.1)
    assert key.var().item() == pytest.approx(768 * 0.02**2, rel=0.1)


def test_masking_is_berts():
    tokens = torch.randint(256, (400, 500), generator=torch.Generator().manual_seed(1))
    shown, chosen = masked(tokens, 0.15, torch.Generator().manual_seed(2))
    assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.005)
    assert torch.equal(shown[~chosen], tokens[~chosen])
    hidden = (shown == MASK)[chosen].float().mean().item()
    assert hidden == pytest.approx(0.8, abs=0.01)
    # A tenth is any byte, which one time in 256 is the right one.
    same = (shown == tokens)[chosen].float().mean().item()
    assert same == pytest.approx(0.1 + 0.1 / 256, abs=0.01)


def test_learning_rate_rises_and_falls():
    recipe = TrainingRecipe(steps=100, rate=1.0, warmup=0.1)
    rates = [recipe.rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(0.91)
    assert rates[-1] == pytest.approx(0.01)
    assert recipe.measured_steps[0] == 0
    assert recipe.measured_steps[-1] == 100


def test_without_work_nothing_is_saved(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    single_head.measure(Setting(quick=True, data=tmp_path / "text.txt"))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("name", "pack"), [("a.txt.xz", lzma.compress), ("a.gz", gzip.compress)])
def test_packed_text_is_unpacked(name, pack, tmp_path, corpus):
    folder = tmp_path / "packed"
    folder.mkdir()
    (folder / name).write_bytes(pack(TEXT))
    (folder / "broken.xz").write_bytes(b"not packed at all")
    for path in (folder, folder / name):
        assert torch.equal(load_corpus(path).train, corpus.train)
    with pytest.raises(InvalidInputError, match="cannot be read"):
        load_corpus(folder / "broken.xz")


def test_the_published_training_learns_and_grows_sharper():
    results = json.loads((ROOT / RESULTS / "figure-1.json").read_text("utf-8"))
    assert results["held_out_loss"][-1] < results["unigram_loss"] - 1
    for name in ("temperature", "entropy", "spectral_gap"):
        assert all(curve[-1] < curve[0] for curve in results[name])
