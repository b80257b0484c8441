"""Attention to window, sinks and chosen pages by its kernels, against N×N matrices in float64."""

import pytest
import torch
from tests.kernels.common import DEVICE, DTYPES, ON_GPU, holes
from tests.kernels.pages.page_oracle import attend_pages

from lln.kernels.launching import sizes
from lln.kernels.pages import launch_pages
from lln.kernels.pages.page_ops import fused_pages
from lln.testing import assert_close, make_qkv, poison_empty

PLAIN = {"window": 5, "sinks": 0, "page_size": 16, "key_mask": None, "is_causal": False}


def pages_for(batch, key_heads, queries, tokens, pages, page_size, is_causal, seed=0):
    """Some pages per query, ascending, some rows with fewer; causal ones not behind the query."""
    generator = torch.Generator().manual_seed(seed)
    count = -(-tokens // page_size)
    scores = torch.rand(batch, key_heads, queries, count, generator=generator)
    if is_causal:
        place = torch.arange(queries)[:, None] + tokens - queries
        scores = scores.masked_fill(torch.arange(count)[None] * page_size > place, -1.0)
    best = scores.topk(min(pages, count), -1)
    index = best.indices.masked_fill(best.values < 0.1, count).sort(-1).values
    index = index.masked_fill(index == count, -1)
    return torch.nn.functional.pad(index, (0, pages - index.shape[-1]), value=-1).int().to(DEVICE)


def run(inputs, indices, options, attend):
    out = attend(*inputs, indices, **options)
    generator = torch.Generator().manual_seed(7)
    up = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device, out.dtype)
    return out, torch.autograd.grad(out, inputs, up)


def compare(dtype=torch.float32, queries=None, pages=3, **options):
    shape = {"batch": 2, "heads": 2, "tokens": 100, "width": 16, "key_heads": None}
    shape |= {"value_width": None, "layout": "contiguous"}
    shape |= {name: options.pop(name) for name in list(options) if name in shape}
    options = PLAIN | options
    inputs = make_qkv(**shape, dtype=dtype, device=DEVICE)
    if queries is not None:
        inputs = [inputs[0][:, :, -queries:], *inputs[1:]]
    inputs = [side.detach().requires_grad_() for side in inputs]
    batch, key_heads, tokens, _ = inputs[1].shape
    rows = inputs[0].shape[2]
    where = (batch, key_heads, rows, tokens, pages, options["page_size"], options["is_causal"])
    indices = pages_for(*where)
    found, found_grads = run(inputs, indices, options, fused_pages)
    wide, plain = (
        [side.detach().to(kind).requires_grad_() for side in inputs]
        for kind in (torch.float64, dtype)
    )
    expected, expected_grads = run(wide, indices, options, attend_pages)
    eager, eager_grads = run(plain, indices, options, attend_pages)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert_close(found, expected, eager, what="output")
    size = max(gradient.abs().max().item() for gradient in expected_grads)
    for name, got, want, simple in zip(
        ("query", "key", "value"), found_grads, expected_grads, eager_grads, strict=True
    ):
        what = f"gradient of {name}"
        assert_close(got, want, simple, backward=True, magnitude=size, what=what)


CASES = {
    "both sides": {},
    "causal": {"is_causal": True},
    "sinks": {"is_causal": True, "sinks": 11},
    "sinks of three pages": {"sinks": 20, "page_size": 8},
    "mask": {"key_mask": holes(2, 100)},
    "causal mask sinks": {"key_mask": holes(2, 100), "is_causal": True, "sinks": 4},
    "groups": {"heads": 4, "key_heads": 2, "batch": 1, "is_causal": True, "sinks": 3},
    "three of a group": {"heads": 3, "key_heads": 1, "batch": 1, "window": 0, "scale": 0.3},
    "continued": {"queries": 21, "heads": 4, "key_heads": 2, "is_causal": True, "sinks": 5},
    "continued early": {"queries": 96, "is_causal": True, "key_mask": holes(2, 100)},
    "one query": {"queries": 1, "heads": 4, "key_heads": 2, "is_causal": True, "sinks": 5},
    "few queries": {"queries": 9, "heads": 3, "key_heads": 1, "is_causal": True, "page_size": 8},
    "few masked": {"queries": 3, "is_causal": True, "key_mask": holes(2, 100), "sinks": 20},
    "few without pages": {"queries": 2, "is_causal": True, "pages": 0, "window": 0},
    "other values": {"width": 24, "value_width": 40},
    "small pages": {"page_size": 8, "pages": 7},
    "large pages": {"page_size": 64, "pages": 1},
    "more pages than there are": {"page_size": 32, "pages": 9},
    "no pages": {"pages": 0, "sinks": 3},
    "neither": {"pages": 0},
    "window over all": {"window": 100},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cases(case, dtype):
    compare(dtype, **CASES[case])


@pytest.mark.parametrize("layout", ["transposed", "strided"] if ON_GPU else ["transposed"])
def test_layouts(layout):
    compare(layout=layout)


def test_parts_and_segments(monkeypatch):
    monkeypatch.setattr(launch_pages, "QUERIES", 32)
    monkeypatch.setattr(launch_pages, "MOST_BYTES", 1)
    monkeypatch.setattr(launch_pages, "MOST_BITS", 1)
    monkeypatch.setattr(launch_pages, "SEGMENT", 5)
    monkeypatch.setitem(sizes.overrides, "page_read", sizes.Tile(16, 4, 1))
    monkeypatch.setitem(sizes.overrides, "page_grad", sizes.Tile(16, 4, 1))
    compare(sinks=9)
    compare(heads=3, key_heads=1, is_causal=True, key_mask=holes(2, 100))


def test_rows_that_see_nothing_give_zeros():
    mask = torch.ones(2, 100, dtype=torch.bool, device=DEVICE)
    mask[0, 10:50] = False
    mask[1] = False
    compare(key_mask=mask, sinks=2)
    compare(key_mask=mask, is_causal=True)


def test_what_is_masked_has_no_effect_whatever_it_holds():
    mask = holes(2, 100)
    inputs = make_qkv(2, 2, 100, 16, device=DEVICE)
    indices = pages_for(2, 2, 100, 100, 3, 16, False)
    hidden = ~mask[:, None, :, None]
    options = PLAIN | {"key_mask": mask, "sinks": 3}
    clean = fused_pages(*inputs, indices, **options)
    spoilt = [side.masked_fill(hidden, float("nan")).requires_grad_() for side in inputs]
    out = fused_pages(*spoilt, indices, **options)
    kept = mask[:, None, :, None].expand_as(out)
    torch.testing.assert_close(out[kept], clean[kept])
    grads = torch.autograd.grad(torch.where(kept, out, 0.0).sum(), spoilt)
    assert all(gradient.isfinite().all() for gradient in grads)


def test_nothing_is_read_before_it_is_written_and_results_repeat():
    inputs = make_qkv(1, 2, 100, 16, device=DEVICE, requires_grad=True)
    indices, options = pages_for(1, 2, 100, 100, 3, 16, True), PLAIN | {"is_causal": True}
    expected, expected_grads = run(inputs, indices, options, fused_pages)
    with poison_empty():
        found, grads = run(inputs, indices, options, fused_pages)
    assert torch.equal(found, expected)
    for one, other in zip(grads, expected_grads, strict=True):
        assert torch.equal(one, other)


def test_empty_calls():
    for shape in ((0, 2, 40, 16), (2, 2, 0, 16)):
        inputs = [torch.zeros(shape, device=DEVICE, requires_grad=True) for _ in range(3)]
        indices = torch.zeros(*shape[:3], 2, dtype=torch.int32, device=DEVICE)
        out, grads = run(inputs, indices, PLAIN, fused_pages)
        assert out.shape == shape
        assert all(gradient.shape == shape for gradient in grads)
