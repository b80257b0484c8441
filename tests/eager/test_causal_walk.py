"""Causal LLN attention without gradients: the walk against the reference, and when it gives up."""

import pytest
import torch
from tests.terms import kept_pairs, sizes_of_sums

import lln
from lln.eager import causal, causal_walk, products
from lln.functional import plain_ways, prepared_calls
from lln.testing import assert_close, make_qkv

GIVEN = {"alpha": 1.7, "beta": 1.3, "is_causal": True}


@pytest.fixture
def walks(monkeypatch):
    """What every walk returned."""
    found, walk = [], causal_walk.walk

    def noted(inputs, guard):
        found.append(walk(inputs, guard))
        return found[-1]

    monkeypatch.setattr(causal, "walk", noted)
    return found


def by_scan(monkeypatch, attend):
    with monkeypatch.context() as without:
        without.setattr(plain_ways, "is_untraced_on_cpu", lambda *sides: False)
        prepared_calls.clear()
        found = attend()
    prepared_calls.clear()
    return found


LONG = 64 * 33 + 3
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# One type is enough for every change where a sequence is long.
@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [
        pytest.param(tokens, dtype, marks=[pytest.mark.slow] * night)
        for tokens in (1, 63, 64, 65, 200, LONG)
        for dtype in DTYPES
        for night in [tokens == LONG and dtype != torch.float32]
    ],
)
def test_every_length(dtype, tokens, walks, monkeypatch):
    heads = 1 if tokens > 200 else 3
    inputs = make_qkv(1, heads, tokens, 8, value_width=5, dtype=dtype)

    def attend():
        return lln.lln_attention(*inputs, **GIVEN)

    found = attend()
    assert walks[-1] is not None
    expected = lln.lln_attention(*(side.double() for side in inputs), **GIVEN, impl="reference")
    assert_close(found, expected, by_scan(monkeypatch, attend))


@pytest.mark.parametrize("first", [0, 1, 64, 70, 130])
def test_masks(first, walks):
    """Rows before the first valid key are zero, in whatever chunk it lies."""
    inputs = make_qkv(2, 2, 150, 8)
    mask = torch.rand(2, 150, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[0, :first], mask[1] = False, True
    mask[0, first] = True
    out = lln.lln_attention(*inputs, **GIVEN, key_mask=mask)
    assert walks[-1] is not None
    wide = [side.double() for side in inputs]
    expected = lln.lln_attention(*wide, **GIVEN, key_mask=mask, impl="reference")
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    assert (out[0, :, :first] == 0).all()


def test_everything_masked(walks):
    inputs = make_qkv(1, 2, 100, 8)
    mask = torch.zeros(1, 100, dtype=torch.bool)
    assert (lln.lln_attention(*inputs, **GIVEN, key_mask=mask) == 0).all()
    assert walks[-1] is not None


def test_what_masked_keys_hold_does_not_count():
    query, key, value = make_qkv(1, 2, 100, 8)
    mask = torch.ones(1, 100, dtype=torch.bool)
    mask[:, 10:30] = False
    expected = lln.lln_attention(query, key, value, **GIVEN, key_mask=mask)
    key[:, :, 10:30], value[:, :, 10:30] = torch.inf, torch.nan
    assert torch.equal(lln.lln_attention(query, key, value, **GIVEN, key_mask=mask), expected)


def test_temperatures_per_head_and_shared_keys(walks):
    inputs = make_qkv(2, 4, 130, 8, key_heads=2)
    alpha, beta = 1 + torch.rand(2, 2, 4, 1, 1, generator=torch.Generator().manual_seed(2))
    options = {"alpha": alpha, "beta": beta, "is_causal": True, "enable_gqa": True}
    found = lln.lln_attention(*inputs, **options)
    assert walks[-1] is not None
    wide = [side.double() for side in inputs]
    expected = lln.lln_attention(*wide, **options, impl="reference")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_walk_that_loses_digits_gives_up(walks):
    """A key 300 larger than all before it, at the end of its chunk."""
    query, key, value = make_qkv(1, 1, 128, 8)
    key[:, :, 100] += 300
    found = lln.lln_attention(query, key, value, **GIVEN)
    assert walks == [None]
    wide = [side.double() for side in (query, key, value)]
    expected = lln.lln_attention(*wide, **GIVEN, impl="reference")
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_large_keys_in_other_chunks_are_no_reason(walks):
    query, key, value = make_qkv(1, 1, 192, 8)
    key[:, :, 64:128] += 300
    found = lln.lln_attention(query, key, value, **GIVEN)
    assert walks[-1] is not None
    wide = [side.double() for side in (query, key, value)]
    expected = lln.lln_attention(*wide, **GIVEN, impl="reference")
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_bad_query_shows_in_its_row_alone():
    query, key, value = make_qkv(1, 1, 100, 8)
    expected = lln.lln_attention(query, key, value, **GIVEN)
    query[:, :, 70] = torch.nan
    found = lln.lln_attention(query, key, value, **GIVEN)
    rest = [row for row in range(100) if row != 70]
    assert found[:, :, 70].isnan().all()
    assert torch.equal(found[:, :, rest], expected[:, :, rest])


def sent_to(out):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(out.shape, generator=generator, dtype=torch.float64)


def gradients(inputs, extra, impl, dtype, **options):
    sides = [side.detach().to(dtype).requires_grad_() for side in inputs]
    scales = {name: side.detach().to(dtype).requires_grad_() for name, side in extra.items()}
    out = lln.lln_attention(*sides, **scales, is_causal=True, impl=impl, **options)
    return torch.autograd.grad(out, [*sides, *scales.values()], sent_to(out).to(dtype))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [1, 64, 65, 200, 64 * 33 + 3])
def test_gradients(tokens, masked, walks, monkeypatch):
    inputs = make_qkv(1, 2 if tokens < 300 else 1, tokens, 8, value_width=5)
    mask = None
    if masked:
        mask = torch.rand(1, tokens, generator=torch.Generator().manual_seed(1)) > 0.3
        mask[:, : tokens // 2] = False
    heads = inputs[0].shape[1]
    extra = {name: torch.full((1, heads, 1, 1), 1.5) for name in ("alpha", "beta")}
    call = (inputs, extra)
    expected = gradients(*call, "reference", torch.float64, key_mask=mask)
    found = gradients(*call, "eager", torch.float64, key_mask=mask)
    for side, other in zip(found, expected, strict=True):
        torch.testing.assert_close(side, other, rtol=1e-10, atol=1e-11)
    found = gradients(*call, "eager", torch.float32, key_mask=mask)
    assert all(walked is not None for walked in walks)
    plain = by_scan(monkeypatch, lambda: gradients(*call, "eager", torch.float32, key_mask=mask))
    size = max(side.abs().max().item() for side in expected[:3])
    wide = [side.double() for side in inputs]
    keep = kept_pairs(mask, True, tokens, "cpu")
    sums = sizes_of_sums(wide, sent_to(inputs[2]), **extra, block_size=None, keep=keep)
    names = ("query", "key", "value", "alpha", "beta")
    for name, side, other, scan in zip(names, found, expected, plain, strict=True):
        terms = max(size, sums.get(name, 0.0))
        assert_close(side, other, scan, backward=True, magnitude=terms, what=name)


def test_second_derivatives(walks):
    inputs = make_qkv(1, 1, 70, 4, dtype=torch.float64, requires_grad=True)
    alpha = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)

    def attend(*sides):
        return lln.lln_attention(*sides[:3], alpha=sides[3], beta=1.1, is_causal=True)

    assert torch.autograd.gradgradcheck(attend, (*inputs, alpha), fast_mode=True)
    assert walks


def test_tangents(walks):
    """Forward-mode derivatives have no numbers to walk with."""
    inputs = make_qkv(1, 1, 70, 4, dtype=torch.float64)
    tangent = torch.ones_like(inputs[0])
    with torch.autograd.forward_ad.dual_level():
        query = torch.autograd.forward_ad.make_dual(inputs[0], tangent)
        out = lln.lln_attention(query, *inputs[1:], **GIVEN)
        found = torch.autograd.forward_ad.unpack_dual(out).tangent
    step = 1e-6
    ends = [lln.lln_attention(inputs[0] + s * tangent, *inputs[1:], **GIVEN) for s in (step, -step)]
    torch.testing.assert_close(found, (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-8)


def test_a_graph_does_not_walk(walks):
    inputs = make_qkv(1, 2, 70, 8)
    torch.compile(lambda *sides: lln.lln_attention(*sides, **GIVEN), backend="eager")(*inputs)
    torch.func.vmap(lambda *sides: lln.lln_attention(*sides, **GIVEN))(
        *(side[None] for side in inputs)
    )
    assert not walks


def test_the_same_bits_with_and_without_gradients():
    inputs = make_qkv(1, 2, 150, 8, requires_grad=True)
    with torch.no_grad():
        expected = lln.lln_attention(*inputs, **GIVEN)
    assert torch.equal(lln.lln_attention(*inputs, **GIVEN), expected)


def test_the_same_with_products_that_do_not_add(monkeypatch):
    inputs = [side.requires_grad_() for side in make_qkv(2, 3, 150, 8, dtype=torch.float64)]
    found = []
    for takes_transposed in (False, True):
        monkeypatch.setattr(products, "_TAKES_TRANSPOSED", takes_transposed)
        out = lln.lln_attention(*inputs, **GIVEN)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
