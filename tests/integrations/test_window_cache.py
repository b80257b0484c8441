"""Layers with a sliding window keep the keys inside it, and no others."""

import pytest
import torch
import transformers

from lln.integrations.attached import KeptSoftmax
from lln.integrations.cache import LLNCache, LLNCacheLayer, WindowCacheLayer
from lln.integrations.convert import convert

WINDOW = 8
FIXED = {"statistics": "fixed", "alpha": 2.0, "beta": 2.0, "block_size": 4}
# All layers have a window, or one of two.
each_model = pytest.mark.parametrize("name", ["mistral", "gemma"])


@pytest.fixture
def windowed(tiny):
    def make(name, **options):
        return tiny(name, "lln_diag", FIXED, **options)

    return make


def kept(cache):
    """Lengths of the keys and values of window layers, and that they alone take memory."""
    layers = [layer for layer in cache.layers if isinstance(layer, WindowCacheLayer)]
    assert layers
    sides = [side for layer in layers for side in (layer.keys, layer.values)]
    for side in sides:
        batch, heads, keys, width = side.shape
        # One more may be there: the oldest is left out without copying the others.
        room = batch * heads * (keys + 1) * width * side.element_size()
        assert side.untyped_storage().nbytes() <= room
    return {side.shape[2] for side in sides}


def positions(mask):
    return (mask.cumsum(1) - 1).clamp_min(0)


def in_pieces(model, inputs, sizes, cache):
    mask, parts, start = inputs["attention_mask"], [], 0
    for size in sizes:
        end = start + size
        out = model(
            inputs["input_ids"][:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions(mask)[:, start:end],
            past_key_values=cache,
        )
        parts.append(out.logits)
        start = end
    return torch.cat(parts, 1)


@each_model
def test_memory_ends_with_the_window(windowed, text, name):
    model = windowed(name)
    for tokens in (5, WINDOW - 1, WINDOW, 60):
        cache = LLNCache(model)
        with torch.no_grad():
            model(**text(tokens), past_key_values=cache)
        assert kept(cache) == {min(tokens, WINDOW - 1)}
        assert cache.get_seq_length() == tokens
    out = model.generate(**text(20), max_new_tokens=30, return_dict_in_generate=True)
    assert kept(out.past_key_values) == {WINDOW - 1}
    kinds = [type(layer) for layer in out.past_key_values.layers]
    full = WindowCacheLayer if name == "mistral" else LLNCacheLayer
    assert kinds == [WindowCacheLayer, full]


@each_model
@pytest.mark.parametrize("padding", [0, 3, 11])
def test_generation_equals_recomputation(windowed, text, name, padding):
    model = windowed(name)
    inputs = text(14, padding=padding, side="left")
    options = {"max_new_tokens": 20, "do_sample": False}
    found = model.generate(**inputs, **options)
    assert torch.equal(found, model.generate(**inputs, **options, use_cache=False))
    options |= {"num_beams": 3, "num_return_sequences": 2}
    found = model.generate(**inputs, **options)
    assert torch.equal(found, model.generate(**inputs, **options, use_cache=False))


@each_model
@pytest.mark.parametrize("window", [1, 2, WINDOW])
@pytest.mark.parametrize("sizes", [[19], [1] * 19, [5, 14], [9, 1, 1, 8], [3, 4, 4, 1, 5, 2]])
def test_prompts_in_pieces_equal_the_whole(windowed, text, name, window, sizes):
    model = windowed(name, sliding_window=window)
    inputs = text(19, padding=6, side="left")
    mask = inputs["attention_mask"]
    with torch.no_grad():
        whole = model(**inputs, position_ids=positions(mask), use_cache=False).logits
        cache = LLNCache(model)
        found = in_pieces(model, inputs, sizes, cache)
    assert (found - whole)[mask.bool()].abs().max() < 2e-6
    assert kept(cache) == {window - 1}


@pytest.mark.filterwarnings("ignore:LLN attention decodes from a full")
@each_model
def test_the_cache_of_transformers_gives_the_same(windowed, text, name):
    model = windowed(name)
    inputs = text(14, padding=3, side="left")
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**inputs, **options)
    for config in (None, model.config):
        theirs = transformers.DynamicCache(config=config)
        found = model.generate(**inputs, **options, past_key_values=theirs)
        assert torch.equal(found, expected)


def test_layers_may_differ_in_their_windows(windowed):
    model = windowed("mistral")
    model.config.per_layer_config = {1: {"sliding_window": 13}}
    assert [layer.sliding_window for layer in LLNCache(model).layers] == [WINDOW, 13]


def test_a_window_layer_left_out_of_conversion_rolls_too(tiny, text):
    model = tiny(
        "gemma", num_hidden_layers=3, layer_types=["sliding_attention"] + ["full_attention"] * 2
    )
    inputs = text(20, padding=3, side="left")
    convert(model, "lln", layers=[2], calibrate=inputs, verbose=False)
    assert any(isinstance(module, KeptSoftmax) for module in model.modules())
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(**inputs, **options)
    kinds = [type(layer) for layer in out.past_key_values.layers]
    assert kinds == [WindowCacheLayer, transformers.cache_utils.DynamicLayer, LLNCacheLayer]
    assert kept(out.past_key_values) == {WINDOW - 1}
    expected = model.generate(**inputs, **options, use_cache=False)
    assert torch.equal(out.sequences, expected.sequences)


def test_assistants_guess_and_are_corrected(windowed, text):
    model, assistant = windowed("mistral"), windowed("mistral", num_hidden_layers=1)
    ids = text(20, batch=1)["input_ids"]
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, prompt_lookup_num_tokens=3), expected)
    assert torch.equal(model.generate(ids, **options, assistant_model=assistant), expected)


def test_cropping_needs_a_past_that_is_recorded(windowed, text):
    model = windowed("mistral")
    inputs = text(20)
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits[:, 16:]
        cache = LLNCache(model)
        in_pieces(model, inputs, [18], cache)
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-2)
        cache = LLNCache(model)
        cache.activate_past_recording()
        in_pieces(model, inputs, [12, 6], cache)
        cache.crop(-2)
        assert cache.get_seq_length() == 16
        found = model(
            inputs["input_ids"][:, 16:],
            attention_mask=inputs["attention_mask"],
            past_key_values=cache,
        ).logits
    assert (found - expected).abs().max() < 2e-6
