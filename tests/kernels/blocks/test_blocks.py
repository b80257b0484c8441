"""Block-diagonal attention alone by its kernel, against the float64 reference."""

from functools import partial

import pytest
import torch
from tests.kernels.block_calls import compare, run
from tests.kernels.common import (
    DEVICE,
    DTYPES,
    HALF,
    ON_GPU,
    check_compiled,
    holes,
    limit_chips,
    room_of,
)

import lln
from lln.kernels.launching import sizes
from lln.testing import LAYOUTS, make_qkv, poison_empty


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 17, 64, 150] if ON_GPU else [1, 40])
@pytest.mark.parametrize("block_size", [1, 7, 16, 64])
def test_lengths(dtype, tokens, block_size):
    compare(dtype, tokens=tokens, block_size=block_size)


WIDTHS = [(1, 1), (8, 24), (40, 16), (64, 64), (72, 80), (128, 128), (256, 256)]


@pytest.mark.parametrize(("width", "value_width"), WIDTHS if ON_GPU else WIDTHS[1:3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_widths(dtype, width, value_width):
    compare(dtype, tokens=40, width=width, value_width=value_width, block_size=16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    compare(layout=layout, heads=2, block_size=16)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (3, 1)])
def test_grouped_heads(heads, key_heads):
    compare(heads=heads, key_heads=key_heads, block_size=16)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block_size", [7, 16, 32])
def test_masks_and_causal_blocks(is_causal, block_size):
    compare(block_size=block_size, is_causal=is_causal, scores=0.7)
    compare(block_size=block_size, is_causal=is_causal, key_mask=holes(2, 70))


@pytest.mark.parametrize("cores", [1, 64], ids=["long stretches", "short stretches"])
@pytest.mark.parametrize("stages", [1, 2, 3] if ON_GPU else [1])
def test_stretches_and_stages(cores, stages, monkeypatch):
    monkeypatch.setitem(sizes.overrides, "cores", cores)
    for name in ("joint_read", "joint_grad"):
        monkeypatch.setitem(sizes.overrides, name, sizes.Tile(64, 4, stages, 4))
    compare(tokens=300 if ON_GPU else 150, block_size=16)


@pytest.mark.parametrize(
    ("dtype", "width", "block_size"),
    [(HALF[-1], 128, 128), (HALF[-1], 256, 64), (HALF[-1], 64, 128), (torch.float32, 64, 128)],
    ids=str,
)
def test_largest_tiles(dtype, width, block_size):
    tokens = 300 if ON_GPU else 140
    compare(dtype, batch=1, tokens=tokens, width=width, block_size=block_size)


def test_values_in_slices(monkeypatch):
    limit_chips(monkeypatch, block_bytes=16 * 16 * 4)
    compare(tokens=20, value_width=40, block_size=16)


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_inputs_far_from_one(scale):
    compare(scale=scale, tokens=40, block_size=16)


def test_what_is_masked_has_no_effect_whatever_it_holds():
    mask = holes(2, 70)
    query, key, value = make_qkv(2, 2, 70, 16, device=DEVICE, requires_grad=True)
    options = {"block_size": 16, "key_mask": mask, "impl": "triton"}
    clean = lln.block_diagonal_attention(query, key, value, **options)
    hidden = ~mask[:, None, :, None]
    spoilt = [side.detach().masked_fill(hidden, float("nan")) for side in (query, key, value)]
    spoilt = [side.requires_grad_() for side in spoilt]
    out = lln.block_diagonal_attention(*spoilt, **options)
    kept = mask[:, None, :, None].expand_as(out)
    torch.testing.assert_close(out[kept], clean[kept])
    grads = torch.autograd.grad(torch.where(kept, out, 0.0).sum(), spoilt)
    assert all(gradient.isfinite().all() for gradient in grads)


def test_no_buffer_is_read_before_it_is_written(monkeypatch):
    inputs = make_qkv(1, 2, 40, 16, device=DEVICE, requires_grad=True)
    expected, expected_grads = run(inputs, {"block_size": 16}, "triton")
    with poison_empty():
        found, grads = run(inputs, {"block_size": 16}, "triton")
    assert torch.equal(found, expected)
    for one, other in zip(grads, expected_grads, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_dropped_keys_keep_the_mean():
    query, key, value = make_qkv(1, 1, 16, 8, device=DEVICE)
    torch.manual_seed(0)
    options = {"block_size": 16, "impl": "triton"}
    draws = [
        lln.block_diagonal_attention(query, key, value, dropout_p=0.5, **options)
        for _ in range(200)
    ]
    plain = lln.block_diagonal_attention(query, key, value, **options)
    assert (torch.stack(draws).mean(0) - plain).abs().max() < 0.5
    assert not torch.equal(draws[0], draws[1])


@pytest.mark.slow
def test_compiles_whole_with_dynamic_shapes():
    attend = partial(lln.block_diagonal_attention, block_size=16, impl="triton")
    check_compiled(attend, 2, 3, (40, 50))


@pytest.mark.parametrize("dtype", [HALF[-1], torch.float32])
def test_bit_equal_over_repetitions(dtype):
    tokens = 300 if ON_GPU else 70
    inputs = make_qkv(2, 4, tokens, 16, key_heads=2, device=DEVICE, dtype=dtype, requires_grad=True)
    first, first_grads = run(inputs, {"block_size": 16}, "triton")
    for _ in range(50 if ON_GPU else 1):
        found, grads = run(inputs, {"block_size": 16}, "triton")
        assert torch.equal(found, first)
        assert all(torch.equal(one, other) for one, other in zip(grads, first_grads, strict=True))


def test_empty_calls():
    for shape in ((0, 2, 8, 4), (2, 2, 0, 4)):
        inputs = [torch.zeros(shape, device=DEVICE, requires_grad=True) for _ in range(3)]
        out, grads = run(inputs, {"block_size": 4}, "triton")
        assert out.shape == shape
        assert all(gradient.shape == shape for gradient in grads)


def test_blocks_without_a_tile_are_refused_or_left_to_pytorch():
    inputs = make_qkv(1, 1, 300, 16, device=DEVICE)
    with pytest.raises(lln.BackendUnavailableError, match=r"blocks of 256 tokens.*impl='auto'"):
        lln.block_diagonal_attention(*inputs, block_size=256, impl="triton")
    out = lln.block_diagonal_attention(*inputs, block_size=256)
    plain = lln.block_diagonal_attention(*inputs, block_size=256, impl="eager")
    assert torch.equal(out, plain)


@pytest.mark.parametrize("name", ["block", "lln_diag"])
def test_query_heads_of_a_group_further_apart_than_32_bits_reach(name):
    stride = 1 << 30
    room = room_of(3 * stride + 20 * 16)
    query, key, value = make_qkv(1, 4, 20, 16, key_heads=1, dtype=torch.float16, device=DEVICE)
    far = room.as_strided(query.shape, (16, stride, 16, 1))
    far.copy_(query)
    attend = {
        "block": lln.block_diagonal_attention,
        "lln_diag": lambda *a, **o: lln.lln_diag_attention(*a, alpha=1.0, beta=1.0, **o),
    }[name]
    found = []
    for first in (query, far):
        inputs = [side.detach().requires_grad_() for side in (first, key, value)]
        out = attend(*inputs, block_size=16, enable_gqa=True, impl="triton")
        found.append((out, *torch.autograd.grad(out.sum(), inputs)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
