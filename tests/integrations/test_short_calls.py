"""Softmax itself in the calls of a converted layer that are sooner with it: what ran, and when."""

import copy

import pytest
import torch

import lln
from lln.errors import InvalidInputError
from lln.functional import softmax_way
from lln.integrations import attend
from lln.integrations.convert import convert
from lln.integrations.short_calls import end_softmax
from lln.observers import add_observer, remove_observer

SIZES = {"keys": 3, "block_size": 4}


@pytest.fixture(autouse=True)
def crossings(monkeypatch):
    """Softmax up to 20 tokens, whatever this machine has; SIZES hold 7 of them."""
    rows = [[None, 20]]
    table = {"cpu": {"compiled": rows, "plain": rows}}
    monkeypatch.setattr(softmax_way, "CROSSINGS", table)


@pytest.fixture
def ran(monkeypatch):
    """What the layers ran, by name."""
    names = []
    for name in ("short_softmax", "attend"):
        own = getattr(attend, name)

        def noted(*given, own=own, name=name):
            out = own(*given)
            if out is not None:
                names.append(name)
            return out

        monkeypatch.setattr(attend, name, noted)
    return names


def outputs(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


def pair(tiny, text, name="roberta", **options):
    """A model as it was, and converted."""
    before = tiny(name)
    after = copy.deepcopy(before)
    convert(after, calibrate=text(70), **(SIZES | options))
    return before, after


@pytest.mark.parametrize("padding", [0, 6])
def test_weights_are_given_after_an_equal_call_that_did_not_ask(tiny, text, ran, padding):
    _, model = pair(tiny, text)
    inputs = text(19, padding=padding)
    found = outputs(model, inputs)
    assert ran[-2:] == ["short_softmax"] * 2
    with torch.no_grad():
        asked = model(**inputs, output_attentions=True)
    assert [weights.shape for weights in asked.attentions] == [(2, 4, 19, 19)] * 2
    assert torch.equal(outputs(model, inputs), found)


def test_packed_sequences_stay_apart_after_an_equal_call_of_one(tiny, text, ran):
    model = tiny("modernbert", global_attn_every_n_layers=1)
    convert(model, calibrate=text(70), **SIZES)
    inputs = text(19, batch=1)
    found, bounds = outputs(model, inputs), torch.tensor([0, 8, 19])
    assert ran[-2:] == ["short_softmax"] * 2
    packed = {"input_ids": inputs["input_ids"], "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    packed["position_ids"] = torch.cat([torch.arange(8), torch.arange(11)])[None]
    before = outputs(model, packed)
    changed = packed | {"input_ids": packed["input_ids"].clone()}
    changed["input_ids"][:, :8] = 5
    assert torch.equal(outputs(model, changed)[:, 8:], before[:, 8:])
    assert torch.equal(outputs(model, inputs), found)


@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("name", ["roberta", "bert", "vit"])
def test_short_calls_are_the_softmax_that_they_were(tiny, text, ran, name, padding):
    if name == "vit":
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32)}
        before = tiny("vit")
        after = copy.deepcopy(before)
        convert(after, calibrate={"pixel_values": torch.randn(9, 3, 32, 32)}, **SIZES)
    else:
        before, after = pair(tiny, text, name)
        inputs = text(19, padding=padding)
    ran.clear()
    found, expected = outputs(after, inputs), outputs(before, inputs)
    assert ran == ["short_softmax"] * 2
    valid = inputs.get("attention_mask", torch.ones(found.shape[:2])).bool()
    assert torch.allclose(found[valid], expected[valid], atol=1e-5)
    # Longer ones run exact keys, and so does the same length where the setting is off.
    ran.clear()
    if name != "vit":
        outputs(after, text(21))
        assert ran == ["attend"] * 2
    after.config.lln["or_softmax"] = False
    assert not torch.allclose(outputs(after, inputs)[valid], expected[valid], atol=1e-5)
    assert set(ran) == {"attend"}


def test_the_first_step_of_training_ends_it_and_is_saved(tiny, text, ran, tmp_path):
    _, model = pair(tiny, text)
    inputs = text(19)
    model.save_pretrained(tmp_path / "untrained")
    model.train()
    ran.clear()
    with torch.no_grad():
        model(**inputs)
    assert model.config.lln["or_softmax"]
    model(**inputs)[0].sum().backward()
    assert not model.config.lln["or_softmax"]
    model.eval()
    outputs(model, inputs)
    assert set(ran) == {"attend"}
    model.save_pretrained(tmp_path / "trained")
    for name, expected in (("untrained", "short_softmax"), ("trained", "attend")):
        loaded = type(model).from_pretrained(tmp_path / name).eval()
        ran.clear()
        outputs(loaded, inputs)
        assert set(ran) == {expected}


def test_a_trained_step_under_a_compiler_ends_it_too(tiny, text):
    _, model = pair(tiny, text)
    compiled = torch.compile(model.train(), fullgraph=True, backend="eager")
    compiled(**text(19))[0].sum().backward()
    assert not model.config.lln["or_softmax"]


def test_gradients_in_eval_mode_are_those_of_exact_keys(tiny, text, ran):
    _, model = pair(tiny, text)
    ran.clear()
    model(**text(19))
    assert ran == ["attend"] * 2
    assert model.config.lln["or_softmax"]


def test_it_can_be_switched_off_and_ended(tiny, text, ran):
    _, model = pair(tiny, text, or_softmax=False)
    ran.clear()
    outputs(model, text(19))
    assert ran == ["attend"] * 2
    assert not model.config.lln["or_softmax"]
    _, model = pair(tiny, text)
    end_softmax(model)
    assert not model.config.lln["or_softmax"]
    with pytest.raises(InvalidInputError, match="or_softmax"):
        convert(tiny("bert"), calibrate=text(70), or_softmax=1)
    model.config.lln["or_softmax"] = "yes"
    with pytest.raises(InvalidInputError, match="or_softmax"):
        outputs(model, text(19))


def test_a_report_says_so_and_measures_exact_keys(tiny, text):
    base = tiny("roberta")
    inputs = text(70)
    moved = []
    for or_softmax in (True, False):
        found = convert(
            copy.deepcopy(base), calibrate=inputs, batch=text(19), or_softmax=or_softmax, **SIZES
        )
        assert ("softmax itself" in " ".join(str(found).split())) == or_softmax
        moved.append(found.moved)
    assert moved[0] == moved[1] > 0
    assert not convert(copy.deepcopy(base), "lln_diag", calibrate=inputs).or_softmax


def test_observers_see_exact_keys(tiny, text):
    _, model = pair(tiny, text)
    seen = []
    add_observer(seen.append)
    try:
        outputs(model, text(19))
    finally:
        remove_observer(seen.append)
    assert [one.kind for one in seen] == ["lln_keys"] * 2


def test_models_by_name_and_other_settings_never_run_it(tiny, text, ran):
    outputs(tiny("roberta", "lln_keys", SIZES), text(19))
    assert set(ran) == {"attend"}
    for changed in ({"impl": "eager"}, {"convolution": 3}):
        _, model = pair(tiny, text, **changed)
        ran.clear()
        outputs(model, text(19))
        assert set(ran) == {"attend"}
    # Neither do weights that are asked for, nor packed sequences.
    _, model = pair(tiny, text)
    ran.clear()
    with torch.no_grad():
        model(**text(19), output_attentions=True)
    assert "short_softmax" not in ran


def test_unset_temperatures_are_refused_in_short_calls_too(tiny, text):
    _, model = pair(tiny, text)
    model.get_submodule("encoder.layer.0.attention.self.lln").statistics.alpha.fill_(torch.nan)
    with pytest.raises(InvalidInputError, match="alpha"):
        outputs(model, text(18))


def test_an_entry_that_changes_is_noticed_and_checked(tiny, text):
    _, model = pair(tiny, text)
    outputs(model, text(19))
    for entry, wrong in (("keys", True), ("keys", -1), ("impl", "fast"), ("alpha", torch.ones(2))):
        kept = model.config.lln.get(entry)
        model.config.lln[entry] = wrong
        with pytest.raises(lln.InvalidInputError, match=entry):
            outputs(model, text(19))
        model.config.lln[entry] = kept
        outputs(model, text(19))
    model.config.lln["fast"] = 1
    with pytest.raises(lln.InvalidInputError, match="unknown settings fast"):
        outputs(model, text(19))
