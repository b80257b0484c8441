"""Generation from a state of fixed size equals computing everything again."""

import copy

import pytest
import torch
import transformers

from lln.errors import BackendUnavailableError, InvalidInputError, LLNError
from lln.integrations.cache import LLNCache, LLNCacheLayer
from lln.integrations.convert import convert
from lln.integrations.streaming import Past, short_range

FIXED = {"statistics": "fixed", "alpha": 2.0, "beta": 2.0}
each_model = pytest.mark.parametrize("name", ["llama", "gpt2"])
each_attention = pytest.mark.parametrize("attention", ["lln", "lln_diag"])
greedy = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}


def positions(mask):
    return (mask.cumsum(1) - 1).clamp_min(0)


def recomputed(model, sequences, mask, prompt):
    """Logits that every generated token was chosen from, from one pass without a cache."""
    new = sequences.shape[1] - mask.shape[1]
    mask = torch.nn.functional.pad(mask, (0, new), value=1)
    with torch.no_grad():
        out = model(sequences, attention_mask=mask, position_ids=positions(mask), use_cache=False)
    return out.logits[:, prompt - 1 : -1]


def alive(cache):
    """Bytes of memory that the cache keeps from being freed, views counted by what they view."""
    tensors = [tensor for layer in cache.layers for tensor in layer.past.tensors().values()]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def test_a_block_far_beyond_what_is_kept_is_one_block():
    sides = torch.randn(3, 2, 2, 40, 8)
    mask = torch.arange(40) >= torch.tensor([[0], [5]])

    def both_parts(size):
        past = Past()
        cuts = (slice(0, 30), slice(30, 40))
        return [short_range(*sides[..., c, :], past, size, mask[:, c]) for c in cuts]

    for found, wanted in zip(both_parts(2**40), both_parts(64), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("name", "attention", "padding"),
    [
        ("llama", "lln", 7),
        pytest.param("gpt2", "lln_diag", 0, marks=pytest.mark.slow),
        pytest.param("gpt2", "lln", 0, marks=pytest.mark.slow),
        pytest.param("llama", "lln_diag", 7, marks=pytest.mark.slow),
    ],
)
def test_generation_equals_recomputation_for_512_tokens(tiny, text, name, attention, padding):
    model = tiny(name, attention, FIXED, num_hidden_layers=1)
    inputs = text(20, padding=padding, side="left")
    out = model.generate(**inputs, max_new_tokens=512, **greedy)
    expected = recomputed(model, out.sequences, inputs["attention_mask"], 20)
    found = torch.stack(out.logits, 1)
    assert found.shape[1] == 512
    assert (found - expected).abs().max() < 5e-6
    assert torch.equal(out.sequences[:, 20:], found.argmax(-1))
    # 531 tokens seen, or 27, both three into a diagonal block of 8.
    short = model.generate(**inputs, max_new_tokens=8, **greedy)
    assert isinstance(out.past_key_values, LLNCache)
    assert alive(out.past_key_values) == alive(short.past_key_values) > 0


@each_attention
def test_the_state_does_not_grow(tiny, text, attention):
    model = tiny("llama", attention, FIXED | {"block_size": 4})
    sizes = []
    for tokens in (9, 401):
        cache = LLNCache(model)
        with torch.no_grad():
            model(**text(tokens), past_key_values=cache)
        sizes.append(cache.size())
        assert cache.get_seq_length() == tokens
    assert sizes[0] == sizes[1] > 0


@each_attention
@each_model
@pytest.mark.parametrize("pieces", [[17], [1] * 17, [5, 12], [6, 1, 1, 9], [3, 4, 4, 1, 5]])
def test_prompts_in_pieces_equal_the_whole(tiny, text, attention, name, pieces):
    model = tiny(name, attention, FIXED | {"block_size": 4})
    inputs = text(17, padding=5, side="left")
    mask = inputs["attention_mask"]
    places = positions(mask)
    whole = model(**inputs, position_ids=places, use_cache=False).logits
    cache, parts, start = LLNCache(model), [], 0
    for size in pieces:
        end = start + size
        out = model(
            inputs["input_ids"][:, start:end],
            attention_mask=mask[:, :end],
            position_ids=places[:, start:end],
            past_key_values=cache,
        )
        parts.append(out.logits)
        start = end
    valid = mask.bool()
    assert (torch.cat(parts, 1) - whole)[valid].abs().max() < 2e-6


def test_pieces_far_apart_in_size_stay_exact(tiny, text):
    """A summary of tiny weight before a piece of huge ones, and the other way round."""
    from lln.integrations.streaming import Past, long_range
    from lln.reference import lln_attention

    torch.manual_seed(0)
    for sizes in ((0.1, 30.0), (30.0, 0.1)):
        query, key, value = torch.randn(3, 1, 2, 20, 8, dtype=torch.float64)
        key[:, :, :10] *= sizes[0]
        key[:, :, 10:] *= sizes[1]
        past = Past()
        parts = [
            long_range(
                *(side[:, :, start:end].float() for side in (query, key, value)),
                past,
                2.0,
                2.0,
                None,
                "eager",
            )
            for start, end in ((0, 10), (10, 20))
        ]
        keep = torch.ones(20, 20, dtype=torch.bool).tril()
        expected = lln_attention(query, key, value, 2.0, 2.0, keep=keep)
        assert (torch.cat(parts, 2) - expected).abs().max() < 2e-5


def test_what_lies_in_padding_has_no_effect():
    """NaN under the mask, in the block that is kept and in the summary."""
    from lln.integrations.streaming import Past, long_range, short_range

    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 7, 8)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, :3] = False
    found = []
    for junk in (0.0, torch.nan):
        key[1, :, :3], value[1, :, :3] = junk, junk
        past, outs = Past(), []
        for part in (slice(0, 5), slice(5, 6), slice(6, 7)):
            sides = [side[:, :, part] for side in (query, key, value)]
            long = long_range(*sides, past, 2.0, 2.0, mask[:, part], "eager")
            outs.append(long + short_range(*sides, past, 4, mask[:, part]))
        found.append(torch.cat(outs, 2))
    assert found[1].isfinite().all()
    assert torch.equal(*found)


@each_model
@each_attention
def test_beam_search_equals_beam_search_without_a_cache(tiny, text, name, attention):
    model = tiny(name, attention, FIXED | {"block_size": 4})
    inputs = text(10, padding=3, side="left")
    options = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 12, "do_sample": False}
    found = model.generate(**inputs, **options)
    assert torch.equal(found, model.generate(**inputs, **options, use_cache=False))


def test_left_padding_changes_no_generated_token(tiny, text):
    model = tiny("llama", "lln", FIXED)
    inputs = text(12, padding=5, side="left")
    padded = model.generate(**inputs, max_new_tokens=15, do_sample=False)[1, 5:]
    alone = model.generate(inputs["input_ids"][1:, 5:], max_new_tokens=15, do_sample=False)[0]
    assert torch.equal(padded, alone)


def test_samples_can_be_reordered_repeated_and_selected(tiny, text):
    model = tiny("llama", "lln_diag", FIXED | {"block_size": 4})
    inputs = text(10, batch=3)
    token = torch.tensor([[5], [6], [7]])

    def step(cache, token):
        with torch.no_grad():
            return model(token, past_key_values=copy.deepcopy(cache)).logits

    cache = LLNCache(model)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    plain = step(cache, token)
    other = copy.deepcopy(cache)
    other.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.allclose(step(other, token[[2, 0, 0]]), plain[[2, 0, 0]], atol=1e-6)
    other.batch_select_indices(torch.tensor([0]))
    assert torch.allclose(step(other, token[2:]), plain[2:], atol=1e-6)
    other.batch_repeat_interleave(2)
    assert torch.allclose(step(other, token[[2, 2]]), plain[[2, 2]], atol=1e-6)
    other.reset()
    assert other.get_seq_length() == 0
    assert other.size() == 0


def test_layers_left_softmax_keep_their_keys(tiny, text):
    model = tiny("llama")
    inputs = text(10, padding=3, side="left")
    convert(model, "lln", layers=[1], calibrate=inputs, verbose=False)
    cache = LLNCache(model)
    assert [type(layer) for layer in cache.layers] == [
        transformers.cache_utils.DynamicLayer,
        LLNCacheLayer,
    ]
    out = model.generate(**inputs, max_new_tokens=20, **greedy)
    expected = recomputed(model, out.sequences, inputs["attention_mask"], 10)
    assert (torch.stack(out.logits, 1) - expected).abs().max() < 5e-6


@pytest.mark.parametrize("mix", [0.3, "gate", "scale", "heads", "ratio"])
def test_every_join_generates_as_it_computes(tiny, text, mix):
    model = tiny("gpt2")
    inputs = text(10)
    convert(model, "lln_diag", calibrate=inputs, mix=mix, block_size=4, verbose=False)
    for name, parameter in model.named_parameters():
        if "gate" in name or "scale" in name:
            torch.nn.init.normal_(parameter)
    out = model.generate(**inputs, max_new_tokens=20, **greedy)
    expected = recomputed(model, out.sequences, inputs["attention_mask"], 10)
    assert (torch.stack(out.logits, 1) - expected).abs().max() < 5e-6


def test_a_conversation_goes_on(tiny, text):
    model = tiny("llama", "lln_diag", FIXED)
    ids = text(10)["input_ids"]
    cache = LLNCache(model)
    first = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
    more = torch.cat([first, ids], 1)
    second = model.generate(more, past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(second, model.generate(more, max_new_tokens=5, do_sample=False))


def test_prefill_in_chunks(tiny, text):
    model = tiny("llama", "lln_diag", FIXED | {"block_size": 4})
    inputs = text(21)
    chunked = model.generate(**inputs, max_new_tokens=5, do_sample=False, prefill_chunk_size=8)
    assert torch.equal(chunked, model.generate(**inputs, max_new_tokens=5, do_sample=False))


# Refusals


def test_a_model_with_other_attention_is_refused(tiny, text):
    with pytest.raises(InvalidInputError, match="attn_implementation"):
        LLNCache(tiny("llama"))
    cache = LLNCache(tiny("llama", "lln", FIXED))
    model = tiny("llama")
    model(text()["input_ids"], past_key_values=cache)
    with pytest.raises(LLNError, match="was not LLN attention"):
        model(text()["input_ids"][:, :1], past_key_values=cache)


def test_cropping_is_refused(tiny, text):
    cache = LLNCache(tiny("llama", "lln", FIXED))
    cache.crop(0)
    with pytest.raises(InvalidInputError, match="cropped"):
        cache.crop(-1)
    with pytest.raises(InvalidInputError, match="iterate"):
        list(cache)


def test_dropout_over_a_cache_is_refused(tiny, text):
    model = tiny("llama", "lln", FIXED, attention_dropout=0.1).train()
    cache = LLNCache(model)
    with pytest.raises(InvalidInputError, match="dropout"):
        model(text()["input_ids"], past_key_values=cache)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_an_implementation_that_cannot_continue_a_cache_is_refused(tiny, text, impl):
    model = tiny("llama", "lln", FIXED | {"impl": impl})
    with pytest.raises(BackendUnavailableError, match=r"config.lln\['impl'\] = 'auto' to generate"):
        model(text()["input_ids"], past_key_values=LLNCache(model))
