"""Refusals of `lln recover` say what to change, in words that Python shares."""

import inspect

import pytest

from lln.errors import InvalidInputError
from lln.integrations.convert import convert
from lln_lab.cli.recover_command import recover as command
from lln_lab.recovery.recover import recover


def test_a_mistyped_attention_is_refused_before_the_model_is_loaded(folders, tmp_path, monkeypatch):
    place = "lln_lab.recovery.recovered_folder.load_model"
    monkeypatch.setattr(place, lambda *args: pytest.fail("loaded"))
    with pytest.raises(InvalidInputError, match=r"did you mean 'lln_keys'\?"):
        command(*folders("bert"), tmp_path / "text.txt", attention="lln_key")


def test_a_causal_model_with_sample_statistics(folders, tmp_path):
    with pytest.raises(InvalidInputError, match="future; choose statistics 'fixed', 'running' or"):
        command(*folders("gpt2"), tmp_path / "text.txt", statistics="sample", tokens=16)


def test_recover_says_what_to_change(folders, tmp_path):
    assert "end_loss" in inspect.signature(command).parameters
    source, target = folders("bert")
    with pytest.raises(InvalidInputError, match=r"^end_loss must be one of "):
        command(source, target, tmp_path / "text.txt", tokens=16, end_loss="mse")
    steps = {"layer_steps": 0, "end_steps": 1, "batch_size": 2}
    with pytest.raises(InvalidInputError, match=r"^end_loss 'logits' does not fit BertModel"):
        command(source, target, tmp_path / "text.txt", tokens=16, end_loss="logits", **steps)


def test_a_checkpoint_of_another_model_names_the_work_folder(tiny, text, folders, tmp_path):
    other = tiny("bert", hidden_size=16)
    convert(other, "lln_diag", calibrate=text(), statistics="running", mix="gate", verbose=False)
    inputs = {name: tensor[0] for name, tensor in text().items()}
    steps = {"layer_steps": 1, "end_steps": 0, "batch_size": 1}
    recover(other, [inputs], output_dir=tmp_path / "work", **steps)
    source, target = folders("bert")
    with pytest.raises(InvalidInputError, match="start anew in another folder"):
        command(source, target, tmp_path / "text.txt", tokens=16, work=tmp_path / "work", **steps)
