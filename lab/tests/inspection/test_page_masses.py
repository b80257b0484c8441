"""page_masses: what window, sinks and pages hold of softmax's mass."""

from importlib import import_module

import pytest
import torch
from tests.instruments.test_public import check_arguments_are_documented
from tests.memory import peak_bytes

import lln
from lln.errors import InvalidInputError
from lln.integrations.settings import CAUSAL_PAGES, OTHER_PAGES
from lln.testing import make_qkv
from lln_lab.inspection.page_masses import page_masses, page_numbers

FORM = {"window": 5, "sinks": 3, "page_size": 4}
causal_or_not = pytest.mark.parametrize("is_causal", [False, True], ids=["both sides", "causal"])


def dense_masses(query, key, pages, keep, is_causal, scale, window, sinks, page_size):
    """Mean masses of one sample, N × N: on window, sinks and pages, ``[H, 3]``."""
    heads, tokens, width = query.shape
    shared = heads // key.shape[0]
    scale = width**-0.5 if scale is None else scale
    place, first = torch.arange(tokens), int(keep.int().argmax())
    seen = keep & (place[:, None] >= place) if is_causal else keep.expand(tokens, tokens)
    near = seen & ((place[:, None] - place).abs() <= window)
    first_ones = seen & (place >= first) & (place < first + sinks) & ~near
    far = seen & ~near & ~first_ones
    a = scale * query @ key.repeat_interleave(shared, 0).mT
    p = a.masked_fill(~seen, -torch.inf).softmax(-1)
    level = a.masked_fill(~(near | first_ones), -torch.inf).amax(-1, keepdim=True)
    stands_out = (a - level).masked_fill(~far, -torch.inf).unflatten(0, (-1, shared)).amax(1)
    masses = torch.zeros(heads, 3, dtype=torch.float64)
    rows = keep.nonzero().flatten().tolist()
    for head in range(heads):
        for row in rows:
            best = {}
            for column in far[row].nonzero().flatten().tolist():
                page = (column - first) // page_size
                score = stands_out[head // shared, row, column].item()
                best[page] = max(best.get(page, score), score)
            chosen = sorted(best, key=best.get)[-pages:] if pages else []
            on_page = torch.isin((place - first) // page_size, torch.tensor(chosen)) & far[row]
            for part, side in enumerate((near[row], first_ones[row], on_page)):
                masses[head, part] += p[head, row, side].sum() / len(rows)
    return masses


@causal_or_not
@pytest.mark.parametrize("scale", [None, -0.7])
def test_masses_equal_dense(is_causal, scale):
    query, key, _ = make_qkv(3, 4, 50, 8, key_heads=2, dtype=torch.float64, scale=1.5)
    keep = torch.ones(3, 50, dtype=torch.bool)
    keep[1, :13] = False
    keep[2] = torch.arange(50) % 3 != 1
    seen = {"is_causal": is_causal, "scale": scale}
    found = page_masses(query, key, pages=(0, 2, 50), key_mask=keep, **seen, **FORM)
    assert found.pages.tolist() == [0, 2, 50]
    for sample in range(3):
        for place, number in enumerate((0, 2, 50)):
            sides = query[sample], key[sample], number, keep[sample]
            expected = dense_masses(*sides, is_causal, scale, **FORM)
            own = torch.stack([found.window, found.sinks, found.chosen[..., place]], -1)
            torch.testing.assert_close(own[sample], expected, rtol=0, atol=1e-12)
    total = (found.window + found.sinks).unsqueeze(-1) + found.chosen + found.rest
    torch.testing.assert_close(total, torch.ones_like(total))
    assert found.chosen[..., 0].eq(0).all()
    assert found.rest[..., -1].abs().max() < 1e-12
    # Neither of the parts is empty, or their borders would not have been looked at.
    assert min(found.sinks.min(), found.chosen[..., 1].min(), found.rest[..., 1].min()) > 0.01


@causal_or_not
def test_the_rest_is_what_the_attention_leaves_out(is_causal):
    """The pairs that `page_attention` does not see hold the rest of softmax's weights."""
    query, key, _ = make_qkv(2, 4, 60, 8, key_heads=2, scale=1.5, dtype=torch.float64)
    options = {"is_causal": is_causal}
    (rest,) = page_masses(query, key, pages=3, **FORM, **options).rest.unbind(-1)
    chosen = lln.choose_pages(query, key, 3, enable_gqa=True, **FORM, **options)
    pairs = lln.reference.page_pairs(chosen.repeat_interleave(2, 1), 60, **FORM, **options)
    whole = torch.ones(60, 60, dtype=torch.bool)
    whole = whole.tril() if is_causal else whole
    p = lln.reference.softmax_matrix(query, key.repeat_interleave(2, 1), keep=whole)
    torch.testing.assert_close(rest, (p * ~pairs).sum(-1).mean(-1))


def test_a_token_in_two_parts_counts_once():
    """Even attention: shares are numbers of tokens."""
    query = torch.zeros(1, 1, 16, 4)
    form = {"window": 3, "sinks": 8, "page_size": 4, "pages": 16}
    found = page_masses(query, query, **form)
    near = sum(min(row + 3, 15) - max(row - 3, 0) + 1 for row in range(16)) / 256
    first = sum(max(min(8, row - 3), 0) + max(8 - (row + 4), 0) for row in range(16)) / 256
    assert found.window.item() == pytest.approx(near)
    assert found.sinks.item() == pytest.approx(first)
    assert found.chosen.item() == pytest.approx(1 - near - first)
    found = page_masses(query, query, **form | {"sinks": 16})
    assert found.sinks.item() == pytest.approx(1 - near)
    assert found.chosen.item() == 0


@causal_or_not
def test_sizes_left_out_are_those_of_a_conversion(is_causal):
    query, key, _ = make_qkv(1, 2, 700, 8, scale=1.5)
    usual = dict(CAUSAL_PAGES if is_causal else OTHER_PAGES)
    found = page_masses(query, key, is_causal=is_causal)
    assert found.pages.tolist() == [8, 16, 32, 64, 128]
    alone = page_masses(query, key, is_causal=is_causal, **usual)
    assert torch.equal(found.window, alone.window)
    assert torch.equal(found.sinks, alone.sinks)
    assert torch.equal(found.chosen[..., 2], alone.chosen[..., 0])
    for name, size in usual.items():
        changed = page_masses(query, key, is_causal=is_causal, **usual | {name: size + 1})
        assert not torch.equal(changed.rest, alone.rest)


def test_numbers_of_pages_to_compare():
    assert page_numbers(32) == (8, 16, 32, 64, 128)
    assert page_numbers(3) == (1, 3, 6, 12)
    assert page_numbers(1) == (1, 2, 4)


def test_tiles_and_drawn_rows(monkeypatch):
    query, key, _ = make_qkv(2, 2, 300, 8, scale=1.5)
    whole = page_masses(query, key, pages=(2, 6), **FORM, most_rows=None)
    drawn = page_masses(query, key, pages=(2, 6), **FORM, most_rows=150)
    for own, other in zip(drawn[:4], whole[:4], strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0.05)
        assert not torch.equal(own, other)
    assert torch.equal(page_masses(query, key, pages=(2, 6), **FORM, most_rows=150)[2], drawn[2])
    # The function hides the module of its name.
    monkeypatch.setattr(import_module("lln_lab.inspection.page_masses"), "TILE", 1000)
    tiled = page_masses(query, key, pages=(2, 6), **FORM, most_rows=None)
    torch.testing.assert_close(tiled.chosen, whole.chosen)


def test_samples_without_a_token_and_sick_heads_are_nan_and_touch_no_other():
    query, key, _ = make_qkv(3, 2, 40, 8)
    keep = torch.ones(3, 40, dtype=torch.bool)
    keep[0] = False
    whole = page_masses(query, key, pages=4, **FORM, key_mask=keep)
    query[2, 0, 5, 2] = torch.nan
    found = page_masses(query, key, pages=4, **FORM, key_mask=keep)
    sick = torch.tensor([[True, True], [False, False], [True, False]])
    assert torch.equal(found.window.isnan(), sick)
    assert torch.equal(found.rest[..., 0].isnan(), sick)
    torch.testing.assert_close(found.chosen[~sick], whole.chosen[~sick])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"pages": ()}, "pages must hold at least one"),
        ({"pages": "many"}, "pages must be a number of pages or several"),
        ({"pages": (4, -1)}, "pages must be"),
        ({"page_size": 0}, "page_size must be"),
        ({"window": -1}, "window must be"),
        ({"sinks": 1.5}, "sinks must be"),
        ({"most_rows": 0}, "most_rows must be"),
        ({"key": torch.zeros(1, 2, 9, 8)}, "same positions"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(options, sentence):
    query, key, _ = make_qkv(1, 2, 20, 8)
    with pytest.raises(InvalidInputError, match=sentence):
        page_masses(query, **({"key": key} | options))


def test_masses_of_pages_take_less_than_the_matrix(monkeypatch):
    """One N×N matrix in float64 is 128 MiB; the choice itself takes as much as it is let."""
    monkeypatch.setattr("lln.eager.page_choice._MOST_SCORES", 1 << 20)
    page_masses(*torch.randn(2, 1, 1, 300, 64))
    query, key = torch.randn(2, 1, 1, 4096, 64)
    assert peak_bytes(lambda: page_masses(query, key)) < 100 << 20


def test_arguments_are_documented():
    check_arguments_are_documented(page_masses)
