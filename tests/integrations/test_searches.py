"""Without the laboratory, whoever asks for a target is told what to install."""

import sys
from importlib import metadata

import pytest
import torch
from tests.integrations.test_timm import Vision

from lln.cli import main
from lln.errors import BackendUnavailableError, InvalidInputError
from lln.integrations import convert, timm

SAID = r'^a conversion to a target is a search, which .*; run pip install "lln\[lab\]"\.$'


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """As if the laboratory were not installed."""
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())


def test_a_target_needs_the_laboratory(tiny, text):
    model = tiny("bert")
    with pytest.raises(BackendUnavailableError, match=SAID):
        convert.convert(model, target=0.99, calibrate=text(20))
    assert not hasattr(model.config, "lln")
    with pytest.raises(BackendUnavailableError, match=SAID):
        timm.convert(Vision().eval(), target=0.99, calibrate=torch.randn(2, 3, 32, 32))


def test_nothing_else_needs_it(tiny, text):
    with pytest.raises(InvalidInputError, match=r"^holdout goes with target, "):
        convert.convert(tiny("bert"), calibrate=text(20), holdout=text(20))
    assert convert.convert(tiny("bert"), calibrate=text(20)).target is None


def test_the_command_says_so_before_it_loads_a_model(tmp_path, monkeypatch, capsys):
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lln", "convert", "in", "out", "--target", "0.99"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("lln: a conversion to a target is a search")
    assert len(said.strip().splitlines()) == 1
