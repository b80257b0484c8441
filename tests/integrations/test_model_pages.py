"""Models with a window, first tokens and pages: which get them, generation, saving, refusals."""

import copy

import pytest
import torch
import transformers

import lln
from lln.cpu import compiled_passes, library
from lln.errors import InvalidInputError
from lln.functional import prepared_calls
from lln.integrations import attend
from lln.integrations.cache import LLNCache
from lln.integrations.convert import convert
from lln.integrations.page_cache import PageCacheLayer
from lln.integrations.short_calls import short_softmax
from lln.integrations.surgeon import has_rotations

FORM = {"pages": 2, "page_size": 4, "window": 5, "sinks": 2, "rank": 3}
GREEDY = {"do_sample": False, "max_new_tokens": 9}
# So large that greedy choices do not hang on rounding.
SPREAD = {"initializer_range": 0.3}


def paged(tiny, text, name="llama", calibrate=True):
    model = tiny(name, **SPREAD)
    given = {"calibrate": text(40, padding=7)} if calibrate else {"batch": text(12)}
    convert(model, **given, **(FORM if calibrate else {"pages": 2}))
    return model


def index_of(model):
    return model.model.layers[0].self_attn.lln.index


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("llama", {}, "window 127, 16 sinks, pages 32×16, rank 4"),
        ("gpt2", {"window": 9}, "window 9, 16 sinks, pages 32×16, rank 4"),
        ("modernbert", {}, "window 64, pages 32×16, rank 4"),
        ("modernbert", {"pages": 3, "rank": 99}, "window 64, pages 3×16, rank 8"),
        ("roberta", {"sinks": 1}, "window 64, 1 sinks, pages 32×16, rank 4"),
        ("roberta", {}, None),
        ("modernbert", {"keys": 64}, None),
        ("modernbert", {"statistics": "learned"}, None),
    ],
)
def test_conversion_picks_the_form_that_suits_the_model(tiny, text, name, options, wanted):
    model = tiny(name)
    report = convert(model, "lln_keys", calibrate=text(40), **options)
    first = report.layers[0]
    assert (None if first.pages is None else str(first.pages)) == wanted
    assert (first.alpha is None) == (wanted is not None)
    assert (wanted or "α") in str(report)
    if name == "modernbert":
        assert report.layers[1].attention == "window"


def test_rotations_are_seen_where_they_are(tiny):
    assert has_rotations(tiny("modernbert"))
    assert has_rotations(tiny("llama"))
    assert not has_rotations(tiny("roberta"))
    assert not has_rotations(tiny("vit"))


def test_a_layer_is_the_function(tiny, text):
    model = paged(tiny, text)
    calls = []
    with attend.observed(lambda call: calls.append(call)):
        model(**text(40, padding=6, side="left"))
    call, form = calls[0], {name: FORM[name] for name in FORM if name != "rank"}
    choice = index_of(model)()(call.query, call.key)
    options = {"key_mask": call.mask, "is_causal": True, "enable_gqa": True}
    sides = (call.query, call.key, call.value)
    expected = lln.page_attention(*sides, choice=choice, **form, **options)
    assert torch.equal(attend.attend(call), expected)


def test_enough_pages_are_softmax(tiny, text):
    report = convert(tiny("llama", **SPREAD), calibrate=text(60), window=7, pages=15, page_size=4)
    assert report.moved < 1e-5


@pytest.mark.parametrize(
    ("name", "calibrate"), [("llama", True), ("llama", False), ("gpt2", True), ("mistral", True)]
)
def test_generation_equals_no_cache_with_any_cache(tiny, text, name, calibrate):
    options = {} if name != "mistral" else {"layers": [0]}
    model = tiny(name, **SPREAD) if name != "mistral" else tiny(name, sliding_window=None, **SPREAD)
    batch = {"calibrate": text(40)} if calibrate else {"batch": text(12)}
    convert(
        model, **batch, **{k: v for k, v in FORM.items() if calibrate or k != "rank"}, **options
    )
    inputs = text(30, padding=9, side="left") | GREEDY
    wanted = model.generate(**inputs, use_cache=False)
    out = model.generate(**inputs, return_dict_in_generate=True)
    assert torch.equal(out.sequences, wanted)
    assert isinstance(out.past_key_values, LLNCache)
    kinds = [isinstance(layer, PageCacheLayer) for layer in out.past_key_values.layers]
    assert kinds == [True, name != "mistral"]
    theirs = transformers.DynamicCache()
    assert torch.equal(model.generate(**inputs, past_key_values=theirs), wanted)


@torch.no_grad()
def test_texts_that_are_seen_whole_run_softmax_itself(tiny, text):
    for name, most in (("llama", 1 + 5 + 2 * 4), ("modernbert", 2 * 4)):
        model = tiny(name)
        convert(model, calibrate=text(40), **(FORM | {"layers": [0]}))
        for tokens in (most, most + 1):
            calls = []
            with attend.observed(lambda call, calls=calls: calls.append(call)):
                model(**text(tokens))
            found = short_softmax(calls[0])
            assert (found is not None) == (tokens == most)
            if found is not None:
                assert (found - attend.attend(calls[0])).abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "modernbert"])
def test_compiled_passes_serve_prompts_and_steps(tiny, text, name, compiled, monkeypatch):
    model, inputs, asked = paged(tiny, text, name), text(40, padding=6, side="left"), []
    own = compiled_passes.forward_pages
    monkeypatch.setattr(
        compiled_passes,
        "forward_pages",
        lambda call: asked.append(call.query.shape[2]) or own(call),
    )
    found = model(**inputs)[0]
    layers = len(asked)
    assert asked == [40] * layers
    assert layers > 0
    if name == "llama":
        model.generate(**inputs, **GREEDY)
        assert asked == [40] * 2 * layers + [1] * 8 * layers
    with monkeypatch.context() as without:
        without.setattr(library, "_found", "switched off by this test")
        prepared_calls.clear()
        plain = model(**inputs)[0]
    prepared_calls.clear()
    seen = inputs["attention_mask"].bool()
    assert (found - plain)[seen].abs().max() < 1e-4 * plain[seen].abs().max()


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"do_sample": True}, {"num_return_sequences": 2, "num_beams": 2}],
    ids=str,
)
def test_beams_and_samples_equal_no_cache(tiny, text, options):
    model = paged(tiny, text)
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        inputs = text(25, padding=4, side="left") | GREEDY | options
        found.append(model.generate(**inputs, use_cache=use_cache))
    assert torch.equal(*found)


def test_assisted_decoding_and_crop(tiny, text):
    model, ids = paged(tiny, text), text(30, batch=1)["input_ids"]
    wanted = model.generate(ids, **GREEDY)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **GREEDY), wanted)
    helper = paged(tiny, text, calibrate=False)
    assert torch.equal(model.generate(ids, assistant_model=helper, **GREEDY), wanted)


@torch.no_grad()
def test_prompts_in_pieces_in_changed_caches_equal_the_whole(tiny, text):
    model, ids = paged(tiny, text), text(90, batch=1)["input_ids"]
    whole = model(ids, use_cache=False).logits
    for cache in (LLNCache(model), transformers.DynamicCache()):
        parts, start = [], 0
        for size in (30, 1, 1, 7, 50, 1):
            # Two tokens too many, which are forgotten again.
            wrong = torch.randint(3, 99, (1, 2))
            model(wrong, past_key_values=cache)
            cache.crop(-2)
            piece = ids[:, start : start + size]
            parts.append(model(piece, past_key_values=cache).logits)
            start += size
        assert (torch.cat(parts, 1) - whole).abs().max() < 1e-4
    cache, both = LLNCache(model), torch.cat([ids, ids.flip(1)])
    model(both[:, :60], past_key_values=cache)
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0, 5]))
    cache.reorder_cache(torch.tensor([1, 0]))
    rest = model(both[[1, 0], 60:], past_key_values=cache).logits
    swapped = model(both[[1, 0]], use_cache=False).logits
    assert (rest - swapped[:, 60:]).abs().max() < 1e-4
    assert cache.get_seq_length() == 90
    assert cache.size() > 0
    cache.reset()
    assert cache.get_seq_length() == 0
    assert (model(ids, past_key_values=cache).logits - whole).abs().max() < 1e-4


@torch.no_grad()
def test_room_grows_by_doubling_and_keys_are_projected_once(tiny, text, monkeypatch):
    model, ids = paged(tiny, text), text(60, batch=1)["input_ids"]
    cache, projected, rooms = LLNCache(model), [], set()
    of_keys = lln.PageIndex.of_keys
    monkeypatch.setattr(
        lln.PageIndex, "of_keys", lambda self, key: projected.append(key) or of_keys(self, key)
    )
    for start, end in ((0, 10), *((at, at + 1) for at in range(10, 60))):
        model(ids[:, start:end], past_key_values=cache)
        rooms.add(cache.layers[0].keys.untyped_storage().data_ptr())
    assert {key.shape[2] for key in projected[2:]} == {1}
    assert len(projected) == 2 * 51
    assert len(rooms) == 1


@torch.no_grad()
def test_everything_moves_away_and_back(tiny, text):
    """To another device and back; there is one here that holds no numbers, which is enough."""
    model, ids = paged(tiny, text), text(40, batch=1)["input_ids"]
    expected = model(ids, use_cache=False).logits[:, 30:]
    cache = LLNCache(model)
    model(ids[:, :30], past_key_values=cache)
    cache.layers[0].offload()
    found = model(ids[:, 30:], past_key_values=cache).logits
    assert (found - expected).abs().max() < 1e-4
    layer = cache.layers[0]
    layer.device = torch.device("meta")
    layer.prefetch()
    assert {room.device.type for room in (*layer._rooms, layer.keys, layer.values)} == {"meta"}
    assert len(layer._rooms) == 3


def test_gradients_reach_what_a_cache_holds(tiny, text):
    model, ids = paged(tiny, text), text(24, batch=1)["input_ids"]
    found: list[torch.Tensor] = []
    for cut in (24, 11):
        cache = LLNCache(model)
        parts = [
            model(piece, past_key_values=cache).logits
            for piece in ids.split([cut, 24 - cut], 1)
            if piece.numel()
        ]
        model.zero_grad()
        torch.cat(parts, 1).square().sum().backward()
        found.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    assert torch.allclose(*found, rtol=1e-3, atol=1e-3 * found[0].abs().max())


def test_saved_loaded_halved_and_never_run_without_projections(tiny, text, tmp_path):
    model = paged(tiny, text)
    inputs = text(30, seed=2)
    wanted = model(**inputs).logits
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**inputs).logits, wanted)
    assert {name: loaded.config.lln[name] for name in FORM} == FORM
    before = index_of(loaded).key.clone()
    loaded.to(torch.bfloat16)
    assert torch.equal(index_of(loaded).key, before)
    assert loaded(**inputs).logits.dtype == torch.bfloat16
    left = {name: side for name, side in model.state_dict().items() if "lln" not in name}
    model.save_pretrained(tmp_path / "without", state_dict=left)
    empty = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "without")
    with pytest.raises(InvalidInputError, match="were not in the checkpoint"):
        empty(**inputs)


def test_packed_sequences_equal_separate_ones(tiny, text):
    model = tiny("modernbert", global_attn_every_n_layers=1)
    convert(model, calibrate=text(40), pages=2, page_size=2, window=3)
    ids = text(24, batch=1, seed=1)["input_ids"]
    bounds = torch.tensor([0, 9, 10, 24])
    pieces = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
    places = torch.cat([torch.arange(end - start) for start, end in pieces])[None]
    packed = model(ids, position_ids=places, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)[0]
    for start, end in pieces:
        alone = model(ids[:, start:end])[0]
        assert (packed[:, start:end] - alone).abs().max() < 1e-5


def test_by_name_without_conversion(tiny, text):
    model = tiny("llama", "lln_keys", {"pages": 2, "page_size": 4, "window": 5}, **SPREAD)
    inputs = text(30) | GREEDY
    assert torch.equal(model.generate(**inputs), model.generate(**inputs, use_cache=False))


def test_what_does_not_fit_gets_a_sentence(tiny, text):
    model = tiny("llama")
    batch = {"calibrate": text(30)}
    for options, said in (
        ({"attention": "lln_diag", "pages": 3, "block_size": 4}, None),
        ({"attention": "lln_diag", "window": 3}, "window goes with the pages"),
        ({"pages": 0, "rank": 3}, "rank goes with the pages"),
        ({"pages": 3, "block_size": 4}, "choose one of the two forms"),
        ({"window": 3, "statistics": "learned"}, "choose one of the two forms"),
        ({"page_size": 0}, "page_size"),
        ({"pages": -1}, "pages"),
        ({"target": 0.9}, "leave target out"),
    ):
        if said is not None:
            with pytest.raises(InvalidInputError, match=said):
                convert(copy.deepcopy(model), **batch, **options)
    convert(model, **batch, **FORM)
    with pytest.raises(InvalidInputError, match="static cache"):
        model.generate(**text(20), **GREEDY, cache_implementation="static")
    with pytest.raises(InvalidInputError, match="would be lost"):
        convert(model, batch=text(12))
    for name, number in (("pages", 0), ("rank", 2)):
        changed = copy.deepcopy(model)
        changed.config.lln[name] = number
        with pytest.raises(InvalidInputError, match=rf"config.lln\['{name}'\] was changed"):
            changed(**text(12))
    changed = copy.deepcopy(model)
    changed.config.lln["pages"] = 1
    assert not torch.equal(changed(**text(50)).logits, model(**text(50)).logits)
