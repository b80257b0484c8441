"""Pages that the kernels choose, against N×N matrices in float64."""

import pytest
import torch
from tests.kernels.common import DEVICE, HALF, ON_GPU, holes
from tests.kernels.pages.page_oracle import best_pages, page_scores

from lln.kernels.launching import sizes
from lln.kernels.pages import launch_page_choice
from lln.kernels.pages.page_ops import fused_page_choice


def inputs_of(batch, heads, key_heads, queries, tokens, width, dtype):
    query = torch.randn(batch, heads, queries, width, device=DEVICE).to(dtype)
    return query, torch.randn(batch, key_heads, tokens, width, device=DEVICE).to(dtype)


def check(query, key, pages, **options):
    found = fused_page_choice(query, key, pages, **options)
    scores = page_scores(query, key, **options)
    expected = best_pages(scores, pages)
    assert found.dtype == torch.int32
    found = found.cpu()
    if query.dtype == torch.float32 and not ON_GPU:
        assert torch.equal(found, expected)
        return
    # Products of short numbers are exact; the order of sums decides between nearly equal pages.
    assert torch.equal(found >= 0, expected >= 0)
    assert (found.diff(dim=-1) > 0)[found[..., 1:] >= 0].all()
    least, got = (
        scores.gather(-1, side.clamp_min(0).long()).masked_fill(side < 0, 0.0)
        for side in (expected, found)
    )
    torch.testing.assert_close(
        got.sort(-1).values, least.sort(-1).values, atol=2e-3 if ON_GPU else 1e-5, rtol=1e-4
    )


CASES = {
    "both sides": {},
    "causal": {"is_causal": True},
    "sinks": {"is_causal": True, "sinks": 11},
    "mask": {"key_mask": holes(2, 150)},
    "causal mask sinks": {"key_mask": holes(2, 150), "is_causal": True, "sinks": 4},
    "groups": {"heads": 4, "is_causal": True, "sinks": 3},
    "three of a group": {"heads": 6, "window": 0, "scale": 0.3},
    "continued": {"heads": 4, "queries": 21, "is_causal": True, "sinks": 5},
    "one query": {"heads": 8, "queries": 1, "is_causal": True},
    "negative scale": {"heads": 4, "scale": -0.5},
    "few pages": {"page_size": 64},
    "small pages": {"page_size": 8, "pages": 7},
    "wide": {"width": 64},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_chosen_pages(case, dtype):
    options = {"window": 6, "sinks": 0, "page_size": 16, "key_mask": None, "is_causal": False}
    options |= {"heads": 2, "queries": 150, "width": 24, "pages": 4, "scale": 1.0} | CASES[case]
    heads, queries, width, pages = (
        options.pop(name) for name in ("heads", "queries", "width", "pages")
    )
    check(*inputs_of(2, heads, 2, queries, 150, width, dtype), pages, **options)


PLAIN = {"window": 4, "sinks": 2, "page_size": 8, "key_mask": None, "is_causal": True, "scale": 1.0}


def test_chunks_of_queries_and_rounds_of_candidates(monkeypatch):
    monkeypatch.setattr(launch_page_choice, "MOST_BYTES", 1)
    monkeypatch.setattr(launch_page_choice, "QUERIES", 48)
    monkeypatch.setattr(launch_page_choice, "SEGMENT", 8)
    monkeypatch.setitem(sizes.overrides, "page_score", sizes.Tile(32, 4, 1, across=16))
    query, key = inputs_of(1, 2, 1, 100, 290, 16, torch.float32)
    check(query, key, 3, **PLAIN)
    check(query, key, 3, **PLAIN | {"key_mask": holes(1, 290)})


def test_equal_scores_choose_the_first_pages(monkeypatch):
    query, key = inputs_of(1, 1, 1, 200, 200, 16, torch.float32)
    check(query, key.zero_(), 3, **PLAIN)
    key[:, :, ::3, 0] = 1.0
    check(query.round(), key, 5, **PLAIN)
    # Sets of columns give the first bound.
    monkeypatch.setattr(launch_page_choice, "GROUPED", 1000)
    query, key = inputs_of(1, 1, 1, 24, 8300, 16, torch.float32)
    check(query, key, 5, **PLAIN)
    check(query.round(), key.round(), 5, **PLAIN)


@pytest.mark.parametrize("is_causal", [False, True])
def test_groups_of_pages_are_chosen_first(monkeypatch, is_causal):
    # Programs of one group: before, at and behind the window, with sinks and with an open end.
    monkeypatch.setattr(launch_page_choice, "STRIP", 16)
    options = PLAIN | {"is_causal": is_causal, "window": 40, "page_size": 4}
    query, key = inputs_of(1, 4, 2, 20, 900, 16, torch.float32)
    check(query, key, 5, **options)
    check(query, key, 5, **options | {"key_mask": holes(1, 900)})
    check(query.round(), key.round(), 3, **options)
    # Programs of several groups, and queries among all keys.
    monkeypatch.setattr(launch_page_choice, "STRIP", 64)
    query, key = inputs_of(1, 1, 1, 560, 560, 16, torch.float32)
    check(query, key, 4, **options)
    check(query.round(), key.round(), 4, **options | {"sinks": 200, "window": 3})


def test_more_pages_than_there_are_and_nothing_to_choose():
    query, key = inputs_of(1, 2, 2, 70, 70, 16, torch.float32)
    check(query, key, 20, **PLAIN)
    check(query, key, 4, **PLAIN | {"window": 70})
    check(
        query, key, 4, **PLAIN | {"key_mask": torch.zeros(1, 70, dtype=torch.bool, device=DEVICE)}
    )
    check(query, key, 4, **PLAIN | {"sinks": 100})


def test_rows_that_are_no_numbers_choose_within_bounds():
    query, key = inputs_of(1, 1, 1, 70, 70, 16, torch.float32)
    query[0, 0, 40:50], key[0, 0, 3] = float("nan"), float("inf")
    found = fused_page_choice(query, key, 4, **PLAIN)
    assert ((found >= -1) & (found < 9)).all()
    assert (found[0, 0, 40:50] == -1).all()
