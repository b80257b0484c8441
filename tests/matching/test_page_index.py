"""Projections that pages are chosen by: exact at full rank, the best of their rank below."""

import pytest
import torch

import lln
from lln.errors import InvalidInputError
from lln.testing import make_qkv


def sides(batch=2, heads=4, key_heads=2, tokens=300, width=8, seed=0):
    """Queries and keys whose directions differ in variance, as those of trained models do."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.linspace(0, -4, width).exp()
    query, key = (
        (torch.randn(batch, count, tokens, width, generator=generator) * spread)
        @ torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
        for count in (heads, key_heads)
    )
    return query + 0.5, key + 1.0


def scores(query, key):
    """Centred over the keys: a shift per query changes no choice."""
    found = query.double() @ key.double().repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    return found - found.mean(-1, keepdim=True)


def test_full_rank_gives_the_scores_themselves():
    query, key = sides()
    for index in (lln.PageIndex.of(query, key, 8), lln.PageIndex.of(query, key, 99)):
        assert index.query.shape == index.key.shape == (2, 8, 8)
        assert torch.allclose(scores(*index(query, key)), scores(query, key), atol=1e-4)
    assert lln.PageIndex.of(query, key).key.shape == (2, 8, 4)


def test_no_other_scores_of_its_rank_are_nearer():
    query, key = sides(batch=1, heads=1, key_heads=1)
    exact = scores(query, key)[0, 0]
    values = torch.linalg.svdvals(exact)
    for rank in (1, 3, 5):
        index = lln.PageIndex.of(query, key, rank, sinks=0)
        error = (scores(*index(query, key))[0, 0] - exact).norm()
        assert error == pytest.approx(values[rank:].norm().item(), rel=1e-3)


def test_padding_and_first_tokens_do_not_count():
    query, key = sides(batch=1)
    wanted = lln.PageIndex.of(query, key, 3, sinks=4)
    padded = [torch.cat([torch.full_like(side[:, :, :9], 7.0), side], 2) for side in (query, key)]
    mask = torch.arange(309)[None] >= 9
    odd = key.clone()
    odd[:, :, :4] = 1e3
    padded_index = lln.PageIndex.of(*padded, 3, sinks=4, key_mask=mask)
    for found in (padded_index, lln.PageIndex.of(query, odd, 3, sinks=4)):
        for one, other in zip(found, wanted, strict=True):
            assert torch.allclose(one.abs(), other.abs(), rtol=1e-3, atol=1e-4)


def test_choices_by_half_the_width_agree_with_those_by_all_of_it():
    query, key = sides(tokens=256)
    form = {"window": 4, "sinks": 0, "page_size": 8, "enable_gqa": True, "is_causal": True}
    exact = lln.choose_pages(query, key, 4, **form)[:, :, 128:]
    near = lln.choose_pages(*lln.PageIndex.of(query, key)(query, key), 4, **form, scale=8**-0.5)
    shared = (exact[..., None] == near[:, :, 128:, None, :]).any(-1)
    assert shared.double().mean() > 0.9


def test_it_keeps_the_dtype_and_has_no_gradient():
    query, key, _ = make_qkv(batch=1, heads=2, tokens=40, width=8, requires_grad=True)
    index = lln.PageIndex.of(query, key)
    assert index.query.dtype == torch.float32
    found = index(query.to(torch.bfloat16), key.to(torch.bfloat16))
    assert {side.dtype for side in found} == {torch.bfloat16}
    assert not any(side.requires_grad for side in (*found, *index))


def test_halves_are_projected_in_full_precision_and_rounded_once():
    query, key = sides()
    index = lln.PageIndex.of(query, key, 3)
    half = query.to(torch.bfloat16), key.to(torch.bfloat16)
    exact = [side.to(torch.bfloat16) for side in index(*(side.float() for side in half))]
    assert all(map(torch.equal, index(*half), exact))
    with torch.autocast("cpu", torch.bfloat16):
        found = index(query, key)
    assert all(map(torch.equal, found, index(query, key)))


def test_what_does_not_fit_gets_a_sentence():
    query, key = sides(tokens=20)
    for options, said in (({"rank": 0}, "rank"), ({"sinks": -1}, "sinks")):
        with pytest.raises(InvalidInputError, match=said):
            lln.PageIndex.of(query, key, **options)
    with pytest.raises(InvalidInputError, match="must be finite"):
        lln.PageIndex.of(query, key.masked_fill(key > 1, torch.inf))
    # No variance, and sinks alone, are no reason to fail.
    index = lln.PageIndex.of(torch.zeros_like(query), key[:, :, :1].expand_as(key), sinks=99)
    assert all(side.isfinite().all() for side in index)
