"""Models that keep their attention to themselves are refused before anything of them runs."""

import copy

import pytest
import torch
import transformers
from tests.integrations.conftest import MODELS
from torch import nn

from lln.errors import UnsupportedModelError
from lln.integrations.convert import convert
from lln.integrations.own_attention import keeps_own_attention
from lln.integrations.transformers import register

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
}
# What used to happen: softmax in silence, a shape error, a shape error, a KeyError.
OWN = {
    "deberta-v2": (transformers.DebertaV2Config, transformers.DebertaV2Model),
    "mpnet": (transformers.MPNetConfig, transformers.MPNetModel),
    "bloom": (transformers.BloomConfig, transformers.BloomForCausalLM),
    "falcon": (transformers.FalconConfig, transformers.FalconForCausalLM),
}
each_attention = pytest.mark.parametrize("attention", ["lln", "lln_diag"])


@pytest.fixture(params=OWN)
def own(request, tmp_path):
    """A tiny model with attention of its own and the folder it lies in, without LLN."""
    config, kind = OWN[request.param]
    register()
    model = kind(config(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    return request.param, model, tmp_path


def sentence(name, model, attention):
    return (
        rf"^models of type '{name}' \({type(model).__name__}\) compute attention in their own "
        rf"layers .*'{attention}' cannot replace it; .*attn_implementation='eager'.*\.$"
    )


@each_attention
def test_every_way_in_gives_the_same_sentence(own, attention):
    name, model, folder = own
    refused = pytest.raises(UnsupportedModelError, match=sentence(name, model, attention))
    with refused:
        type(model).from_pretrained(folder, attn_implementation=attention)
    with refused:
        type(model)._from_config(copy.deepcopy(model.config), attn_implementation=attention)
    ids = torch.randint(3, 99, (1, 8))
    with refused:
        convert(model, attention, batch={"input_ids": ids}, verbose=False)
    assert model(input_ids=ids)[0].isfinite().all()


def test_a_folder_that_claims_lln_says_so_and_loads_without(own):
    name, model, folder = own
    model.config.attn_implementation = "lln"
    model.config.save_pretrained(folder)
    with pytest.raises(UnsupportedModelError, match=sentence(name, model, "lln")):
        type(model).from_pretrained(folder)
    again = type(model).from_pretrained(folder, attn_implementation="eager")
    assert again.config._attn_implementation == "eager"


@each_attention
@pytest.mark.parametrize("name", [name for name in MODELS if name != "deberta"])
def test_models_that_call_the_interface_are_built(tiny, name, attention):
    model = tiny(name, attention)
    assert model.config._attn_implementation == attention
    assert not keeps_own_attention(type(model))


def test_it_is_told_as_transformers_tells_it(tiny):
    kinds = [getattr(transformers, kind) for kind in (*MODELS.values(), "LongformerModel")]
    kinds += [kind for _, kind in OWN.values()]
    for kind in kinds:
        assert keeps_own_attention(kind) != kind._can_set_attn_implementation(), kind


def test_a_class_of_ones_own_is_judged_by_what_it_inherits(tiny):
    class Mine(transformers.BertModel):
        pass

    class Attention(nn.Module):
        pass

    class Other(transformers.DebertaV2Model):
        pass

    assert not keeps_own_attention(Mine)
    assert keeps_own_attention(Other)
    Mine.__module__ = "a module that was taken away"
    assert not keeps_own_attention(Mine)


def test_parts_are_asked_themselves():
    register()
    vision = transformers.ViTConfig(image_size=32, patch_size=8, **SIZES)
    text = transformers.BertConfig(**SIZES)
    both = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(vision, text)
    both._attn_implementation = "lln"
    model = transformers.VisionTextDualEncoderModel(both)
    assert model.text_model.config._attn_implementation == "lln"
    text = transformers.DebertaV2Config(**SIZES)
    both = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(vision, text)
    both._attn_implementation = "lln"
    with pytest.raises(UnsupportedModelError, match="deberta-v2"):
        transformers.VisionTextDualEncoderModel(both)
