"""The convolution of values in a converted model: nothing at first, then trained, and saved."""

import copy
import json

import pytest
import torch
import transformers
from tests.integrations.test_timm import Vision
from torch.nn import functional as F

from lln.errors import InvalidInputError
from lln.integrations import timm
from lln.integrations.attention_call import AttentionCall
from lln.integrations.convert import convert
from lln.integrations.sharded_call import attend_sharded

NAMES = [f"encoder.layer.{index}.attention.self" for index in range(2)]
ATTENTIONS = ("lln", "lln_diag", "lln_keys")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def filters(model):
    return [model.base_model.get_submodule(name).lln.convolution.weight for name in NAMES]


def draw(model):
    with torch.no_grad():
        for weight in filters(model):
            weight.normal_(generator=torch.Generator().manual_seed(1))


def output(model, inputs, **options):
    with torch.no_grad():
        return model(**inputs, **options)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_it_changes_nothing_before_it_is_trained_and_the_values_neighbours_then(
    tiny, text, attention
):
    inputs = text(12, padding=4)
    with_it, without = (tiny("bert", **NO_DROPOUT) for _ in range(2))
    convert(with_it, attention, calibrate=inputs, convolution=3)
    # A layer with a convolution never runs softmax itself in short calls.
    convert(without, attention, calibrate=inputs, or_softmax=False)
    assert torch.equal(output(with_it, inputs)[0], output(without, inputs)[0])
    draw(with_it)
    layer, other = (model.encoder.layer[0].attention.self for model in (with_it, without))
    hidden = torch.randn(1, 12, 32)
    value = layer.value(hidden)
    shifted = F.pad(value, (0, 0, 1, 1)).unfold(1, 3, 1)
    added = torch.einsum("btcw,wc->btc", shifted, layer.lln.convolution.weight)
    torch.testing.assert_close(layer(hidden)[0], other(hidden)[0] + added)


def test_padding_has_no_effect(tiny, text):
    model = tiny("bert", **NO_DROPOUT)
    inputs = text(12, padding=4)
    convert(model, "lln", calibrate=inputs, convolution=5)
    draw(model)
    whole = output(model, inputs)[0]
    alone = {name: side[1:, :8] for name, side in inputs.items()}
    torch.testing.assert_close(whole[1:, :8], output(model, alone)[0], atol=1e-5, rtol=1e-5)


def test_it_is_saved_and_loaded_with_the_folder(tiny, text, tmp_path):
    model, inputs = tiny("bert"), text(12)
    convert(model, "lln_keys", calibrate=inputs, convolution=3, block_size=4, keys=4)
    draw(model)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text("utf-8"))["lln"]
    assert saved["convolution"] == 3
    loaded = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert torch.equal(output(loaded, inputs)[0], output(model, inputs)[0])
    loaded.config.lln["convolution"] = 5
    with pytest.raises(InvalidInputError, match=r"\['convolution'\] was changed from 3 to 5"):
        loaded(**inputs)


def test_weights_that_are_asked_for_are_those_of_the_attention(tiny, text):
    model, inputs = tiny("bert", **NO_DROPOUT), text(12)
    convert(model, "lln", calibrate=inputs, convolution=3)
    before = output(model, inputs, output_attentions=True)
    draw(model)
    after = output(model, inputs, output_attentions=True)
    assert torch.equal(before.attentions[0], after.attentions[0])
    torch.testing.assert_close(after[0], output(model, inputs)[0], atol=1e-5, rtol=1e-5)


def test_a_trained_one_is_not_dropped_in_silence(tiny, text):
    model = tiny("bert")
    convert(model, "lln", convolution=3)
    with pytest.raises(InvalidInputError, match="converted already"):
        convert(model, "lln")


def test_what_it_does_not_take_is_refused(tiny, text):
    inputs = text(12)
    for size, said in ((4, "odd number"), (-1, "convolution must be")):
        with pytest.raises(InvalidInputError, match=said):
            convert(tiny("bert"), "lln", calibrate=inputs, convolution=size)
    with pytest.raises(InvalidInputError, match="does not take LlamaForCausalLM"):
        convert(tiny("llama"), "lln", calibrate=inputs, convolution=3)
    with pytest.raises(InvalidInputError, match="needs a module to live in"):
        tiny("bert", attention="lln", lln={"convolution": 3})(**inputs)
    model = tiny("bert")
    convert(model, "lln", calibrate=inputs, convolution=3)
    sides = torch.randn(3, 1, 4, 12, 8)
    layer = model.encoder.layer[0].attention.self
    call = AttentionCall(layer, "lln", layer.lln.settings, layer.lln, *sides)
    with pytest.raises(InvalidInputError, match="neighbours that another rank has"):
        attend_sharded(call, past=False, weights=False)
    bounds = torch.tensor([0, 5, 12, 24], dtype=torch.int32)
    with pytest.raises(InvalidInputError, match="packed sequences; pad them"):
        model(inputs["input_ids"], cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)


def test_timm_models_have_it_too(tmp_path):
    model, images = Vision().eval(), torch.randn(2, 3, 16, 16)
    fresh = copy.deepcopy(model)
    timm.convert(model, "lln", calibrate=images, convolution=3)
    before = model(images)
    torch.nn.init.ones_(model.blocks[0].lln.convolution.weight)
    assert (model(images) - before).abs().max() > 1e-3
    timm.attach_described(fresh, json.loads(json.dumps(timm.describe(model))))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(images), model(images))
