"""Exact keys without gradients: the fused path gives what the plain one gives."""

import pytest
import torch

import lln
from lln import reference
from lln.eager import key_attention, key_inference
from lln.functional import plain_ways
from lln.testing import assert_close, make_qkv

GIVEN = {"alpha": 0.8, "beta": 0.9, "offset": -1.0}
CALLS = [
    {"tokens": 64, "block_size": 16, "keys": 8},
    {"tokens": 70, "block_size": 16, "group_size": 4, "keys": 5},
    {"tokens": 33, "block_size": 64, "keys": 4},
    {"tokens": 64, "block_size": 16, "keys": 64},
    {"tokens": 64, "block_size": 16, "keys": 0},
    {"tokens": 50, "block_size": 8, "keys": 6, "width": 24, "value_width": 40, "key_heads": 1},
    {"tokens": 50, "block_size": 8, "keys": 6, "select": "query"},
]


@pytest.fixture
def taken(monkeypatch):
    """How often the fused path was taken."""
    calls = []
    fused = key_attention.attend_without_gradients

    def counted(*arguments, **options):
        calls.append(1)
        return fused(*arguments, **options)

    monkeypatch.setattr(key_attention, "attend_without_gradients", counted)
    # Short sequences would be computed by all scores and a mask.
    monkeypatch.setattr(plain_ways, "can_mask", lambda *sides, **options: False)
    return calls


def inputs_of(call, requires_grad=False):
    options = dict(call)
    shape = {"batch": 2, "heads": 2, "tokens": options.pop("tokens"), "width": 16}
    for name in ("width", "value_width", "key_heads"):
        if name in options:
            shape[name] = options.pop(name)
    return make_qkv(**shape, requires_grad=requires_grad), options | {"enable_gqa": True}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_it_agrees_with_the_reference_and_the_plain_path(taken, monkeypatch, call, masked):
    # Two heads at a time at most, so that heads are cut.
    monkeypatch.setattr(key_inference, "MOST_NUMBERS", 1)
    inputs, options = inputs_of(call, requires_grad=True)
    if masked:
        options["key_mask"] = torch.arange(call["tokens"]) % 5 != 3
        options["key_mask"] = options["key_mask"].repeat(2, 1)
        options["key_mask"][1, :20] = False
    plain = lln.lln_keys_attention(*inputs, **GIVEN, **options, impl="eager")
    assert not taken
    with torch.no_grad():
        found = lln.lln_keys_attention(*inputs, **GIVEN, **options, impl="eager")
    assert taken
    wide = [side.detach().double() for side in inputs]
    expected = lln.lln_keys_attention(*wide, **GIVEN, **options, impl="reference")
    assert_close(found, expected, plain.detach(), what="output")


def test_tensors_and_packed_sequences(taken):
    (query, key, value), _ = inputs_of(CALLS[0])
    numbers = {
        name: torch.linspace(0.5, 1.0, 4).view(2, 2, 1, 1) for name in ("alpha", "beta", "offset")
    }
    options = {"keys": 8, "block_size": 16, "impl": "eager"}
    found = lln.lln_keys_attention(query, key, value, **numbers, **options)
    again = [side.clone().requires_grad_() for side in (query, key, value)]
    torch.testing.assert_close(
        found, lln.lln_keys_attention(*again, **numbers, **options).detach(), rtol=1e-5, atol=1e-6
    )
    rows = [side[0].transpose(0, 1) for side in (query, key, value)]
    ends = torch.tensor([0, 30, 64], dtype=torch.int32)
    packed = lln.lln_keys_attention_varlen(*rows, ends, **GIVEN, **options)
    alone = [side[:1, :, 30:] for side in (query, key, value)]
    expected = lln.lln_keys_attention(*alone, **GIVEN, **options)[0].transpose(0, 1)
    torch.testing.assert_close(packed[30:], expected, rtol=1e-5, atol=1e-6)
    assert len(taken) >= 3


def test_nan_in_masked_keys_stays_there(taken):
    (query, key, value), _ = inputs_of(CALLS[0])
    mask = torch.ones(2, 64, dtype=torch.bool)
    mask[:, 40:] = False
    broken = [torch.where(mask[:, None, :, None], side, torch.nan) for side in (key, value)]
    options = {"keys": 8, "block_size": 16, "key_mask": mask, "impl": "eager"}
    found = lln.lln_keys_attention(query, *broken, **GIVEN, **options)
    assert taken
    assert found[:, :, :40].isfinite().all()


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"scale": -0.2}, {"dtype": torch.float64}, {"grad": True}]
)
def test_what_it_cannot_do_goes_the_plain_way(taken, options):
    (query, key, value), _ = inputs_of(CALLS[0])
    if dtype := options.pop("dtype", None):
        query, key, value = (side.to(dtype) for side in (query, key, value))
    if options.pop("grad", False):
        query.requires_grad_()
    numbers = dict(GIVEN)
    lln.lln_keys_attention(
        query, key, value, **numbers, keys=8, block_size=16, impl="eager", **options
    )
    assert not taken


def test_all_keys_exact_is_softmax(taken):
    (query, key, value), _ = inputs_of(CALLS[0])
    found = lln.lln_keys_attention(query, key, value, **GIVEN, keys=64, block_size=16, impl="eager")
    expected = reference.softmax_attention(query.double(), key.double(), value.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert taken
