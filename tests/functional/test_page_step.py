"""The last token over the keys of a cache: the same as the last row of everything."""

import pytest
import torch

import lln
from lln.testing import make_qkv

FORM = {"window": 6, "sinks": 3, "pages": 3, "page_size": 4, "is_causal": True}


def last(query, key, value, choice=None, **options):
    """The last row by itself, and as part of the whole.

    In float64 both choose the same, and of compiled passes each row rounds by itself.
    """
    both = (query[:, :, -1:], query)
    found = []
    for side in both:
        own = None if choice is None else (choice[0][:, :, -side.shape[2] :], choice[1])
        found.append(lln.page_attention(side, key, value, choice=own, enable_gqa=True, **options))
    return found[0], found[1][:, :, -1:]


@pytest.mark.parametrize("impl", ["auto", "eager", "cpu"])
@pytest.mark.parametrize("masked", [None, "left", "scattered", "all"])
@pytest.mark.parametrize(
    "form",
    [{}, {"sinks": 0}, {"window": 0}, {"pages": 0}, {"pages": 99}, {"sinks": 99}, {"window": 99}],
    ids=str,
)
@pytest.mark.parametrize("tokens", [2, 12, 61])
def test_a_step_is_the_last_row(tokens, form, masked, impl):
    dtype = torch.float32 if impl == "cpu" else torch.float64
    sides = make_qkv(batch=2, heads=4, key_heads=2, tokens=tokens, width=8, dtype=dtype)
    mask = torch.ones(2, tokens, dtype=torch.bool)
    if masked == "scattered":
        mask[1, 1::3] = False
    elif masked is not None:
        mask[1, : tokens - 1 if masked == "left" else tokens] = False
    mask = None if masked is None else mask
    choice = lln.PageIndex.of(*sides[:2], 3)(*sides[:2])
    for own in (None, choice):
        found, wanted = last(*sides, own, key_mask=mask, impl=impl, **(FORM | form))
        assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-9)
        assert impl != "cpu" or torch.equal(found, wanted)


# Where keys and values of a cache may lie: with room behind them, and as parts of other tensors.
PLACES = {
    "room": lambda side: torch.cat([side, side], 2)[:, :, :40],
    "other samples between": lambda side: side.repeat_interleave(2, 0)[::2],
    "one sample for all": lambda side: side[:1].expand_as(side),
    "other heads between": lambda side: side.repeat_interleave(2, 1)[:, ::2],
    "token by token": lambda side: side.transpose(1, 2).contiguous().transpose(1, 2),
    "one channel apart": lambda side: side.mT.contiguous().mT,
}


@pytest.mark.parametrize("place", PLACES)
def test_keys_and_values_may_lie_anywhere(place):
    query, *sides = make_qkv(batch=3, heads=4, key_heads=2, tokens=40, width=8, dtype=torch.float64)
    placed = [PLACES[place](side) for side in sides]
    found, wanted = last(query, *placed, **FORM)
    compact, _ = last(query, *(side.contiguous() for side in placed), **FORM)
    assert torch.equal(found, compact)
    assert torch.allclose(found, wanted)


def test_half_precision_and_gradients():
    sides = [side.requires_grad_() for side in make_qkv(heads=2, tokens=40, dtype=torch.float64)]
    found, wanted = last(*sides, **FORM)
    for one, other in zip(
        *(torch.autograd.grad(out.square().sum(), sides) for out in (found, wanted)), strict=True
    ):
        assert torch.allclose(one, other)
    half = [side.detach().to(torch.bfloat16) for side in sides]
    found, wanted = last(*half, **FORM)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found, wanted, atol=2e-2)


@pytest.mark.parametrize("impl", ["eager", "cpu"])
def test_nothing_unseen_shows_and_infinity_does(impl):
    query, key, value = make_qkv(heads=1, tokens=60)
    form = FORM | {"sinks": 0, "pages": 1, "impl": impl}
    step = {"query": query[:, :, -1:], "key": key, "value": value}
    pages = lln.choose_pages(step["query"], key, 1, **{k: form[k] for k in form if k != "pages"})
    chosen = int(pages[0, 0, 0, 0])
    unseen = 4 * (chosen + 1 if chosen == 0 else 0)
    spoilt = value.clone()
    spoilt[:, :, unseen] = torch.nan
    found = lln.page_attention(step["query"], key, spoilt, **form)
    assert torch.equal(found, lln.page_attention(**step, **form))
    # One of the two makes a score of -inf, which would silently be a weight of zero.
    for infinity in (-torch.inf, torch.inf):
        infinite = key.clone()
        infinite[:, :, 58, 0] = infinity
        assert lln.page_attention(step["query"], infinite, value, **form).isnan().all()
