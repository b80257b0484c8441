"""Keys into a summary and queries that read it, by kernels of their own."""

import pytest
import torch
from tests.kernels.common import DEVICE, DTYPES, HALF, holes

from lln.eager.summary import read_heads, summarise_heads
from lln.kernels.summaries.summary_ops import fused_read, fused_summary

# Of the largest number of a result.
BUDGETS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def inputs_of(dtype, *, heads=2, key_heads=2, queries=70, keys=90, width=16, value_width=16):
    """Rounded to the dtype and in float64: both sides compute from the same numbers."""
    generator = torch.Generator().manual_seed(1)
    sides = {
        "query": torch.randn(2, heads, queries, width, generator=generator),
        "key": torch.randn(2, key_heads, keys, width, generator=generator),
        "value": torch.randn(2, key_heads, keys, value_width, generator=generator),
        "upstream": torch.randn(2, heads, queries, value_width, generator=generator),
    }
    return {name: side.to(DEVICE, dtype) for name, side in sides.items()}


def in_halves(sides, alpha, beta, mask=None, value_width=64):
    """Two parts of the keys summarised apart, merged and read."""
    key, value, summaries = sides["key"], sides["value"], []
    for part in (slice(None, 40), slice(40, None)):
        own = None if mask is None else mask[:, part]
        summaries.append(fused_summary(key[:, :, part], value[:, :, part], beta, own, value_width))
    log_mass, centroid = (torch.stack(side) for side in zip(*summaries, strict=True))
    merged = (log_mass.softmax(0).unsqueeze(-1) * centroid).sum(0)
    return fused_read(sides["query"], alpha, log_mass.logsumexp(0), merged, None, value_width)


def whole(sides, alpha, beta, mask=None):
    log_mass, centroid = summarise_heads(sides["key"], sides["value"], beta, mask)
    return read_heads(sides["query"], alpha, log_mass, centroid)


def with_gradients(attend, sides, alpha, beta, dtype, **options):
    leaves = {name: side.to(dtype).requires_grad_() for name, side in sides.items()}
    learned = [side.to(dtype).requires_grad_() for side in (alpha, beta)]
    out = attend(leaves, *learned, **options)
    inputs = [leaves["query"], leaves["key"], leaves["value"], *learned]
    grads = torch.autograd.grad((out * leaves["upstream"].detach()).sum(), inputs)
    names = ("query", "key", "value", "alpha", "beta")
    return {"out": out.detach(), **dict(zip(names, grads, strict=True))}


def check(dtype, *, beta_heads=None, mask=None, slice_width=64, **sizes):
    sides = inputs_of(dtype, **sizes)
    heads = sides["query"].shape[1]
    alpha = torch.linspace(0.8, 1.6, heads, device=DEVICE).view(1, heads, 1, 1)
    beta = torch.linspace(0.9, 1.3, beta_heads or heads, device=DEVICE).view(1, -1, 1, 1)
    found = with_gradients(
        lambda *given: in_halves(*given, mask=mask, value_width=slice_width),
        sides, alpha, beta, dtype,
    )  # fmt: skip
    exact = [side.to(dtype).double() for side in (alpha, beta)]
    expected = with_gradients(lambda *given: whole(*given, mask=mask), sides, *exact, torch.float64)
    for name, right in expected.items():
        error = (found[name].double() - right).abs().max() / right.abs().max()
        assert error <= BUDGETS[dtype], f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_the_keys_give_the_attention_of_all(dtype):
    check(dtype)


@pytest.mark.parametrize("beta_heads", [1, 2, 4])
def test_grouped_queries(beta_heads):
    check(torch.float32, heads=4, key_heads=2, beta_heads=beta_heads)


def test_masked_keys_and_a_part_without_any():
    mask = holes(2, 90)
    mask[1, :40] = False
    check(torch.float32, mask=mask)


@pytest.mark.parametrize(("width", "value_width"), [(12, 40), (72, 16)])
def test_odd_widths(width, value_width):
    check(HALF[0], width=width, value_width=value_width)


def test_wide_values_in_slices():
    check(HALF[0], value_width=40, slice_width=32)


def test_even_tiles():
    check(HALF[0], queries=128, keys=40 + 128, width=16)


def test_masked_queries_have_no_effect():
    sides = inputs_of(torch.float32)
    summary = fused_summary(sides["key"], sides["value"], 1.0, None, 64)
    mask = holes(2, 70)
    bad = torch.where(mask[:, None, :, None], sides["query"], float("nan")).requires_grad_()
    out = fused_read(bad, 1.0, *summary, mask, 64)
    rows = mask[:, None, :].expand(out.shape[:3])
    good = fused_read(sides["query"], 1.0, *summary, None, 64)
    assert torch.equal(out[rows], good[rows])
    (grad,) = torch.autograd.grad(out[rows].sum(), bad)
    assert bool(grad.isfinite().all())


def test_a_compiler_sees_operators_and_gets_the_same():
    sides = inputs_of(torch.float32, queries=20, keys=60)
    temperatures = [torch.full((1, 2, 1, 1), number, device=DEVICE) for number in (1.1, 0.9)]
    compiled = torch.compile(in_halves, fullgraph=True, backend="aot_eager")
    found, plain = (
        with_gradients(attend, sides, *temperatures, torch.float32)
        for attend in (compiled, in_halves)
    )
    for name, side in plain.items():
        torch.testing.assert_close(found[name], side, rtol=1e-5, atol=1e-6)


def test_there_is_no_second_derivative():
    sides = inputs_of(torch.float32, queries=8, keys=50)
    query = sides["query"].requires_grad_()
    out = in_halves(sides, 1.0, 1.0)
    (grad,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()
