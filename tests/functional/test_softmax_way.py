"""Softmax itself as a way to compute calls with exact keys that allow it."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from lln.checks.call import Call
from lln.functional import softmax_way
from lln.functional.run import attend
from lln.functional.softmax_way import Softmax, softmax_attention
from lln.functional.ways import choose, prepare
from lln.observers import add_observer, remove_observer
from lln.testing.inputs import make_qkv

OPTIONS = {"block_size": 4, "group_size": 4, "keys": 3, "alpha": 1.0, "beta": 1.0, "offset": 0.0}


@pytest.fixture(autouse=True)
def crossings(monkeypatch):
    table = {"compiled": [[16, 20], [None, 10]], "plain": [[None, 20]]}
    monkeypatch.setattr(softmax_way, "CROSSINGS", {"cpu": table})


def call_of(batch=1, heads=2, tokens=19, **changes):
    sides = make_qkv(batch, heads, tokens, 8, **changes.pop("sides", {}))
    return Call("lln_keys", *sides, **(OPTIONS | {"or_softmax": True} | changes))


def is_softmax(call, impl="auto"):
    return isinstance(choose(call, impl), Softmax)


def test_the_table_decides_by_channels_tokens_and_what_would_run_instead(monkeypatch):
    # Without a compiler plain PyTorch would run.
    for engine, most in (("compiled", (20, 10)), ("plain", (20, 20))):
        reason = None if engine == "compiled" else "has no compiler"
        monkeypatch.setattr(softmax_way._ENGINES["cpu"], "why_not", lambda call, r=reason: r)
        for batch, tokens in zip((1, 2), most, strict=True):
            assert is_softmax(call_of(batch, tokens=tokens))
            assert not is_softmax(call_of(batch, tokens=tokens + 1))


def test_where_keys_hold_every_token_plain_pytorch_has_no_say(monkeypatch):
    monkeypatch.setattr(softmax_way._ENGINES["cpu"], "why_not", lambda call: "has no compiler")
    # Ten blocks of 4: each group chooses the other 36.
    assert is_softmax(call_of(tokens=40, keys=36))
    assert not is_softmax(call_of(tokens=40, keys=35))
    assert not is_softmax(call_of(tokens=41, keys=36 + 3))
    sentence = str(prepare(call_of(tokens=40, keys=36), "auto"))
    assert sentence.endswith(": blocks and exact keys would hold every token.")


def test_it_says_why():
    assert str(prepare(call_of(tokens=9), "auto")) == (
        "Softmax itself computes the call: up to 20 tokens it is sooner for 16 channels on cpu."
    )


def test_nobody_gets_it_who_did_not_ask():
    assert is_softmax(call_of())
    assert not is_softmax(call_of(or_softmax=False))
    for impl in ("eager", "reference"):
        assert not is_softmax(call_of(), impl)
    wider = call_of().replace(value=torch.randn(1, 2, 19, 9))
    assert "all pairs" in Softmax().why_not(wider)
    add_observer(print)
    try:
        assert not is_softmax(call_of())
    finally:
        remove_observer(print)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_it_is_softmax_attention(dtype, key_heads):
    query, key, value = make_qkv(2, 4, 9, 8, dtype=dtype)
    key, value = key[:, :key_heads], value[:, :key_heads]
    own = call_of().replace(query=query, key=key, value=value)
    assert is_softmax(own)
    for scale in (None, 0.2):
        found = attend(own.replace(scale=scale), "auto")
        wide = [side.double().repeat_interleave(4 // side.shape[1], 1) for side in own.qkv]
        expected = F.scaled_dot_product_attention(*wide, scale=scale)
        assert found.dtype == dtype
        assert torch.allclose(found.double(), expected, atol=3e-2 if dtype.itemsize == 2 else 1e-6)


def test_masked_keys_have_no_effect_and_without_keys_the_output_is_zero():
    query, key, value = make_qkv(3, 2, 9, 8, requires_grad=True)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[0, 6:] = mask[2] = False
    bad = torch.where(mask[:, None, :, None], 0.0, torch.nan)
    own = call_of().replace(query=query, key=key + bad, value=value + bad, key_mask=mask)
    assert is_softmax(own)
    found = attend(own, "auto")
    assert torch.allclose(found[0], softmax_attention(query, key[:, :, :6], value[:, :, :6])[0])
    assert torch.allclose(found[1], softmax_attention(query, key, value)[1])
    assert (found[2] == 0).all()
    found.sum().backward()
    assert all(side.grad.isfinite().all() for side in (query, key, value))
    assert not key.grad[2].any()
    assert not value.grad[0, :, 6:].any()


def test_more_tokens_than_the_table_has_run_what_they_would():
    for tokens in (21, 30):
        allowed, not_allowed = (call_of(tokens=tokens, or_softmax=one) for one in (True, False))
        assert torch.equal(attend(allowed, "auto"), attend(not_allowed, "auto"))


FORM = {"window": 3, "sinks": 1, "page_size": 2, "keys": 2, "or_softmax": True}


def pages_of(tokens=12, **changes):
    sides = make_qkv(1, 2, tokens, 8, **changes.pop("sides", {}))
    return Call("pages", *sides, **(FORM | {"is_causal": True} | changes))


def test_pages_that_hold_every_token_are_softmax():
    # Looking both ways, only the chosen pages: a window is cut at the ends.
    for is_causal, most in ((True, 3 + 1 + 2 * 2), (False, 2 * 2)):
        assert is_softmax(pages_of(most, is_causal=is_causal))
        assert not is_softmax(pages_of(most + 1, is_causal=is_causal))
        assert not is_softmax(pages_of(most, is_causal=is_causal, or_softmax=False))
    sentence = str(prepare(pages_of(8), "auto"))
    assert sentence.endswith(": the window and pages would hold every token.")


def test_the_table_decides_for_pages_of_texts_without_padding_read_at_once(monkeypatch):
    monkeypatch.setattr(softmax_way, "CROSSINGS", {"cpu": {"pages": [[None, 12]]}})
    for is_causal in (True, False):
        half = {"is_causal": is_causal, "sides": {"dtype": torch.bfloat16}}
        call = pages_of(**half)
        assert is_softmax(call)
        assert not is_softmax(pages_of(13, **half))
        # Measured in half types.
        assert not is_softmax(pages_of(is_causal=is_causal))
        assert not is_softmax(call.replace(key_mask=torch.ones(1, 12, dtype=torch.bool)))
        expected = F.scaled_dot_product_attention(*call.qkv, is_causal=is_causal)
        assert torch.allclose(attend(call, "auto"), expected, atol=1e-2)
    call = pages_of()
    for keys in (2, 12):
        assert not is_softmax(call.replace(query=call.query[:, :, -1:], keys=keys))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_padding_of_texts_whose_rows_see_no_later_tokens(dtype, key_heads):
    query, key, value = make_qkv(4, 4, 12, 8, dtype=dtype)
    key, value = key[:, :key_heads], value[:, :key_heads]
    mask = torch.ones(4, 12, dtype=torch.bool)
    mask[0, :5] = mask[1, 9:] = mask[2] = mask[3, 4:7] = False
    bad = torch.where(mask[:, None, :, None], 0.0, torch.nan).to(dtype)
    call = Call("pages", query, key + bad, value + bad, **(FORM | {"is_causal": True, "keys": 6}))
    call = call.replace(key_mask=mask, or_softmax=True)
    assert is_softmax(call)
    found, expected = attend(call, "auto"), attend(call, "reference")
    assert torch.allclose(found, expected, atol=3e-2 if dtype.itemsize == 2 else 1e-6)
    assert not found[0, :, :5].any()
    assert not found[2].any()
    longer = pages_of(softmax_way._MOST_PADDED + 1, keys=2000)
    assert is_softmax(longer)
    padded = torch.ones(1, softmax_way._MOST_PADDED + 1, dtype=torch.bool)
    assert "all pairs" in Softmax().why_not(longer.replace(key_mask=padded))


def test_every_table_that_ships_ends_with_any_number_of_channels():
    shipped = json.loads(Path(softmax_way.__file__).with_name("crossings.json").read_text("utf-8"))
    shipped = shipped["crossings"]
    assert {"cpu", "cuda"} <= set(shipped)
    for tables in shipped.values():
        assert {"compiled", "plain"} <= set(tables) <= {"compiled", "plain", "pages"}
        for rows in tables.values():
            channels = [most for most, _ in rows]
            assert channels[-1] is None
            assert channels[:-1] == sorted(set(channels[:-1]))
            assert all(isinstance(tokens, int) and tokens >= 0 for _, tokens in rows)
