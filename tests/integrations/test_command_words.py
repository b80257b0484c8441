"""Refusals of `lln convert` and `lln recover`: options on the command line, arguments in Python."""

import re

import pytest

from lln.cli import model_commands
from lln.errors import InvalidInputError, UnsupportedModelError
from lln.integrations.convert import convert
from lln.integrations.recover import recover


@pytest.fixture
def folders(tiny, tmp_path, save_with_tokenizer):
    """Makes arguments of a command for a tiny model; a text lies beside."""
    lines = "\n".join(f"w{i} w{i + 3} w{i + 7} w{i + 1}" for i in range(2, 30))
    (tmp_path / "text.txt").write_text(lines)

    def make(name, **options):
        save_with_tokenizer(tiny(name, **options), tmp_path / "in")
        return tmp_path / "in", tmp_path / "out"

    return make


# Options of the call, and how the refusal begins with and without the command line.
WRONG = [
    (
        {"statistics": "fixed"},
        "--statistics fixed needs --calibrate, ",
        "statistics='fixed' needs calibrate=, ",
    ),
    ({"attention": "linear"}, "--attention must be ", "attention must be "),
    ({"statistics": "none"}, "--statistics must be one of ", "statistics must be one of "),
    ({"matching": "none"}, "--matching must be one of ", "matching must be one of "),
    ({"mix": "both"}, "--mix must be a number or one of ", "mix must be a number or one of "),
    ({"mix": "7"}, "--mix must be a number in [0, 1], ", "mix must be a number in [0, 1], "),
    ({"block_size": 0}, "--block-size must be at least 1, ", "block_size must be at least 1, "),
    ({"sliding_window": "no"}, "--sliding-window must be ", "sliding_window must be "),
]


@pytest.mark.parametrize(("options", "said", "raised"), WRONG)
def test_convert_names_options_on_the_command_line_and_arguments_in_python(
    tiny, folders, options, said, raised
):
    with pytest.raises(InvalidInputError, match=f"^{re.escape(said)}"):
        model_commands.convert(*folders("bert"), **options)
    if options.get("mix") == "7":
        options = {"mix": 7}
    with pytest.raises(InvalidInputError, match=f"^{re.escape(raised)}"):
        convert(tiny("bert"), verbose=False, **options)


def test_layers_that_do_not_exist(tiny, folders):
    with pytest.raises(InvalidInputError, match=r"^--layers has 9, which did not run"):
        model_commands.convert(*folders("bert"), layers="0,9")
    with pytest.raises(InvalidInputError, match=r"^layers has 9, which did not run"):
        convert(tiny("bert"), layers=[0, 9], verbose=False)


def test_a_causal_model_without_calibration(tiny, folders):
    with pytest.raises(InvalidInputError, match="the future; pass --calibrate, inputs"):
        model_commands.convert(*folders("gpt2"))
    with pytest.raises(InvalidInputError, match="the future; pass calibrate=, inputs"):
        convert(tiny("gpt2"), verbose=False)


def test_a_causal_model_with_calibration_and_sample_statistics(tiny, text, folders, tmp_path):
    source, target = folders("gpt2")
    with pytest.raises(InvalidInputError, match="future; use --statistics fixed, 'running' or"):
        model_commands.recover(
            source, target, tmp_path / "text.txt", statistics="sample", tokens=16
        )
    with pytest.raises(InvalidInputError, match="future; use statistics='fixed', 'running' or"):
        convert(tiny("gpt2"), calibrate=text(), statistics="sample", verbose=False)


def test_sliding_windows(tiny, folders):
    with pytest.raises(UnsupportedModelError, match="; pass --sliding-window softmax to leave"):
        model_commands.convert(*folders("modernbert"))
    with pytest.raises(UnsupportedModelError, match="; pass sliding_window='softmax' to leave"):
        convert(tiny("modernbert"), verbose=False)
    windowed = next(
        number
        for number, layer in enumerate(
            convert(tiny("modernbert"), sliding_window="softmax", verbose=False).layers
        )
        if layer.attention == "softmax"
    )
    with pytest.raises(UnsupportedModelError, match=r"; leave it out of layers=\.$"):
        convert(tiny("modernbert"), layers=[windowed], sliding_window="softmax", verbose=False)


def test_recover_names_its_options(folders, tmp_path):
    source, target = folders("bert")
    with pytest.raises(InvalidInputError, match=r"^--end-loss must be one of "):
        model_commands.recover(source, target, tmp_path / "text.txt", tokens=16, end_loss="mse")
    with pytest.raises(InvalidInputError, match=r"^--end-loss logits does not fit BertModel"):
        model_commands.recover(
            source,
            target,
            tmp_path / "text.txt",
            tokens=16,
            end_loss="logits",
            layer_steps=0,
            end_steps=1,
            batch_size=2,
        )


def test_a_checkpoint_of_another_model_names_the_work_folder(tiny, text, folders, tmp_path):
    other = tiny("bert", hidden_size=16)
    convert(other, calibrate=text(), statistics="running", mix="gate", verbose=False)
    inputs = {name: tensor[0] for name, tensor in text().items()}
    steps = {"layer_steps": 1, "end_steps": 0, "batch_size": 1}
    recover(other, [inputs], output_dir=tmp_path / "work", **steps)
    source, target = folders("bert")
    with pytest.raises(InvalidInputError, match="start anew with another --work"):
        model_commands.recover(
            source, target, tmp_path / "text.txt", tokens=16, work=tmp_path / "work", **steps
        )


def test_what_is_no_argument_stays_as_it_is():
    options = {"layers": "--layers", "calibrate": "--calibrate", "end_loss": "--end-loss"}
    for sentence in (
        "LLN attention was called once in Bert, which has 12 layers; the others keep their own.",
        "convert in Python with calibrate=batch.",
        "use lln.integrations.convert.convert(model, calibrate=batch).",
        "convert(end_loss='hidden') is a call.",
        "'work/end_loss' cannot be read.",
    ):
        assert model_commands.in_options(sentence, options) == sentence
