"""Sliding windows by their kernels, against the float64 reference."""

from functools import partial

import pytest
import torch
from tests.functional.test_reference_agreement import term_sizes
from tests.kernels.common import (
    DEVICE,
    DTYPES,
    HALF,
    ON_GPU,
    SHAPE,
    check_compiled,
    holes,
    room_of,
)

import lln
from lln.kernels.launching import sizes
from lln.testing import LAYOUTS, assert_close, make_qkv, poison_empty

BOUNDS = torch.tensor([0, 0, 5, 40, 40, 41, 70])
causal_or_not = pytest.mark.parametrize("is_causal", [False, True], ids=["both sides", "causal"])


def upstream_of(out):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device)


def gradients(out, inputs):
    return torch.autograd.grad(out, inputs, upstream_of(out).to(out.dtype))


def run_dense(inputs, options, impl):
    out = lln.window_attention(*inputs, **options, enable_gqa=True, impl=impl)
    return out, gradients(out, inputs)


def run_packed(inputs, options, impl):
    bounds = BOUNDS.to(DEVICE)
    out = lln.window_attention_varlen(*inputs, bounds, **options, enable_gqa=True, impl=impl)
    return out, gradients(out, inputs)


def compare_inputs(inputs, options, run=run_dense):
    found, found_grads = run(inputs, options, "triton")
    wide, plain = (
        [side.detach().to(kind).requires_grad_() for side in inputs]
        for kind in (torch.float64, inputs[0].dtype)
    )
    expected, expected_grads = run(wide, options, "reference")
    eager, eager_grads = run(plain, options, "eager")
    assert found.dtype == inputs[0].dtype
    assert_close(found, expected, eager, what="output")
    # Where a row's weight is one key's, gradients vanish: differences of terms that are equal.
    token_axis = 2 if run is run_dense else 0
    terms = term_sizes(wide, expected_grads, upstream_of(expected), token_axis, {})
    size = max(gradient.abs().max().item() for gradient in expected_grads)
    for name, got, want, simple in zip(
        ("query", "key", "value"), found_grads, expected_grads, eager_grads, strict=True
    ):
        what = f"gradient of {name}"
        assert_close(got, want, simple, backward=True, magnitude=terms.get(name, size), what=what)


def compare(dtype=torch.float32, layout="contiguous", **options):
    shape = {name: options.pop(name) for name in list(options) if name in SHAPE}
    inputs = make_qkv(
        **{**SHAPE, **shape}, dtype=dtype, device=DEVICE, layout=layout, requires_grad=True
    )
    if "scores" in options:
        options["scale"] = options.pop("scores")
    compare_inputs(inputs, options)


@causal_or_not
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200] if ON_GPU else [1, 65])
@pytest.mark.parametrize("window", [0, 1, 31, 32, 64, 300] if ON_GPU else [0, 32, 300])
def test_lengths_and_windows(dtype, tokens, window, is_causal):
    compare(dtype, batch=1, tokens=tokens, window=window, is_causal=is_causal)


@pytest.mark.parametrize("tokens", [31, 32, 33, 64, 97, 129] if ON_GPU else [32, 33, 97])
def test_tokens_around_the_borders_of_tiles(tokens, monkeypatch):
    for name in ("window_read", "window_query", "window_key"):
        monkeypatch.setitem(sizes.overrides, name, sizes.Tile(32, 4, 1, across=16))
    compare(batch=1, tokens=tokens, window=16)
    compare(batch=1, tokens=tokens, window=17, is_causal=True)


WIDTHS = [(1, 1), (8, 24), (40, 16), (64, 64), (72, 80), (128, 128), (256, 256)]


@pytest.mark.parametrize(("width", "value_width"), WIDTHS if ON_GPU else WIDTHS[1:3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_widths(dtype, width, value_width):
    compare(dtype, tokens=40, width=width, value_width=value_width, window=9)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter takes long")
def test_values_in_slices():
    compare(tokens=70, value_width=300, window=9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    compare(layout=layout, heads=2, window=9)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (3, 1)])
@causal_or_not
def test_grouped_heads(heads, key_heads, is_causal):
    compare(batch=1, heads=heads, key_heads=key_heads, window=9, is_causal=is_causal)


@causal_or_not
@pytest.mark.parametrize("window", [0, 7])
def test_masks_and_scale(window, is_causal):
    compare(window=window, is_causal=is_causal, scores=0.7, key_mask=holes(2, 70))


def test_rows_that_see_no_valid_key_give_zeros():
    mask = torch.ones(2, 70, dtype=torch.bool, device=DEVICE)
    mask[0, 10:50] = False
    mask[1] = False
    compare(window=5, key_mask=mask)
    inputs = make_qkv(2, 1, 70, 16, device=DEVICE)
    out = lln.window_attention(*inputs, window=5, key_mask=mask, impl="triton")
    assert not out[1].any()
    assert not out[0, :, 15:45].any()


@causal_or_not
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 6, 100])
def test_packed_sequences(dtype, window, is_causal):
    batched = make_qkv(1, 2, 70, 16, key_heads=1, dtype=dtype, device=DEVICE)
    inputs = [side[0].transpose(0, 1).detach().clone().requires_grad_() for side in batched]
    compare_inputs(inputs, {"window": window, "is_causal": is_causal}, run_packed)


@causal_or_not
@pytest.mark.parametrize("tokens", [40, 129, 150] if ON_GPU else [129])
@pytest.mark.parametrize("window", [33, 70, 128])
def test_windows_of_several_tiles(tokens, window, is_causal, monkeypatch):
    for name in ("window_read", "window_query", "window_key"):
        monkeypatch.setitem(sizes.overrides, name, sizes.Tile(32, 4, 1, across=16))
    compare(batch=1, tokens=tokens, window=window, is_causal=is_causal)


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_inputs_far_from_one(scale):
    compare(scale=scale, tokens=40, window=9)


def test_what_is_masked_has_no_effect_whatever_it_holds():
    mask = holes(2, 70)
    query, key, value = make_qkv(2, 2, 70, 16, device=DEVICE, requires_grad=True)
    options = {"window": 9, "key_mask": mask, "impl": "triton"}
    clean = lln.window_attention(query, key, value, **options)
    hidden = ~mask[:, None, :, None]
    spoilt = [side.detach().masked_fill(hidden, float("nan")) for side in (query, key, value)]
    spoilt = [side.requires_grad_() for side in spoilt]
    out = lln.window_attention(*spoilt, **options)
    kept = mask[:, None, :, None].expand_as(out)
    torch.testing.assert_close(out[kept], clean[kept])
    grads = torch.autograd.grad(torch.where(kept, out, 0.0).sum(), spoilt)
    assert all(gradient.isfinite().all() for gradient in grads)


def test_no_buffer_is_read_before_it_is_written():
    inputs = make_qkv(1, 2, 40, 16, device=DEVICE, requires_grad=True)
    expected, expected_grads = run_dense(inputs, {"window": 9}, "triton")
    with poison_empty():
        found, grads = run_dense(inputs, {"window": 9}, "triton")
    assert torch.equal(found, expected)
    for one, other in zip(grads, expected_grads, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [HALF[-1], torch.float32])
def test_bit_equal_over_repetitions(dtype):
    tokens = 300 if ON_GPU else 40
    inputs = make_qkv(1, 4, tokens, 16, key_heads=2, device=DEVICE, dtype=dtype, requires_grad=True)
    first, first_grads = run_dense(inputs, {"window": 9}, "triton")
    for _ in range(50 if ON_GPU else 1):
        found, grads = run_dense(inputs, {"window": 9}, "triton")
        assert torch.equal(found, first)
        assert all(torch.equal(one, other) for one, other in zip(grads, first_grads, strict=True))


def test_empty_calls():
    for shape in ((0, 2, 8, 4), (2, 2, 0, 4)):
        inputs = [torch.zeros(shape, device=DEVICE, requires_grad=True) for _ in range(3)]
        out, grads = run_dense(inputs, {"window": 4}, "triton")
        assert out.shape == shape
        assert all(gradient.shape == shape for gradient in grads)


@pytest.mark.slow
def test_compiles_whole_with_dynamic_shapes():
    attend = partial(lln.window_attention, window=9, impl="triton")
    check_compiled(attend, 2, 3, (40, 50))


def test_query_heads_of_a_group_further_apart_than_32_bits_reach():
    stride = 1 << 30
    room = room_of(3 * stride + 20 * 16)
    query, key, value = make_qkv(1, 4, 20, 16, key_heads=1, dtype=torch.float16, device=DEVICE)
    far = room.as_strided(query.shape, (16, stride, 16, 1))
    far.copy_(query)
    found = []
    for first in (query, far):
        inputs = [side.detach().requires_grad_() for side in (first, key, value)]
        out = lln.window_attention(*inputs, window=5, enable_gqa=True, impl="triton")
        found.append((out, *torch.autograd.grad(out.sum(), inputs)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
