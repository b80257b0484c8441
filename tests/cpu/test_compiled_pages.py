"""A window, sinks and pages by compiled passes, chosen and read, against the float64 reference."""

import pytest
import torch
from tests.cpu.test_compiled_passes import MASKS, sides_of
from tests.pairs import pairs

import lln
from lln.checks.call import Call
from lln.cpu import building, library
from lln.functional import ways
from lln.observers import add_observer, remove_observer
from lln.testing.tolerances import budget, largest_error

FORM = {"window": 6, "sinks": 3, "pages": 3, "page_size": 4}
FORMS = [
    {},
    {"window": 0, "sinks": 0},
    {"pages": 0},
    {"pages": 90},
    {"page_size": 1, "pages": 5},
    {"page_size": 7},
    {"page_size": 16, "pages": 2, "window": 33},
    {"page_size": 400, "pages": 1},
    {"sinks": 1000},
    {"window": 2**40},
]


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def attention(sides, impl="cpu", **options):
    return lln.page_attention(*sides, enable_gqa=True, impl=impl, **(FORM | options))


def choose(query, key, impl="cpu", **options):
    form = FORM | options
    return lln.choose_pages(query, key, form.pop("pages"), enable_gqa=True, impl=impl, **form)


def check(sides, choice=None, **options):
    """Compare with the reference, which reads the same pages."""
    found = attention(sides, choice=choice, **options)
    options["pages"] = choose(*(choice or sides[:2]), **options)
    assert torch.equal(attention(sides, **options), found)
    expected = attention([side.double() for side in sides], "reference", **options)
    plain = attention(sides, "eager", **options)
    assert found.isfinite().all()
    assert found.dtype == sides[0].dtype
    assert largest_error(found, expected) <= budget(found, expected, plain)


def choice_of(sides, rank):
    return [torch.randn(*side.shape[:3], rank, dtype=side.dtype) for side in sides[:2]]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 17, 64, 150, 300])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_and_forms(tokens, form, is_causal, taken):
    sides = sides_of(tokens, heads=6, key_heads=2)
    check(sides, is_causal=is_causal, **form)
    check(sides, choice_of(sides, 5), is_causal=is_causal, **form)
    assert set(taken) == {"forward_pages"}


@pairs(mask=MASKS, form=FORMS, is_causal=[False, True], key_heads=[1, 2, 6], rank=[0, 3, 32])
def test_masks(mask, form, is_causal, key_heads, rank, taken):
    sides = sides_of(150, heads=6, key_heads=key_heads)
    choice = choice_of(sides, rank) if rank else None
    check(sides, choice, is_causal=is_causal, key_mask=MASKS[mask], **form)
    assert taken


@pytest.mark.parametrize(
    ("width", "values"),
    [(16, 16), (64, 16), (80, 80), (128, 128), (1, 1), (20, 36), (256, 256), (24, 40), (64, 208)],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_widths(width, values, transposed, taken):
    check(sides_of(width=width, values=values, transposed=transposed), is_causal=True)
    assert taken


@pytest.mark.parametrize("shared", [1, 2, 3, 4, 5, 7, 12, 64])
@pytest.mark.parametrize("scale", [None, 0.3, -0.2])
def test_grouped_queries_and_scale(shared, scale, taken):
    sides = sides_of(90, heads=shared * 2, key_heads=2)
    check(sides, choice_of(sides, 16), scale=scale, is_causal=True)
    assert taken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [None, "some"])
@pytest.mark.parametrize("choice", [None, torch.float32, "own"])
def test_half_types_are_summed_in_float32(dtype, mask, choice, taken):
    sides = [side.to(dtype) for side in sides_of(150, heads=6, key_heads=2)]
    if choice is not None:
        choice = [side.to(dtype if choice == "own" else choice) for side in choice_of(sides, 8)]
    check(sides, choice, key_mask=MASKS[mask] if mask else None, is_causal=True)
    assert taken


@pytest.mark.parametrize("mask", [None, *MASKS])
@pytest.mark.parametrize("queries", [1, 2, 40])
def test_the_last_tokens_of_a_longer_text(queries, mask, taken):
    """Bit by bit: what a query finds depends on nothing but what it sees."""
    sides = sides_of(150, heads=6, key_heads=2)
    mask = MASKS[mask] if mask else None
    for choice in (None, choice_of(sides, 8)):
        options = {"key_mask": mask, "is_causal": True}
        whole = attention(sides, choice=choice, **options)
        query, key, value = sides
        last = [side[:, :, -queries:] for side in (query, *(choice or [query])[:1])]
        own = None if choice is None else (last[1], choice[1])
        found = attention((last[0], key, value), choice=own, **options)
        assert torch.equal(found, whole[:, :, -queries:])
        check((last[0], key, value), own, **options)
    assert taken


@pairs(
    tokens=[40, 150, 700, 1500],
    pages=[1, 8, 40],
    page_size=[1, 5, 16, 40],
    kind=["normal", "few values", "alike", "one channel", "half"],
    is_causal=[False, True],
    key_heads=[2, 6],
)
def test_the_choice_is_that_of_plain_pytorch(
    tokens, pages, page_size, kind, is_causal, key_heads, taken
):
    """Whole numbers have exact scores; of equal ones the first pages win."""
    query, key, _ = sides_of(tokens, width=16, heads=6, key_heads=key_heads)
    query, key = (query * 4).round() / 4, (key * 4).round() / 4
    if kind == "few values":
        query, key = query.round(), key.round()
    elif kind == "alike":
        key = key[:, :, :1].expand_as(key)
    elif kind == "one channel":
        key = key.round() * (torch.arange(16) == 3)
    elif kind == "half":
        query, key = query.to(torch.bfloat16), key.to(torch.bfloat16)
    options = {"pages": pages, "page_size": page_size, "is_causal": is_causal, "scale": 0.25}
    for mask in (None, torch.rand(2, tokens) < 0.7):
        found = choose(query, key, key_mask=mask, **options)
        assert torch.equal(found, choose(query, key, "eager", key_mask=mask, **options))
    assert taken == ["forward_pages"] * 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_choice_beside_nan_is_that_of_plain_pytorch(bad, place, is_causal, taken):
    """A sink's, a near one's, a far one's or a query's; a score that overflows is no NaN."""
    query, key, _ = (side.round() for side in sides_of(150, width=16, heads=6, key_heads=2))
    (query if place == 3 else key)[1, 1, (1, 148, 50, 100)[place], 3] = bad
    found = choose(query, key, is_causal=is_causal)
    assert torch.equal(found, choose(query, key, "eager", is_causal=is_causal))
    large = query.sign() * 1e20, key.sign() * 1e20
    assert torch.equal(choose(*large, pages=2), choose(*large, "eager", pages=2))
    assert taken


@pytest.mark.parametrize("size", [1e-30, 1e4, 1e15])
def test_scores_of_any_size_are_ranked(size, taken):
    query, key, _ = sides_of(400, heads=6, key_heads=2)
    assert torch.equal(choose(query, size * key), choose(query, key))
    assert taken


def test_pages_of_a_caller_are_taken_in_any_order(taken):
    sides = sides_of(150)
    pages = torch.randint(-2, 60, (2, 3, 150, 9))
    for options in ({}, {"key_mask": MASKS["some"]}, {"is_causal": True}):
        found = attention(sides, pages=pages, **options)
        assert torch.equal(found, attention(sides, pages=pages.flip(-1).int(), **options))
        expected = attention([side.double() for side in sides], "reference", pages=pages, **options)
        assert largest_error(found, expected) <= budget(found, expected)
    assert taken == ["forward_pages"] * 6


def test_one_spike_is_found(taken):
    query, key, value = (side.clone() for side in sides_of(700, width=16))
    key[:, :, 333] = 100 * query[:, :, 650]
    found = attention((query, key, value), is_causal=True, pages=1)
    torch.testing.assert_close(found[:, :, 650], value[:, :, 333])
    check((query, key, value), is_causal=True, pages=1)
    assert taken


def test_a_sample_without_keys_is_zero(taken):
    mask = MASKS["some"].clone()
    mask[1] = False
    query, key, value = sides_of(150)
    found = attention((query, key, value), key_mask=mask)
    assert found[0].all(-1).any()
    assert not found[1].any()
    assert (choose(query, key, key_mask=mask)[1] == -1).all()
    assert taken == ["forward_pages"] * 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_is_masked_is_not_seen(bad, is_causal, taken):
    mask = MASKS["some"]
    clean = sides_of(150)
    sides = [side.clone() for side in clean]
    for side in sides[1:]:
        side[~mask[:, None].expand(side.shape[:3])] = bad
    options = {"key_mask": mask, "is_causal": is_causal}
    assert torch.equal(attention(sides, **options), attention(clean, **options))
    sides[0][~mask[:, None].expand(sides[0].shape[:3])] = bad
    found, expected = attention(sides, **options), attention(clean, **options)
    assert torch.equal(found.mT[..., mask[0]][0], expected.mT[..., mask[0]][0])
    assert taken == ["forward_pages"] * 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_not_a_number_shows_where_it_is_seen_and_nowhere_else(bad, place, taken):
    sides = [side.clone() for side in sides_of(150)]
    sides[place][1, 2, 100, 3] = bad
    pages = choose(*sides_of(150)[:2], is_causal=True)
    found = attention(sides, pages=pages, is_causal=True)
    rows = ~found.isfinite().all(-1)
    at = torch.arange(150)
    sees = (pages[1, 2] == 25).any(-1) & (at >= 100) | (at >= 100) & (at <= 106)
    assert torch.equal(rows[1, 2], at == 100 if place == 0 else sees)
    assert rows[1, 2].sum() == rows.sum()
    assert taken == ["forward_pages"] * 2


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences(is_causal, taken):
    bounds = torch.tensor([0, 0, 65, 66, 66, 150])
    sides = [side[0].transpose(0, 1) for side in sides_of(150)]
    options = FORM | {"is_causal": is_causal, "pages": 30}
    found = lln.page_attention_varlen(*sides, bounds, impl="cpu", **options)
    wide = [side.double() for side in sides]
    expected = lln.page_attention_varlen(*wide, bounds, impl="reference", **options)
    assert largest_error(found, expected) <= budget(found, expected)
    assert taken == ["forward_pages"] * 3


def test_empty_tensors(taken):
    sides = sides_of(16)
    assert attention([side[:0] for side in sides]).shape == (0, 3, 16, 48)
    assert attention([side[:, :, :0] for side in sides]).shape == (2, 3, 0, 48)
    assert choose(*(side[:, :, :0] for side in sides[:2])).shape == (2, 3, 0, 3)
    assert not taken


def test_the_number_of_threads_changes_nothing(taken):
    sides, threads, found = sides_of(500, heads=6, key_heads=2), torch.get_num_threads(), []
    mask = torch.arange(500) < torch.tensor([[0], [300]])
    try:
        for number in (1, 2, 13, 200):
            torch.set_num_threads(number)
            found.append(attention(sides, "auto", is_causal=True))
            found.append(attention(sides, "auto", key_mask=mask))
    finally:
        torch.set_num_threads(threads)
    for place, other in enumerate(found):
        assert torch.equal(found[place % 2], other)
    assert taken == ["forward_pages"] * 8


def test_the_output_lies_in_memory_as_the_query_does(taken):
    for transposed in (False, True):
        sides = sides_of(80, values=32, transposed=transposed)
        assert attention(sides).stride() == sides[0].stride()
    assert taken == ["forward_pages"] * 2


def test_who_listens_hears_what_is_computed(taken):
    sides, heard = sides_of(150), []
    add_observer(heard.append)
    try:
        found = attention(sides, is_causal=True)
    finally:
        remove_observer(heard.append)
    assert set(taken) == {"forward_pages"}
    (said,) = heard
    assert torch.equal(said.keys, choose(*sides[:2], is_causal=True))
    assert torch.equal(found, attention(sides, is_causal=True))


def test_every_instruction_set(path_of_library, functions, monkeypatch):
    """Those that this processor knows; within the same budgets."""
    sets = list(building.instruction_sets())
    found, sides = [], sides_of(150, width=48, values=80, heads=14, key_heads=2)
    for name in sets[: sets.index(functions.instructions) + 1]:
        monkeypatch.setattr(library, "_found", library.open_library(path_of_library, name))
        for own in (sides, [side.to(torch.bfloat16) for side in sides]):
            check(own, is_causal=True)
            check(own, choice_of(own, 8), page_size=7, key_mask=MASKS["some"])
        few = sides_of(90, heads=3, key_heads=3)
        check(few, page_size=5)
        found.append(attention(sides))
    assert sum(map(torch.equal, found[1:], found)) == 0


def test_gradients_are_plain_pytorchs(taken):
    sides = sides_of(40)
    with torch.enable_grad():
        found = attention([side.requires_grad_() for side in sides], "auto")
        torch.autograd.grad(found.sum(), sides)
    assert not taken
    call = Call("pages", *sides, window=3, keys=2, page_size=4)
    assert str(ways.prepare(call, "cpu")) == "Compiled passes compute the call."
