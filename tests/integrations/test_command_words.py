"""Refusals of `lln convert` say what to change, in words that Python shares."""

import inspect
import re

import pytest
import torch

from lln.cli import model_commands
from lln.errors import InvalidInputError, UnexpectedArgumentError, UnsupportedModelError
from lln.integrations.conversion_report import Conversion
from lln.integrations.convert import convert


@pytest.fixture
def folders(tiny, tmp_path, save_with_tokenizer):
    """Makes arguments of a command for a tiny model; a text lies beside."""
    lines = "\n".join(f"w{i} w{i + 3} w{i + 7} w{i + 1}" for i in range(2, 30))
    (tmp_path / "text.txt").write_text(lines)

    def make(name, **options):
        save_with_tokenizer(tiny(name, **options), tmp_path / "in")
        return tmp_path / "in", tmp_path / "out"

    return make


# Arguments of the call, and how the refusal begins.
WRONG = [
    ({"statistics": "fixed"}, "statistics 'fixed' needs calibrate, "),
    ({"attention": "linear"}, "attention must be "),
    ({"statistics": "none"}, "statistics must be one of "),
    ({"matching": "none"}, "matching must be one of "),
    ({"mix": "both", "attention": "lln_diag"}, "mix must be a number or one of "),
    ({"mix": "7", "attention": "lln_diag"}, "mix must be a number in [0, 1], "),
    ({"block_size": 0}, "block_size must be at least 1, "),
]


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_convert_says_what_to_change(tiny, folders, options, said):
    with pytest.raises(InvalidInputError, match=f"^{re.escape(said)}"):
        model_commands.convert(*folders("bert"), **options)
    if options.get("mix") == "7":
        options = options | {"mix": 7}
    with pytest.raises(InvalidInputError, match=f"^{re.escape(said)}"):
        convert(tiny("bert"), verbose=False, **options)


def test_a_mistyped_attention_is_refused_before_the_model_is_loaded(folders, monkeypatch):
    monkeypatch.setattr("lln.integrations.folders.load_model", lambda *args: pytest.fail("loaded"))
    with pytest.raises(InvalidInputError, match=r"did you mean 'lln_keys'\?"):
        model_commands.convert(*folders("bert"), attention="lln_key")


def test_a_mistyped_argument_is_named(tiny):
    model = tiny("bert")
    with pytest.raises(UnexpectedArgumentError, match=r"did you mean 'block_size'\?"):
        convert(model, blocksize=4)
    with pytest.raises(TypeError, match="all else by name, got dict"):
        convert(model, "lln", {})


def test_exact_keys_are_the_default(tiny, text, folders, capsys):
    assert convert(tiny("bert"), calibrate=text()).attention == "lln_keys"
    source, target = folders("bert")
    model_commands.convert(source, target)
    assert "2 of 2 attention layers run lln_keys" in capsys.readouterr().out
    with pytest.raises(InvalidInputError, match="choose 'lln_diag' or leave mix out"):
        convert(tiny("bert"), mix="gate")


@pytest.mark.parametrize(
    ("attention", "said"), [("lln", "attention 'lln_keys'"), ("lln_keys", "--target 0.99")]
)
def test_a_large_move_says_what_to_do(attention, said):
    near = Conversion(attention, "fixed", moved=0.26)
    assert near.notes() == []
    (note,) = Conversion(attention, "fixed", moved=0.73).notes()
    assert note.startswith("the model's output moved by 73%: ")
    assert said in note
    assert "lln recover" in note


NO_TEXT = {name: torch.zeros(0, 12, dtype=torch.int64) for name in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("name", ["calibrate", "batch", "holdout"])
def test_a_batch_without_tokens_is_refused(tiny, text, name):
    model = tiny("bert")
    options = {"target": 0.9, "calibrate": text()} if name == "holdout" else {}
    no_tokens = {"input_ids": torch.zeros(2, 0, dtype=torch.int64)}
    for batch, said in (
        (NO_TEXT, r"is empty, of shape \[0, 12\]; give at least one"),
        (no_tokens, r"is empty, of shape \[2, 0\]; give"),
        ({}, "has no tensors; give"),
    ):
        with pytest.raises(InvalidInputError, match=f"^{name}.*{said}"):
            convert(model, **(options | {name: batch}))
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "size", "room"),
    [
        ("bert", {"max_position_embeddings": 20}, 20),
        # RoBERTa counts from the number of its padding on.
        ("roberta", {"max_position_embeddings": 20}, 19),
        ("distilbert", {"max_position_embeddings": 20}, 20),
        ("gpt2", {"n_positions": 20}, 20),
    ],
)
def test_a_batch_longer_than_the_positions_is_refused(tiny, text, name, size, room):
    model = tiny(name, **size)
    with pytest.raises(InvalidInputError, match=f"{room + 1} tokens, .* positions for {room}; cut"):
        convert(model, calibrate=text(room + 1))
    assert model.config._attn_implementation == "sdpa"
    convert(model, calibrate=text(room))
    # Padding of RoBERTa has no positions of its own.
    if name == "roberta":
        both = text(room + 4, padding=8)
        both["input_ids"][0], both["attention_mask"][0] = (side[1] for side in both.values())
        convert(model, calibrate=both)


def test_a_text_longer_than_a_model_with_rotations_was_trained_on_is_taken(tiny, text):
    convert(tiny("llama", max_position_embeddings=8), calibrate=text(12))


def test_names_in_refusals_are_those_of_options():
    """So that ``block_size must be …`` tells a user of the command line what to change."""
    options = set(inspect.signature(model_commands.convert).parameters)
    assert {name for wrong, _ in WRONG for name in wrong} <= options
    assert {"calibrate", "layers"} <= options


def test_layers_that_do_not_exist(tiny, folders):
    with pytest.raises(InvalidInputError, match=r"^layers has 9, which did not run"):
        model_commands.convert(*folders("bert"), layers="0,9")
    with pytest.raises(InvalidInputError, match=r"^layers has 9, which did not run"):
        convert(tiny("bert"), "lln_diag", layers=[0, 9], verbose=False)


def test_a_causal_model_without_calibration(tiny):
    with pytest.raises(InvalidInputError, match="the future; pass calibrate, inputs"):
        convert(tiny("gpt2"), "lln_diag", verbose=False)


def test_a_causal_model_with_calibration_and_sample_statistics(tiny, text):
    said = "future; choose statistics 'fixed', 'running' or"
    with pytest.raises(InvalidInputError, match=said):
        convert(tiny("gpt2"), "lln_diag", calibrate=text(), statistics="sample", verbose=False)


def test_sliding_windows(tiny):
    layers = convert(tiny("modernbert"), "lln_diag", verbose=False).layers
    windowed = next(n for n, layer in enumerate(layers) if layer.attention == "window")
    with pytest.raises(UnsupportedModelError, match=r"; leave it out of layers\.$"):
        convert(tiny("modernbert"), "lln_diag", layers=[windowed], verbose=False)
