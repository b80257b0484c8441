"""Conversion of loaded models: what is attached, what is saved, what is refused."""

import copy
import json
import sys
import warnings

import pytest
import torch
import transformers

import lln
from lln.cli import main, model_commands
from lln.errors import CalibrationWarning, InvalidInputError, UnsupportedModelError
from lln.integrations import attend
from lln.integrations.attached import AttachedHeads, KeptSoftmax
from lln.integrations.convert import convert
from lln.integrations.trial_batch import example_inputs

FIXED = {"statistics": "fixed", "alpha": 2.0, "beta": 2.0}
NAME = "encoder.layer.{}.attention.self"
each_statistics = pytest.mark.parametrize("statistics", ["sample", "fixed", "running", "learned"])
each_mix = pytest.mark.parametrize("mix", [0.5, 0.2, "ratio", "scale", "gate", "heads"])


def heads_of(model, layer=0):
    return model.get_submodule(NAME.format(layer)).lln


def change(found, expected):
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("name", ["roberta", "bert", "distilbert", "vit", "deit"])
def test_bidirectional_models_convert_without_a_batch(tiny, name):
    model = tiny(name)
    inputs = example_inputs(model)
    before = model(**inputs)[0]
    report = convert(model, "lln", verbose=False)
    assert [layer.attention for layer in report.layers] == ["lln", "lln"]
    after = model(**inputs)[0]
    assert change(after, before) > 1e-6
    assert report.moved == pytest.approx(
        ((after - before).double().norm() / before.double().norm()).item(), rel=1e-4
    )
    model.set_attn_implementation("eager")
    assert change(model(**inputs)[0], before) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_causal_models_need_a_batch(tiny, text, name):
    model = tiny(name)
    with pytest.raises(InvalidInputError, match="pass calibrate, inputs"):
        convert(model, "lln_diag", verbose=False)
    assert model.config._attn_implementation == "sdpa"
    report = convert(model, "lln_diag", calibrate=text(), verbose=False)
    assert len(report.layers) == 2
    assert report.statistics == "fixed"


def test_calibration_is_that_of_the_library(tiny, text):
    model = tiny("roberta")
    inputs = text(30, padding=9)
    report = convert(model, "lln", calibrate=inputs, verbose=False)
    calls = []
    with attend.observed(lambda call: calls.append(call) or attend.softmax(call)):
        model(**inputs)
    for index, call in enumerate(calls):
        alpha, beta = lln.calibrate(call.query, call.key, key_mask=call.mask, scope="batch")
        found = heads_of(model, index).statistics
        assert torch.allclose(found.alpha, alpha.flatten(), rtol=1e-4)
        assert torch.allclose(found.beta, beta.flatten(), rtol=1e-4)
        assert report.layers[index].alpha == pytest.approx(
            (alpha.min().item(), alpha.max().item()), rel=1e-4
        )
        mask = inputs["attention_mask"].bool()
        soft, ours = (
            side.transpose(1, 2)[mask].double()
            for side in (attend.softmax(call), attend.attend(call))
        )
        moved = ((ours - soft).norm() / soft.norm()).item()
        assert report.layers[index].moved == pytest.approx(moved, rel=1e-3)


def test_only_the_layers_asked_for_change(tiny, text):
    soft = tiny("roberta")
    for layers in ([1], [NAME.format(1)]):
        model = copy.deepcopy(soft)
        report = convert(model, "lln_diag", layers=layers, batch=text(), verbose=False)
        assert [layer.attention for layer in report.layers] == ["softmax", "lln_diag"]
        assert isinstance(heads_of(model, 0), KeptSoftmax)
        assert isinstance(heads_of(model, 1), AttachedHeads)
    none = copy.deepcopy(soft)
    convert(none, "lln_diag", layers=[], batch=text(), verbose=False)
    inputs = text(20, padding=6)
    valid = inputs["attention_mask"].bool()
    assert change(none(**inputs)[0][valid], soft(**inputs)[0][valid]) < 1e-6


def test_unknown_layers_are_refused_and_the_model_is_as_before(tiny, text):
    model = tiny("roberta")
    before = model(**text())[0]
    for layers in ([2], ["encoder.layer.9"]):
        with pytest.raises(InvalidInputError, match="known are 0 to 1"):
            convert(model, "lln_diag", layers=layers, batch=text(), verbose=False)
    assert not hasattr(model.config, "lln")
    assert not any("lln" in name for name, _ in model.named_modules())
    assert torch.equal(model(**text())[0], before)


def test_a_failed_conversion_leaves_an_earlier_one(tiny, text):
    model = tiny("roberta")
    convert(model, "lln", calibrate=text(), verbose=False)
    before = model(**text())[0]
    settings, state = copy.deepcopy(model.config.lln), copy.deepcopy(model.state_dict())
    with pytest.raises(InvalidInputError):
        convert(model, "lln_diag", layers=[7], batch=text(), verbose=False)
    assert model.config.lln == settings
    assert model.state_dict().keys() == state.keys()
    assert torch.equal(model(**text())[0], before)


def test_converting_again_starts_from_softmax(tiny, text):
    once, twice = tiny("roberta"), tiny("roberta")
    convert(twice, "lln", calibrate=text(seed=3), verbose=False)
    for model in (once, twice):
        report = convert(model, "lln_diag", calibrate=text(), statistics="learned", verbose=False)
    assert torch.equal(once(**text())[0], twice(**text())[0])
    assert report.moved > 0


def test_layers_with_windows_stay_exact_without_being_told(tiny, text):
    model = tiny("modernbert")
    report = convert(model, "lln_diag", batch=text(), verbose=False)
    assert [layer.attention for layer in report.layers] == ["lln_diag", "window"]
    assert "1 of 2 attention layers run lln_diag" in str(report)
    assert "1 attend within their windows, exactly as before" in " ".join(str(report).split())
    with pytest.raises(UnsupportedModelError, match="layer 1"):
        convert(model, "lln_diag", layers=[1], batch=text(), verbose=False)


def test_position_bias_is_refused(tiny, text):
    model = tiny("t5")
    with pytest.raises(UnsupportedModelError, match="position_bias"):
        convert(model, "lln_diag", batch=text(), verbose=False)
    assert model.config._attn_implementation != "lln_diag"


def test_a_model_that_bypasses_a_layer_is_refused(tiny, text):
    model = tiny("roberta")
    layer = model.encoder.layer[1].attention.self
    layer.forward = lambda hidden_states, *args, **kwargs: (hidden_states, None)
    with pytest.raises(UnsupportedModelError, match="called 1 times in RobertaModel"):
        convert(model, "lln_diag", batch=text(), verbose=False)


@each_statistics
@each_mix
def test_converted_models_come_back_as_they_were_saved(tiny, text, tmp_path, statistics, mix):
    model = tiny("roberta", model="RobertaForMaskedLM")
    inputs = text(20, padding=6)
    convert(
        model,
        "lln_diag",
        calibrate=inputs,
        statistics=statistics,
        mix=mix,
        block_size=4,
        verbose=False,
    )
    for name, parameter in model.named_parameters():
        if ".lln." in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    if statistics == "running":
        model.train()
        model(**text(20, seed=4))
        model.eval()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    ours = {name for name in model.state_dict() if ".lln." in name}
    assert ours == {name for name in again.state_dict() if ".lln." in name}
    base = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(base(**inputs)[0], model.roberta(**inputs)[0])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_statistics_stay_float32_in_half_precision(tiny, text, tmp_path):
    for statistics in ("fixed", "running", "learned"):
        model = tiny("roberta")
        convert(
            model, "lln_diag", calibrate=text(), statistics=statistics, mix="ratio", verbose=False
        )
        model.save_pretrained(tmp_path / statistics)
        again = transformers.AutoModel.from_pretrained(
            tmp_path / statistics, dtype=torch.bfloat16
        ).eval()
        for name, tensor in heads_of(again).statistics.state_dict().items():
            assert tensor.dtype in (torch.float32, torch.int64), name
            assert torch.equal(tensor, heads_of(model).statistics.state_dict()[name]), name
        assert again(**text())[0].dtype == torch.bfloat16
    convert(model := tiny("roberta"), "lln_diag", calibrate=text(), verbose=False)
    assert heads_of(model.to(torch.bfloat16)).statistics.alpha.dtype == torch.float32


def test_missing_statistics_fail_loudly(tiny, text, tmp_path):
    from safetensors.torch import load_file, save_file

    model = tiny("roberta")
    convert(model, "lln_diag", calibrate=text(), verbose=False)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if ".lln." not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with pytest.raises(InvalidInputError, match="alpha"):
        again(**text())
    fresh = transformers.AutoModel.from_config(again.config).eval()
    with pytest.raises(InvalidInputError, match="alpha"):
        fresh(**text())


def test_running_statistics_missing_from_a_checkpoint_start_anew(tiny, text, tmp_path):
    from safetensors.torch import load_file, save_file

    model = tiny("roberta")
    convert(model, "lln_diag", calibrate=text(), statistics="running", verbose=False)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if ".lln." not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = heads_of(transformers.AutoModel.from_pretrained(tmp_path)).statistics
    assert torch.equal(again.query_variance, torch.ones(4))
    assert again.updates == 0
    assert torch.equal(again.last_used, torch.ones(9))


def test_a_converted_model_whose_submodules_are_gone_is_refused(tiny, text):
    model = tiny("roberta")
    convert(model, "lln_diag", calibrate=text(), verbose=False)
    del model.encoder.layer[0].attention.self.lln
    with pytest.raises(InvalidInputError, match=r"register\(\) before loading"):
        model(**text())


def test_switching_a_converted_model_to_the_other_attention_is_refused(tiny, text):
    model = tiny("roberta")
    convert(model, "lln_diag", calibrate=text(), verbose=False)
    model.set_attn_implementation("lln")
    with pytest.raises(InvalidInputError, match="convert it again"):
        model(**text())


def test_settings_replaced_after_conversion_are_refused(tiny, text):
    """They would be saved without the layers, and the model loaded with other α and β."""
    model = tiny("roberta")
    convert(model, "lln_diag", calibrate=text(), verbose=False)
    model.config.lln = {"block_size": 4}
    with pytest.raises(InvalidInputError, match="replaced after conversion"):
        model(**text())


@pytest.mark.parametrize(
    ("name", "value"),
    [("mix", 0.9), ("mix", "gate"), ("matching", "entropy"), ("statistics", "sample")],
)
def test_settings_that_conversion_built_in_cannot_be_changed_alone(tiny, text, name, value):
    model = tiny("roberta")
    convert(model, "lln_diag", calibrate=text(), verbose=False)
    model.config.lln[name] = value
    with pytest.raises(InvalidInputError, match=f"convert again with {name}={value!r}"):
        model(**text())


def test_other_settings_can_be_changed_after_conversion(tiny, text):
    """As if the model had been converted with them."""
    inputs = text(20)
    changed, converted = tiny("roberta"), tiny("roberta")
    convert(changed, "lln_diag", calibrate=inputs, verbose=False)
    convert(converted, "lln_diag", calibrate=inputs, block_size=4, verbose=False)
    before = changed(**inputs)[0]
    changed.config.lln["block_size"] = 4
    assert change(changed(**inputs)[0], before) > 1e-5
    assert torch.equal(changed(**inputs)[0], converted(**inputs)[0])


@pytest.mark.parametrize("mix", ["ratio", "scale", "gate"])
def test_learned_parts_learn(tiny, text, mix):
    model = tiny("roberta")
    convert(model, "lln_diag", calibrate=text(), statistics="learned", mix=mix, verbose=False)
    model.train()
    model(**text())[0].square().sum().backward()
    ours = [(name, p) for name, p in model.named_parameters() if ".lln." in name]
    assert len(ours) == 2 * (2 + {"ratio": 1, "scale": 2, "gate": 2}[mix])
    for name, parameter in ours:
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_training_mode_is_kept(tiny, text):
    model = tiny("roberta").train()
    model.encoder.layer[1].eval()
    convert(model, "lln_diag", calibrate=text(), statistics="running", verbose=False)
    assert model.training
    assert heads_of(model, 0).training
    assert not heads_of(model, 1).training
    assert not model.encoder.layer[1].attention.self.training
    assert heads_of(model, 0).statistics.updates == 1


def test_layers_that_share_their_weights(text):
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=99,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=37,
    )
    report = convert(transformers.AlbertModel(config), "lln_diag", calibrate=text(), verbose=False)
    assert len(report.layers) == 1


def test_encoder_decoder_models_convert_and_generate(text):
    """Causal, bidirectional and cross attention in one model, with transformers' own cache."""
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=99,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        pad_token_id=0,
        eos_token_id=None,
        forced_eos_token_id=None,
    )
    model = transformers.BartForConditionalGeneration(config).eval()
    inputs = text(12, padding=4)
    shorter = inputs | {"decoder_input_ids": inputs["input_ids"][:, :7]}
    with pytest.raises(InvalidInputError, match="lln_attention for cross attention"):
        convert(model, "lln_diag", calibrate=shorter, verbose=False)
    report = convert(model, "lln", calibrate=shorter, verbose=False)
    assert len(report.layers) == 3
    options = {"max_new_tokens": 6, "do_sample": False}
    with pytest.warns(UserWarning, match="O\\(N\\) per token"):
        found = model.generate(**inputs, **options)
    assert torch.equal(found, model.generate(**inputs, **options, use_cache=False))


def test_composite_models_keep_settings_in_every_part(text, tmp_path):
    from lln.integrations.transformers import register

    register()
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config=small | {"vocab_size": 99, "intermediate_size": 37, "eos_token_id": 98},
        vision_config=small | {"image_size": 32, "patch_size": 8, "intermediate_size": 37},
        projection_dim=16,
    )
    model = transformers.CLIPModel(config).eval()
    inputs = text(10) | {"pixel_values": torch.randn(2, 3, 32, 32)}
    report = convert(model, "lln", calibrate=inputs, verbose=False)
    assert len(report.layers) == 2
    model.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(again(**inputs)[0], model(**inputs)[0])


def test_options_are_checked_before_anything_runs(tiny, text):
    model = tiny("roberta")
    with pytest.raises(InvalidInputError, match="one of 'lln', 'lln_diag', 'lln_keys'"):
        convert(model, "linear", verbose=False)
    with pytest.raises(InvalidInputError, match="needs calibrate, inputs"):
        convert(model, "lln_diag", statistics="fixed", verbose=False)
    with pytest.raises(InvalidInputError, match="mix"):
        convert(model, "lln_diag", mix="both", verbose=False)


def test_what_is_no_batch_is_refused_with_how_to_make_one(tiny, text):
    model = tiny("roberta")
    for name in ("calibrate", "batch"):
        for wrong, message in (
            (["a text"], f"{name} must be a dictionary .*return_tensors='pt'.* got list"),
            (text()["input_ids"], f"{name} must be a dictionary .* got Tensor"),
            ({"input_ids": [[5, 6]]}, rf"{name}\['input_ids'\] must be a tensor, got a list"),
            ({"input_ids": text()["input_ids"].to("meta")}, f"{name} is on meta and the model on"),
        ):
            with pytest.raises(InvalidInputError, match=message):
                convert(model, verbose=False, **{name: wrong})
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("model", ["folder", torch.nn.Linear(2, 2)], ids=["path", "module"])
def test_what_is_no_model_of_transformers_is_refused(model):
    with pytest.raises(InvalidInputError, match=f"got {type(model).__name__}; a Sent"):
        convert(model, "lln_diag")


def test_the_table_says_what_changed(tiny, text, capsys):
    model = tiny("roberta")
    report = convert(model, "lln_diag", layers=[0], calibrate=text())
    assert capsys.readouterr().out == ""
    assert repr(report) == str(report)
    assert "1 of 2 attention layers run lln_diag, statistics fixed, α and β from 24" in str(report)
    assert NAME.format(0) in str(report)
    assert "4×8" in str(report)
    assert f"{report.layers[0].moved:.1%}" in str(report)


def test_exact_keys_of_cross_attention_are_refused(text):
    sizes = {"d_model": 32, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "vocab_size": 99}
    layers = {"encoder_layers": 2, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    model = transformers.BartModel(transformers.BartConfig(**sizes, **layers, **heads)).eval()
    ids = text(20)["input_ids"]
    batch = {"input_ids": ids, "decoder_input_ids": ids[:, :7]}
    with pytest.raises(InvalidInputError, match=r"BartModel has cross attention, .* 'lln'"):
        convert(model, calibrate=batch)
    convert(model, "lln", calibrate=batch)


def test_a_bar_shows_the_layers_on_a_terminal_only(tiny, text, capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    convert(tiny("roberta"), calibrate=text())
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    convert(tiny("roberta"), calibrate=text())
    out, err = capsys.readouterr()
    assert out == ""
    assert "layers" in err
    steps = []
    convert(tiny("roberta"), calibrate=text(), on_step=lambda *step: steps.append(step))
    assert steps == [("layers", 0, 2), ("layers", 1, 2), ("layers", 2, 2)]
    assert capsys.readouterr() == ("", "")


def test_the_table_is_printed_on_request(tiny, capsys):
    convert(tiny("roberta"), "lln_diag", verbose=True)
    assert capsys.readouterr().out.count("2 of 2 attention layers run lln_diag") == 1


@pytest.mark.parametrize("statistics", ["fixed", "learned", "running"])
def test_few_tokens_are_warned_of(tiny, text, statistics):
    options = {"statistics": statistics, "verbose": False}
    with pytest.warns(CalibrationWarning, match="rest on 20 tokens, too few to trust"):
        report = convert(tiny("roberta"), "lln_diag", calibrate=text(padding=4), **options)
    assert report.tokens == 20
    assert "Note: α and β of a head rest on 20 tokens" in str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = convert(tiny("roberta"), "lln_diag", calibrate=text(32), **options)
    assert report.tokens == 64
    assert "Note" not in str(report)
    model = tiny("roberta")
    with pytest.raises(
        InvalidInputError, match=r"two tokens .* the longest one has 1; calibrate on"
    ):
        convert(model, "lln_diag", calibrate=text(1), **options)
    assert model.config._attn_implementation == "sdpa"


def test_heads_with_unusual_temperatures_are_named(tiny, text):
    model = tiny("roberta")
    for layer in model.encoder.layer:
        # Scores in the hundreds: every query has a single key.
        layer.attention.self.query.weight.data *= 3000
    with pytest.warns(CalibrationWarning, match=r"^\d of 8 heads got α up to \d+ and β up to \d+"):
        report = convert(model, "lln_diag", calibrate=text(64), verbose=False)
    assert sum(layer.sharp for layer in report.layers) > 0


CALIBRATED = {"fixed": {}, "running": {"statistics": "running"}, "gate": {"mix": "gate"}}


@pytest.mark.parametrize("options", CALIBRATED.values(), ids=CALIBRATED)
def test_what_an_earlier_conversion_found_is_not_dropped_in_silence(tiny, text, tmp_path, options):
    model = tiny("roberta")
    convert(model, "lln_diag", calibrate=text(), verbose=False, **options)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        InvalidInputError, match=r"is converted already.* pass calibrate, inputs to"
    ):
        convert(model, "lln_diag", verbose=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    model.save_pretrained(tmp_path / "in")
    with pytest.raises(InvalidInputError, match="would be lost; pass calibrate, inputs to find"):
        model_commands.convert(tmp_path / "in", tmp_path / "out")
    with pytest.warns(CalibrationWarning, match="converted before: its α, β and joins were repl"):
        report = convert(model, "lln_diag", calibrate=text(64), verbose=False)
    assert "Note: the model was converted before" in str(report)


def test_a_conversion_that_found_nothing_may_be_repeated(tiny):
    model = tiny("roberta")
    convert(model, "lln_diag", verbose=False)
    report = convert(model, "lln", verbose=False)
    assert not report.replaced
    assert "Note" not in str(report)


# The command line


@pytest.fixture
def run(monkeypatch, capsys):
    """The command line, here: a process of its own takes seconds."""

    def run_here(*arguments):
        monkeypatch.setattr(sys, "argv", ["lln", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code, capsys.readouterr().err
        return capsys.readouterr().out

    return run_here


def test_command_converts_a_folder(tiny, text, tmp_path, save_with_tokenizer, run):
    save_with_tokenizer(tiny("bert", model="BertForSequenceClassification"), tmp_path / "in")
    lines = "\n".join(f"w{i} w{i + 3} w{i + 7} w{i + 1}" for i in range(2, 30))
    (tmp_path / "text.txt").write_text(lines)
    out = tmp_path / "out"
    arguments = ("convert", tmp_path / "in", out, "--calibrate", tmp_path / "text.txt")
    told = run(*arguments, "--attention", "lln_diag", "--mix", "gate", "--layers", "1")
    assert "1 of 2 attention layers run lln_diag" in told
    assert "random inputs" not in told
    assert (out / "1_Pooling" / "config.json").exists()
    assert (out / "tokenizer.json").exists()
    saved = json.loads((out / "config.json").read_text())["attn_implementation"]
    assert saved.startswith("lln_diag (of the package lln; ")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert model(**text()).logits.isfinite().all()
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.slow
def test_command_converts_to_exact_keys(tiny, tmp_path, save_with_tokenizer, run):
    save_with_tokenizer(tiny("bert"), tmp_path / "in")
    lines = "\n".join(f"w{i} w{i + 3} w{i + 7} w{i + 1}" for i in range(2, 30))
    (tmp_path / "text.txt").write_text(lines)
    arguments = ("convert", tmp_path / "in", tmp_path / "out", "--calibrate", tmp_path / "text.txt")
    options = ("--attention", "lln_keys", "--group-size", "16", "--convolution", "5")
    run(*arguments, *options)
    written = (tmp_path / "out" / "config.json").read_text()
    assert '"group_size": 16' in written
    assert '"convolution": 5' in written


def test_lines_are_joined_for_exact_keys(tiny, tmp_path, save_with_tokenizer):
    from lln.integrations.folders import convert_folder

    save_with_tokenizer(tiny("bert"), tmp_path / "in")
    lines = "\n".join(f"w{i} w{i + 3} w{i + 7} w{i + 1}" for i in range(2, 50))
    (tmp_path / "text.txt").write_text(lines)
    said = []
    options = {"layers": None, "samples": 2, "tokens": 24, "overwrite": False, "echo": said.append}
    options |= {"calibrate": tmp_path / "text.txt", "block_size": 8}
    for attention, tokens in (("lln_keys", 2 * 24), ("lln_diag", 2 * 4)):
        keys = {"keys": 4} if attention == "lln_keys" else {}
        convert_folder(
            tmp_path / "in", tmp_path / attention, attention=attention, **keys, **options
        )
        table = " ".join(said[-2].split())
        assert f"from {tokens} tokens" in table
        assert "guess" not in table


def test_command_refuses_in_one_sentence(tiny, tmp_path, monkeypatch):
    from lln.integrations.folders import convert_folder

    tiny("bert").save_pretrained(tmp_path / "in")
    said = []
    options = {
        "attention": "lln",
        "layers": None,
        "calibrate": None,
        "samples": 4,
        "tokens": 16,
        "overwrite": False,
        "echo": said.append,
    }
    with pytest.raises(InvalidInputError, match=r"no config\.json"):
        convert_folder(tmp_path / "nowhere", tmp_path / "out", **options)
    (tmp_path / "there").mkdir()
    with pytest.raises(InvalidInputError, match="--overwrite"):
        convert_folder(tmp_path / "in", tmp_path / "there", **options)
    (tmp_path / "text.txt").write_text("some words")
    with pytest.raises(InvalidInputError, match="no tokenizer"):
        convert_folder(
            tmp_path / "in",
            tmp_path / "out",
            **(options | {"calibrate": tmp_path / "text.txt"}),
        )
    with pytest.raises(InvalidInputError, match="neither a text file nor a folder"):
        convert_folder(
            tmp_path / "in", tmp_path / "out", **(options | {"calibrate": tmp_path / "none"})
        )
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text((tmp_path / "in/config.json").read_text())
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(InvalidInputError, match="cannot be loaded"):
        convert_folder(tmp_path / "broken", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    assert not said
    convert_folder(tmp_path / "in", tmp_path / "out", **options)
    assert any("measured on random inputs" in line for line in said)
    convert_folder(tmp_path / "in", tmp_path / "out", **(options | {"overwrite": True}))
    assert (tmp_path / "out" / "model.safetensors").exists()
