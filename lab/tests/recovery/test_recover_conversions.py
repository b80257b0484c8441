"""Recovery training of what a conversion adds or leaves: convolutions, chosen keys."""

import json

import transformers
from lab.tests.conversion.conftest import SHARP
from lab.tests.conversion.test_target import attached
from tests.integrations.test_convolution import NO_DROPOUT, filters

from lln.integrations.convert import convert
from lln.integrations.searches import REPORT_FILE
from lln_lab.cli.recover_command import recover as command
from lln_lab.recovery.recover import recover


def test_recovery_trains_it_and_it_helps(tiny, text, tmp_path):
    inputs = text(16, batch=8)
    dataset = [{name: side[index] for name, side in inputs.items()} for index in range(8)]
    options = {"layer_steps": 30, "end_steps": 0, "layer_learning_rate": 1e-2, "batch_size": 8}
    after = {}
    for size in (0, 5):
        model = tiny("bert", initializer_range=0.4, **NO_DROPOUT)
        convert(model, "lln", calibrate=inputs, convolution=size)
        report = recover(model, dataset, output_dir=tmp_path / str(size), **options)
        after[size] = sum(report.layers_after)
    assert all(weight.abs().sum() > 0 for weight in filters(model))
    assert after[5] < after[0]


def test_recovery_trains_what_is_left(sharp, text, tmp_path):
    inputs = text(40, batch=4)
    options = {"layers": [0, 2], "block_size": 8, "statistics": "learned"}
    convert(sharp, target=0.6, calibrate=inputs, **options)
    chosen = [getattr(heads, "keys", None) for heads in attached(sharp)]
    dataset = [{name: side[index] for name, side in inputs.items()} for index in range(4)]
    report = recover(
        sharp,
        dataset,
        output_dir=tmp_path,
        layer_steps=5,
        end_steps=10,
        batch_size=4,
        use_cpu=True,
        disable_tqdm=True,
    )
    assert report.after < report.before
    assert [getattr(heads, "keys", None) for heads in attached(sharp)] == chosen


def test_recovery_from_the_command_line_takes_a_target(tiny, tmp_path, save_with_tokenizer, capsys):
    save_with_tokenizer(tiny("bert", **SHARP), tmp_path / "in")
    words = " ".join(f"w{2 + index % 50}" for index in range(400))
    (tmp_path / "text.txt").write_text("\n".join([words] * 4))
    command(
        tmp_path / "in",
        tmp_path / "out",
        text=tmp_path / "text.txt",
        target_quality=0.8,
        tokens=40,
        block_size=8,
        batch_size=2,
        layer_steps=2,
        end_steps=2,
    )
    assert "after recovery" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / REPORT_FILE).read_text("utf-8"))
    assert written["rows"][-1]["holdout"] is not None
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "out")
    chosen = [getattr(heads, "keys", None) for heads in attached(loaded)]
    assert chosen == list(written["choice"].values())
