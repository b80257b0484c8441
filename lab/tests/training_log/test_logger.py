"""ConcentrationLogger: what it writes, when, and how it goes on after an interruption."""

import json
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lln import LLNAttention
from lln.errors import BackendUnavailableError, InvalidInputError, WriteError
from lln.instruments import capture
from lln_lab.training_log import ConcentrationLogger
from lln_lab.training_log.run_log import RunLog, read_records


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lln = LLNAttention(16, 2, batch_first=True)
        self.softmax = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        x = x + self.lln(x)[0]
        return x + self.softmax(x, x, x)[0]


def train(log, model, steps, scaler=None):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    records = []
    for _ in range(steps):
        loss = model(torch.randn(2, 6, 16)).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        records.append(log.step(loss, scaler=scaler))
        optimiser.step()
        optimiser.zero_grad()
    return records


def test_due_steps_are_logged_with_everything(tmp_path):
    torch.manual_seed(0)
    model = Model()
    with ConcentrationLogger(model, tmp_path, every=3, tensorboard=False) as log:
        returned = train(log, model, 7)
    records = read_records(tmp_path)
    assert [record["step"] for record in records] == [1, 3, 6]
    assert [record and record["step"] for record in returned] == [1, None, 3, None, None, 6, None]
    record = records[0]
    assert list(record["layers"]) == ["lln.core", "softmax"]
    layer = record["layers"]["lln.core"]
    assert sorted(layer) == ["alpha", "beta", "entropy", "spectral_gap", "temperature"]
    assert all(len(heads) == 2 for heads in layer.values())
    assert sorted(record["layers"]["softmax"]) == ["entropy", "spectral_gap", "temperature"]
    assert record["loss"] > 0
    assert record["problems"] == {}


def test_values_are_those_of_capture_and_of_the_gradients(tmp_path):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 6, 16)
    with capture(model) as seen:
        model(x).square().mean().backward()
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    model.zero_grad()
    with ConcentrationLogger(model, tmp_path, tensorboard=False) as log:
        model(x).square().mean().backward()
        record = log.step()
    assert record["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert "loss" not in record
    for name in ("entropy", "alpha"):
        expected = list(seen.medians(name)["lln.core"].values())
        assert record["layers"]["lln.core"][name] == pytest.approx(expected, rel=1e-12)


def test_training_is_not_changed(tmp_path):
    def weights(out):
        torch.manual_seed(0)
        model = Model()
        if out is None:
            log = type("Nothing", (), {"step": lambda *_, **__: None})()
            train(log, model, 4)
        else:
            with ConcentrationLogger(model, out, every=2, tensorboard=False) as log:
                train(log, model, 4)
        return [p.detach().clone() for p in model.parameters()]

    for plain, watched in zip(weights(None), weights(tmp_path), strict=True):
        assert torch.equal(plain, watched)


def test_loss_scale_is_logged_and_taken_out_of_the_norm(tmp_path):
    model, x = Model(), torch.randn(2, 6, 16)
    model(x).square().mean().backward()
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    with ConcentrationLogger(model, tmp_path, every=1, tensorboard=False) as log:
        for unscale in (False, True):
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimiser)
            record = log.step(loss, scaler=scaler, unscaled=unscale)
            scaler.step(optimiser)
            scaler.update()
            optimiser.zero_grad()
            assert record["loss_scale"] == 1024.0
            assert record["gradient_norm"] == pytest.approx(norm, rel=1e-4)


def test_overflowed_gradients_become_null(tmp_path):
    model = Model()
    with ConcentrationLogger(model, tmp_path, tensorboard=False) as log:
        (model(torch.randn(1, 4, 16)).square().mean() * math.inf).backward()
        record = log.step()
    assert not math.isfinite(record["gradient_norm"])
    assert read_records(tmp_path)[0]["gradient_norm"] is None


def test_gradient_accumulation_measures_the_first_forward(tmp_path):
    model, x = Model(), torch.randn(2, 6, 16)
    with capture(model) as seen:
        model(x)
    with ConcentrationLogger(model, tmp_path, tensorboard=False) as log:
        for batch in (x, torch.randn(2, 6, 16), torch.randn(2, 6, 16)):
            model(batch).square().mean().backward()
        record = log.step()
    expected = list(seen.medians("entropy")["softmax"].values())
    assert record["layers"]["softmax"]["entropy"] == pytest.approx(expected)


def test_an_interrupted_run_goes_on_without_duplicates(tmp_path):
    torch.manual_seed(0)
    model = Model()
    error = pytest.raises(KeyboardInterrupt)
    with error, ConcentrationLogger(model, tmp_path, every=2, tensorboard=False) as log:
        train(log, model, 5)
        raise KeyboardInterrupt
    # The machine went down in the middle of a line.
    path = tmp_path / "concentration.jsonl"
    path.write_text(path.read_text() + '{"step": 6, "lay')
    # The last checkpoint was after step 3.
    with ConcentrationLogger(model, tmp_path, every=2, resume_from=3, tensorboard=False) as log:
        train(log, model, 5)
    assert [record["step"] for record in read_records(tmp_path)] == [1, 2, 4, 6, 8]
    assert path.read_text().endswith("\n")


def test_an_old_run_is_never_overwritten_by_accident(tmp_path):
    model = Model()
    with ConcentrationLogger(model, tmp_path, tensorboard=False) as log:
        train(log, model, 1)
    with pytest.raises(InvalidInputError, match=r"up to step 1; pass resume_from=STEP"):
        ConcentrationLogger(model, tmp_path, tensorboard=False)
    with ConcentrationLogger(model, tmp_path, resume_from=0, tensorboard=False) as log:
        assert log.records() == []


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "concentration.jsonl"
    path.write_text('{"step": 1}\nhello\n')
    with pytest.raises(InvalidInputError, match=r"line 2 of .* is not a record"):
        RunLog(tmp_path, resume_from=1, tensorboard=False)
    assert path.read_text() == '{"step": 1}\nhello\n'
    with pytest.raises(InvalidInputError, match="cannot be used"):
        RunLog(path / "below", tensorboard=False)


def test_a_model_without_attention_is_refused_at_the_first_step(tmp_path):
    model = nn.Linear(4, 4)
    error = pytest.raises(InvalidInputError, match="saw no attention in Linear")
    with error, ConcentrationLogger(model, tmp_path, tensorboard=False) as log:
        model(torch.randn(2, 4)).sum().backward()
        log.step()


def test_refusals(tmp_path):
    model = Model()
    with pytest.raises(InvalidInputError, match="every must be an integer of at least 1, got 0"):
        ConcentrationLogger(model, tmp_path, every=0)
    with pytest.raises(InvalidInputError, match="resume_from must be an integer of at least 0"):
        ConcentrationLogger(model, tmp_path, resume_from=-1)
    with pytest.raises(InvalidInputError, match="instruments must be one of"):
        ConcentrationLogger(model, tmp_path, instruments=("warmth",))
    log = ConcentrationLogger(model, tmp_path, tensorboard=False)
    with pytest.raises(InvalidInputError, match="no forward was watched"):
        log.step()
    log.close()


def test_nothing_is_left_behind(tmp_path):
    before = F.scaled_dot_product_attention
    model = Model()
    with ConcentrationLogger(model, tmp_path, every=1, tensorboard=False) as log:
        assert F.scaled_dot_product_attention is not before
        model(torch.randn(1, 4, 16)).sum().backward()
        # Watching ends with the forward: a failing backward would leave nothing behind.
        assert F.scaled_dot_product_attention is before
        assert log.step() is not None
        assert F.scaled_dot_product_attention is not before
    assert F.scaled_dot_product_attention is before


def test_tensorboard_holds_the_same_curves(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    torch.manual_seed(0)
    model = Model()
    with ConcentrationLogger(model, tmp_path, every=2) as log:
        train(log, model, 4)
    with ConcentrationLogger(model, tmp_path, every=2, resume_from=2) as log:
        train(log, model, 2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    for tag in ("training/loss", "training/gradient_norm", "entropy/softmax", "alpha/lln.core"):
        assert tag in tags
    records = read_records(tmp_path)
    curve = events.Scalars("entropy/softmax")
    assert [event.step for event in curve] == [record["step"] for record in records] == [1, 2, 4]
    for event, record in zip(curve, records, strict=True):
        heads = record["layers"]["softmax"]["entropy"]
        assert event.value == pytest.approx(sum(heads) / len(heads), rel=1e-6)


def test_tensorboard_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    model = Model()
    with pytest.raises(BackendUnavailableError, match=r"pip install 'lln-lab\[tensorboard\]'"):
        ConcentrationLogger(model, tmp_path, tensorboard=True)
    with ConcentrationLogger(model, tmp_path) as log:
        train(log, model, 1)
    assert len(read_records(tmp_path)) == 1
    assert not (tmp_path / "tensorboard").exists()


def test_lines_are_plain_json(tmp_path):
    model = Model()
    with ConcentrationLogger(model, tmp_path, tensorboard=False) as log:
        train(log, model, 1)
    (line,) = (tmp_path / "concentration.jsonl").read_text().splitlines()

    def refuse(constant):
        raise AssertionError(constant)

    assert json.loads(line, parse_constant=refuse)["step"] == 1


def test_a_full_disk_keeps_the_records_before_and_takes_later_ones(tmp_path):
    """The system takes half of a record and then no more."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunLog(tmp_path, tensorboard=False) as log:
        log.write({"step": 1}, {})
        before = log.path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
        try:
            with pytest.raises(
                WriteError, match=r"concentration\.jsonl' cannot be written: File t"
            ):
                log.write({"step": 2}, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert log.path.read_bytes() == before
        log.write({"step": 3}, {})
    assert [record["step"] for record in read_records(tmp_path)] == [1, 3]
