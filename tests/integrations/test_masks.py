"""Masks of transformers in models with our attention, held against texts that run alone.

All layers here keep softmax, so that transformers' own model is the reference.
"""

import copy
import random

import pytest
import torch
import transformers
from transformers import masking_utils as theirs

from lln.errors import InvalidInputError, UnsupportedModelError
from lln.integrations import mask_probes
from lln.integrations.convert import convert
from lln.integrations.mask_probes import packed_sequences
from lln.integrations.masks import slicing_mask

LENGTHS = (13, 1, 22)
CAUSAL = ("llama", "mistral")
BOTH_WAYS = ("roberta", "modernbert")


def kept(model):
    """A model with our masks, whose layers keep softmax attention."""
    ours = copy.deepcopy(model)
    ids = torch.arange(3, 19).view(2, 8)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    convert(ours, "lln", layers=[], batch=batch, verbose=False)
    assert ours.config._attn_implementation == "lln"
    return ours


@pytest.fixture
def pair(tiny):
    """Transformers' own model and one with our masks, by name."""

    def make(name):
        model = tiny(name)
        return model, kept(model)

    return make


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def texts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 99, (length,), generator=generator) for length in LENGTHS]


def alone(model, text, **options):
    if not model.config.is_encoder_decoder and model.config.model_type in CAUSAL:
        options["use_cache"] = False
    return model(text[None], **options)[0][0]


def assert_near(found, expected):
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", CAUSAL + BOTH_WAYS)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_padding_changes_nothing(pair, name, side):
    model, ours = pair(name)
    if side is None:
        for text in texts():
            assert_near(alone(ours, text), alone(model, text))
        return
    longest = max(LENGTHS)
    ids, mask = torch.zeros(2, len(LENGTHS), longest, dtype=torch.int64)
    places = [slice(-length, None) if side == "left" else slice(length) for length in LENGTHS]
    for row, (text, place) in enumerate(zip(texts(), places, strict=True)):
        ids[row, place], mask[row, place] = text, 1
    options = {}
    if name in CAUSAL:
        options = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0), "use_cache": False}
    elif side == "left" and name == "modernbert":
        options = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    found = ours(ids, attention_mask=mask, **options)[0]
    for row, (text, place) in enumerate(zip(texts(), places, strict=True)):
        assert_near(found[row, place], alone(model, text))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", CAUSAL)
def test_texts_packed_by_their_positions_do_not_see_each_other(pair, name, rows):
    """With a window, too; and positions of one row for a batch of two."""
    model, ours = pair(name)
    ids = torch.stack([torch.cat(texts()), torch.cat(texts()).flip(0)][:rows])
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    found = ours(ids, position_ids=places, use_cache=False)[0]
    for text, out in zip(ids.split(LENGTHS, 1), found.split(LENGTHS, 1), strict=True):
        for row in range(rows):
            assert_near(out[row], alone(model, text[row]))


@pytest.mark.parametrize("name", CAUSAL + BOTH_WAYS)
def test_texts_packed_by_boundaries_do_not_see_each_other(pair, name):
    model, ours = pair(name)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    first = 1 if name == "roberta" else 0
    places = torch.cat([torch.arange(first, first + length) for length in LENGTHS])[None]
    options = {"use_cache": False} if name in CAUSAL else {}
    found = ours(
        torch.cat(texts())[None],
        position_ids=places,
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        **options,
    )[0][0]
    for text, out, place in zip(
        texts(), found.split(LENGTHS), places[0].split(LENGTHS), strict=True
    ):
        assert_near(out, alone(model, text, position_ids=place[None]))


@pytest.mark.parametrize("pieces", [[22], [9, 13], [5, 1, 1, 9, 6], [1] * 22])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_cache_goes_on_where_it_ended(pair, name, pieces):
    model, ours = pair(name)
    text = texts()[2]
    cache = transformers.DynamicCache(config=ours.config)
    outs = [ours(part[None], past_key_values=cache)[0][0] for part in text.split(pieces)]
    assert_near(torch.cat(outs), alone(model, text))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_static_caches_are_refused_from_their_first_call(pair, name, padded):
    """Before the first call the cache tells its length by a number, afterwards by a tensor."""
    _, ours = pair(name)
    text = texts()[0][None, :5]
    mask = torch.arange(32)[None] < 5 if padded else None
    cache = transformers.StaticCache(config=ours.config, max_cache_len=32)
    with pytest.raises(InvalidInputError, match="static cache"):
        ours(text, attention_mask=mask, past_key_values=cache)
    dynamic = transformers.DynamicCache(config=ours.config)
    ours(text, past_key_values=dynamic)


def test_chunks_are_refused():
    """A row longer than a chunk, packed texts, and a cache."""
    from lln.integrations.transformers import register

    register()
    config = transformers.Llama4TextConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=37,
        intermediate_size_mlp=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=1,
        attention_chunk_size=8,
        layer_types=["chunked_attention", "full_attention"],
        pad_token_id=0,
    )
    config._attn_implementation = "lln"
    config.lln = {"statistics": "fixed", "alpha": 2.0, "beta": 2.0}
    model = transformers.Llama4ForCausalLM(config).eval()
    ids = texts()[2][None]
    for options in (
        {},
        {"attention_mask": torch.ones_like(ids)},
        {"position_ids": torch.arange(11).repeat(1, 2), "use_cache": False},
    ):
        with pytest.raises(InvalidInputError, match="pattern of masked pairs"):
            model(ids, **options)


def test_a_causal_window_that_looks_both_ways_is_refused_beyond_its_edge(tiny):
    """Transformers' masks have one token more on either side than flash attention has."""
    model = tiny("mistral", is_causal=False, sliding_window=13)
    ours = kept(model)
    assert_near(alone(ours, texts()[0]), alone(model, texts()[0]))
    with pytest.raises(UnsupportedModelError, match="at most 13 tokens"):
        alone(ours, texts()[2])


# The mask function itself


def numbers_of(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


def packing(lengths):
    return theirs.packed_sequence_mask_function(numbers_of(lengths))


@pytest.mark.parametrize("window", [None, 2, 8])
def test_packed_sequences_are_found_wherever_they_are_nested(window):
    pattern, packed = theirs.causal_mask_function, packing(LENGTHS)
    if window is not None:
        pattern = theirs.sliding_window_causal_mask_function(window)
    for nested in (
        theirs.and_masks(pattern, packed),
        theirs.and_masks(packed, pattern),
        theirs.and_masks(theirs.and_masks(packed), pattern),
        theirs.and_masks(theirs.and_masks(pattern, theirs.and_masks(packed, pattern))),
    ):
        found = slicing_mask(1, 36, 36, mask_function=nested, local_size=window)
        assert torch.equal(found, numbers_of(LENGTHS))


def test_a_pattern_of_numbers_is_asked_once(monkeypatch):
    asked, ask = [], mask_probes._pairs
    monkeypatch.setattr(mask_probes, "_without_sequences", set())
    monkeypatch.setattr(mask_probes, "_pairs", lambda *given: asked.append(given) or ask(*given))
    for window, batch in ((3, 2), (3, 2), (4, 2), (3, 1), (3, 2)):
        pattern = theirs.sliding_window_causal_mask_function(window)
        assert packed_sequences(pattern, batch, range(9), range(9), window) is None
    assert len(asked) == 3


# Looked up by a pattern, which holds it nowhere.
NUMBERS = torch.zeros(1, 9, dtype=torch.long)


def one_number(_batch, _head, query, key):
    return NUMBERS[0, query] == NUMBERS[0, key]


@pytest.mark.parametrize(
    "part", [theirs.packed_sequence_mask_function(NUMBERS), one_number], ids=["held", "looked up"]
)
def test_a_pattern_that_may_change_is_asked_every_time(part):
    NUMBERS.zero_()
    pattern = theirs.and_masks(theirs.causal_mask_function, part)
    assert packed_sequences(pattern, 1, range(9), range(9)) is None
    NUMBERS[:, 4:] = 1
    found = packed_sequences(pattern, 1, range(9), range(9))
    assert found is not None
    assert torch.equal(found, NUMBERS)


def first_five_see_each_other(batch, head, query, key):
    return (query < 5) & (key < 5)


def every_other(batch, head, query, key):
    return (query - key) % 2 == 0


def key_7_is_hidden(batch, head, query, key):
    return key != 7


def texts_see_the_first_token(batch, head, query, key):
    return key == 0


@pytest.mark.parametrize(
    ("parts", "window"),
    [
        ([theirs.or_masks(theirs.causal_mask_function, first_five_see_each_other)], None),
        ([theirs.causal_mask_function, every_other], None),
        ([theirs.causal_mask_function, key_7_is_hidden], None),
        ([theirs.sliding_window_causal_mask_function(8), key_7_is_hidden], 8),
        ([theirs.causal_mask_function, theirs.sliding_window_overlay(8)], None),
        ([theirs.sliding_window_causal_mask_function(8)], 9),
        (
            [
                theirs.causal_mask_function,
                theirs.or_masks(packing(LENGTHS), texts_see_the_first_token),
            ],
            None,
        ),
        ([theirs.causal_mask_function, packing((12, 12, 12)), every_other], None),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_other_patterns_are_refused(parts, window, padded):
    mask = torch.ones(1, 36, dtype=torch.bool) if padded else None
    pattern = theirs.and_masks(*parts)
    with pytest.raises(InvalidInputError, match="pattern of masked pairs"):
        slicing_mask(1, 36, 36, mask_function=pattern, attention_mask=mask, local_size=window)


def test_packing_and_padding_together_are_refused():
    pattern = theirs.and_masks(theirs.causal_mask_function, packing(LENGTHS))
    mask = torch.ones(1, 36, dtype=torch.bool)
    with pytest.raises(InvalidInputError, match="pattern of masked pairs"):
        slicing_mask(1, 36, 36, mask_function=pattern, attention_mask=mask)


def drawn_pattern(draw, tokens, batch, window):
    """Parts of transformers' patterns in some order, sometimes with a pair hidden or shown."""
    cuts = [draw.choices(range(5), k=tokens) for _ in range(batch)]
    numbers = torch.tensor([sorted(cut) for cut in cuts])
    parts = [theirs.packed_sequence_mask_function(numbers)] if draw.random() < 0.6 else []
    if draw.random() < 0.8:
        parts.append(theirs.causal_mask_function)
        if window is not None:
            parts.append(theirs.sliding_window_overlay(window))
    elif window is not None:
        parts.append(theirs.sliding_window_bidirectional_overlay(window))
    if draw.random() < 0.2:
        starts = torch.zeros(batch, dtype=torch.int64)
        parts.append(theirs.chunked_overlay(draw.choice([3, 8]), starts))
    if draw.random() < 0.4:
        row, query, key = (draw.randrange(size) for size in (batch, tokens, tokens))
        changed = torch.zeros(batch, tokens, tokens, dtype=torch.bool)
        changed[row, query, key:] = True
        parts.append(lambda batch, head, query, key: ~changed[batch, query, key])
    draw.shuffle(parts)
    return theirs.and_masks(*(parts or [theirs.bidirectional_mask_function]))


def test_what_is_not_refused_is_right_at_every_pair():
    draw, accepted, refused = random.Random(0), 0, 0
    for _ in range(300):
        tokens, batch = draw.choice([1, 2, 3, 9, 25]), draw.choice([1, 3])
        window = draw.choice([None, None, 1, 2, 5, 17])
        pattern = drawn_pattern(draw, tokens, batch, window)
        place = torch.arange(tokens)
        rows = torch.arange(batch)[:, None, None]
        shown = pattern(rows, 0, place[:, None], place).expand(batch, tokens, tokens)
        try:
            numbers = packed_sequences(pattern, batch, range(tokens), range(tokens), window)
        except InvalidInputError:
            refused += 1
            continue
        accepted += 1
        same = torch.ones(batch, tokens, tokens, dtype=torch.bool)
        if numbers is not None:
            same = numbers[:, :, None] == numbers[:, None, :]
        distance, reach = place[:, None] - place, window or tokens
        causal = same & (distance >= 0) & (distance < reach)
        both_ways = same & (distance.abs() <= reach)
        assert torch.equal(shown, causal) or torch.equal(shown, both_ways)
    assert min(accepted, refused) > 50


def test_a_mask_that_hides_nothing_is_none():
    mask = torch.ones(2, 9, dtype=torch.bool)
    assert slicing_mask(2, 6, 9, q_offset=3, attention_mask=mask) is None
    mask[1, 0] = False
    assert slicing_mask(2, 6, 9, q_offset=3, attention_mask=mask) is not None
    # Only what is left after the cut counts.
    assert slicing_mask(2, 6, 6, attention_mask=mask) is None
