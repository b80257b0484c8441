"""Attention with exact keys inside other libraries' models: by name, converted, saved, refused."""

import copy
import json

import pytest
import torch
import transformers
from tests.integrations.test_timm import Vision

import lln
from lln.errors import InvalidInputError
from lln.integrations import attend, timm
from lln.integrations.convert import convert
from lln.nn.offsets import FixedOffset, LearnedOffset

SIZES = {"keys": 3, "block_size": 4}
FIXED = {"statistics": "fixed", "alpha": 1.0, "beta": 1.0, "offset": -2.0}
NAME = "encoder.layer.{}.attention.self"
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def heads_of(model, layer=0):
    return model.get_submodule(NAME.format(layer)).lln


def change(found, expected):
    return (found - expected).abs().max().item()


def calls_of(model, **inputs):
    calls = []
    with attend.observed(lambda call: calls.append(call) or attend.softmax(call)):
        model(**inputs)
    return calls


def test_a_layer_by_name_is_the_function(tiny, text):
    model = tiny("roberta", "lln_keys", SIZES)
    calls = []
    with attend.observed(lambda call: calls.append(call)):
        model(**text(19, padding=6))
    assert len(calls) == 2
    for call in calls:
        expected = lln.lln_keys_attention(
            call.query, call.key, call.value, key_mask=call.mask, **SIZES
        )
        assert torch.equal(attend.attend(call), expected)


def test_a_calibration_on_short_texts_says_that_the_offset_is_a_guess(tiny, text):
    for tokens, is_short in ((7, True), (8, False)):
        report = convert(tiny("bert"), "lln_keys", calibrate=text(tokens), **SIZES)
        assert any("their offset is a guess" in note for note in report.notes()) == is_short
        assert [layer.longest for layer in report.layers] == [tokens] * 2
    # Nothing was calibrated, so nothing is doubted.
    report = convert(tiny("bert"), "lln_keys", batch=text(7), **SIZES)
    assert not report.notes()
    assert all(layer.longest is None for layer in report.layers)


def test_padding_changes_nothing_and_defaults_are_those_of_the_function(tiny, text):
    model = tiny("bert", "lln_keys")
    inputs = text(90, padding=17)
    alone = {name: side[1:, :73] for name, side in inputs.items()}
    assert change(model(**inputs)[0][1:, :73], model(**alone)[0]) < 1e-5
    call = calls_of(model, **inputs)[0]
    sides = (call.query, call.key, call.value)
    assert torch.equal(attend.attend(call), lln.lln_keys_attention(*sides, key_mask=call.mask))


def test_conversion_finds_what_the_library_finds(tiny, text):
    model = tiny("roberta")
    inputs = text(30, padding=9)
    calls = calls_of(_as(model, "lln_keys"), **inputs)
    report = convert(model, "lln_keys", calibrate=inputs, **SIZES)
    for index, call in enumerate(calls):
        expected = lln.calibrate_keys(
            call.query, call.key, call.value, key_mask=call.mask, scope="batch", **SIZES
        )
        heads = heads_of(model, index)
        found = (heads.statistics.alpha, heads.statistics.beta, heads.offset.value)
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other.flatten(), rtol=1e-4, atol=1e-4)
        layer = report.layers[index]
        assert layer.attention == "lln_keys"
        assert layer.offset == pytest.approx(
            (expected[2].min().item(), expected[2].max().item()), rel=1e-3
        )
        options = dict(zip(("alpha", "beta", "offset"), expected, strict=True))
        ours = lln.lln_keys_attention(
            call.query, call.key, call.value, key_mask=call.mask, **options, **SIZES
        )
        mask = inputs["attention_mask"].bool()
        soft, ours = (side.transpose(1, 2)[mask] for side in (attend.softmax(call), ours))
        moved = ((ours - soft).norm() / soft.norm()).item()
        assert layer.moved == pytest.approx(moved, rel=1e-3)
    assert "offset" in str(report)
    assert "α, β and offset from 51 tokens" in str(report)


def _as(model, attention):
    """A copy whose calls come to us."""
    model = copy.deepcopy(model)
    model.set_attn_implementation(attention)
    return model


def test_more_keys_bring_a_model_closer_to_its_original(tiny, text):
    moved = []
    for keys in (0, 8, 40):
        model = tiny("roberta", initializer_range=0.3)
        report = convert(model, "lln_keys", calibrate=text(40), keys=keys, block_size=8)
        moved.append(report.moved)
    assert moved[0] > moved[1] > moved[2]
    assert moved[2] < 1e-5


@pytest.mark.parametrize("statistics", ["sample", "fixed", "running", "learned"])
def test_a_converted_model_is_saved_and_loaded(tiny, text, tmp_path, statistics):
    model = tiny("roberta", **NO_DROPOUT)
    inputs = text(24, padding=5)
    convert(model, "lln_keys", calibrate=inputs, statistics=statistics, **SIZES)
    if statistics == "learned":
        with torch.no_grad():
            heads_of(model, 1).offset.value.add_(1.5)
    expected = model(**inputs)[0]
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text("utf-8"))["lln"]
    kept = {"sample": None, "fixed": "fixed"}.get(statistics, "learned")
    wanted = SIZES | {"matching": "rest", "offset": kept}
    assert {name: saved[name] for name in wanted} == wanted
    loaded = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert loaded.config._attn_implementation == "lln_keys"
    assert torch.equal(loaded(**inputs)[0], expected)
    kinds = {"fixed": FixedOffset, "learned": LearnedOffset}
    if kept is not None:
        assert isinstance(heads_of(loaded).offset, kinds[kept])


def test_a_learned_offset_trains(tiny, text):
    model = tiny("roberta", **NO_DROPOUT)
    convert(model, "lln_keys", calibrate=text(24), statistics="learned", **SIZES)
    model.train()(**text(24))[0].square().sum().backward()
    for index in range(2):
        for name, parameter in heads_of(model, index).named_parameters():
            assert parameter.grad.abs().sum() > 0, name


def test_offsets_stay_float32_in_a_half_model(tiny, text):
    model = tiny("roberta")
    convert(model, "lln_keys", calibrate=text(24), **SIZES)
    before = heads_of(model).offset.value.clone()
    model.to(torch.bfloat16)
    assert torch.equal(heads_of(model).offset.value, before)
    assert model(**text(24))[0].dtype == torch.bfloat16


def test_packed_sequences_equal_separate_ones(tiny, text):
    model = tiny("roberta")
    convert(model, "lln_keys", calibrate=text(24), **SIZES)
    ids = text(24, batch=1, seed=1)["input_ids"]
    pieces = [(0, 9), (9, 10), (10, 24)]
    bounds = torch.tensor([0, 9, 10, 24])
    places = torch.cat([torch.arange(1, end - start + 1) for start, end in pieces])[None]
    packed = model(ids, position_ids=places, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)[0]
    for start, end in pieces:
        alone = model(ids[:, start:end], position_ids=places[:, start:end])[0]
        assert change(packed[:, start:end], alone) < 1e-5


@pytest.mark.parametrize("options", [{"pages": 0}, {"group_size": 1}], ids=str)
def test_a_causal_model_gets_pages_or_a_sentence(tiny, text, options):
    with pytest.raises(InvalidInputError, match=r"is causal, and .* the pages of lln\.page_att"):
        convert(tiny("llama"), "lln_keys", calibrate=text(30), **options)


def test_a_causal_model_of_blocks_and_keys_does_not_run(tiny, text):
    """As some were saved; with a past and without."""
    model = tiny("llama", "lln_keys", FIXED | SIZES)
    for use_cache in (False, True):
        with pytest.raises(InvalidInputError, match=r"never causal: use lln\.page_attention"):
            model(text(12)["input_ids"], use_cache=use_cache)
        with pytest.raises(InvalidInputError, match=r"never causal: use lln\.page_attention"):
            model.generate(text(12)["input_ids"], use_cache=use_cache, max_new_tokens=2)


def test_what_does_not_fit_gets_a_sentence(tiny, text):
    model = tiny("roberta")
    with pytest.raises(InvalidInputError, match="mix goes with attention 'lln_diag'"):
        convert(model, "lln_keys", mix="gate", batch=text())
    for options, said in (
        ({"keys": -1}, "keys"),
        ({"group_size": 3}, "group_size must divide block_size"),
        ({"matching": "hope"}, "matching must be one of 'rest'"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            convert(model, "lln_keys", batch=text(), **options)
    with pytest.raises(InvalidInputError, match="matching"):
        convert(model, "lln_diag", matching="rest", batch=text())
    assert not hasattr(model.config, "lln")
    for settings, said in (
        ({"offset": "learned"}, "needs a module to live in"),
        ({"offset": "much"}, "offset must be a finite number"),
        (
            {"select": "query"},
            "select='query', and keys are chosen by blocks only;.*page_attention",
        ),
    ):
        with pytest.raises(InvalidInputError, match=said):
            tiny("roberta", "lln_keys", settings)(**text())
    # What models were saved with when it was one of two.
    tiny("roberta", "lln_keys", {"select": "block"})(**text())


def test_a_changed_offset_in_the_configuration_is_refused(tiny, text):
    model = tiny("roberta")
    convert(model, "lln_keys", calibrate=text(24), **SIZES)
    model.config.lln["keys"] = 5
    model(**text(24))
    model.config.lln["offset"] = -1.0
    with pytest.raises(InvalidInputError, match=r"config.lln\['offset'\] was changed"):
        model(**text(24))


def test_weights_of_every_row_sum_to_one(tiny, text):
    model = tiny("roberta", "lln_keys", SIZES)
    weights = model(**text(18), output_attentions=True).attentions[0]
    assert weights.shape == (2, 4, 18, 18)
    assert (weights.sum(-1) - 1).abs().max() < 1e-5


def test_timm_models_convert_and_load_again():
    torch.manual_seed(0)
    model, images = Vision().eval(), torch.randn(2, 3, 16, 16)
    report = timm.convert(model, "lln_keys", calibrate=images, **SIZES)
    assert report.layers[0].offset is not None
    x = torch.randn(2, 16, 16)
    block = model.blocks[0]
    query, key, value = block.heads(x)
    alpha, beta, offset = block.lln.numbers(query, key, value, None, False)
    numbers = {"alpha": alpha, "beta": beta, "offset": offset}
    expected = lln.lln_keys_attention(query, key, value, **numbers, **SIZES)
    assert change(block(x), block.proj(expected.transpose(1, 2).flatten(2))) < 1e-6
    fresh = Vision().eval()
    timm.attach_described(fresh, json.loads(json.dumps(timm.describe(model))))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(images), model(images))
    with pytest.raises(InvalidInputError, match="mix goes with"):
        timm.convert(Vision(), "lln_keys", mix=0.2)
