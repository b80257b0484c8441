"""Causal attention by the kernels: fast walk, guard and exact walk, against the reference."""

from functools import partial

import pytest
import torch
from tests.kernels.common import DEVICE, DTYPES, HALF, ON_GPU, check_compiled, compare, holes

import lln
from lln.kernels.launching import sizes
from lln.kernels.launching.stretches import Tile
from lln.testing import assert_close, make_qkv, poison_empty


@pytest.fixture(params=["one stretch", "stretches"])
def cut(request):
    """A sequence walked by one program, and cut into stretches that start from scanned states."""
    sizes.overrides["cores"] = 1 if request.param == "one stretch" else 64
    yield request.param
    sizes.overrides.clear()


@pytest.fixture
def walks(cut):
    """The same; in the interpreter with small tiles, so that few tokens are many tiles."""
    if not ON_GPU:
        # A different size for every walk.
        for name, tokens in (("walk", 16), ("walk_query", 32), ("walk_key", 16)):
            sizes.overrides[name] = Tile(tokens, 4, 1, 1)
        sizes.overrides["summarise"] = Tile(32, 4, 1, 1)
    return cut


CAUSAL = {"is_causal": True}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 17, 64, 300] if ON_GPU else [1, 40])
def test_lengths(walks, dtype, tokens):
    compare(dtype, tokens=tokens, **CAUSAL)


def test_full_tiles(walks):
    compare(tokens=256 if ON_GPU else 64, **CAUSAL)


WIDTHS = [(1, 1), (8, 24), (40, 16), (40, 24), (32, 32), (64, 32), (64, 64), (72, 80), (128, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, HALF[-1]])
@pytest.mark.parametrize(("width", "value_width"), WIDTHS if ON_GPU else WIDTHS[1:2])
def test_widths(walks, dtype, width, value_width):
    compare(dtype, tokens=200 if ON_GPU else 40, width=width, value_width=value_width, **CAUSAL)


@pytest.mark.skipif(not ON_GPU, reason="too slow in the interpreter")
@pytest.mark.parametrize("block_size", [None, 64])
def test_widest(block_size):
    blocks = {} if block_size is None else {"block_size": block_size}
    compare(HALF[-1], tokens=130, width=256, value_width=200, **blocks, **CAUSAL)


@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_rows_that_the_guard_refuses_are_walked_exactly(walks, scale):
    compare(batch=1, tokens=40, scale=scale, extra={"alpha": 1.0, "beta": 1.0}, **CAUSAL)


def test_guard_under_a_mask(walks):
    compare(batch=1, tokens=40, scale=30.0, key_mask=holes(1, 40), **CAUSAL)


def test_a_later_key_far_above_the_earlier_ones(walks):
    """The case the guard is for: key 20 sets a shift under which rows 0 … 19 vanish."""
    query, key, value = make_qkv(1, 1, 40, 16, device=DEVICE)
    key[:, :, 20] += 300.0
    found = lln.lln_attention(query, key, value, alpha=1.0, beta=1.0, is_causal=True, impl="triton")
    wide = [tensor.double() for tensor in (query, key, value)]
    expected = lln.lln_attention(*wide, alpha=1.0, beta=1.0, is_causal=True, impl="reference")
    eager = lln.lln_attention(query, key, value, alpha=1.0, beta=1.0, is_causal=True, impl="eager")
    assert_close(found, expected, eager)


def test_masked_keys(walks):
    compare(key_mask=holes(2, 70), **CAUSAL)


def test_rows_before_the_first_key_give_zeros(walks):
    inputs = make_qkv(1, 1, 40, 16, device=DEVICE, requires_grad=True)
    mask = torch.arange(40, device=DEVICE)[None] >= 25
    options = {"alpha": 2.0, "beta": 2.0, "key_mask": mask, "is_causal": True, "impl": "triton"}
    out = lln.lln_attention(*inputs, **options)
    assert torch.equal(out[:, :, :25], torch.zeros_like(out[:, :, :25]))
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert gradient.isfinite().all()


def test_grouped_heads_and_gradients_of_alpha_and_beta(walks):
    extra = {"alpha": torch.rand(1, 4, 1, 1) + 1, "beta": torch.rand(1, 2, 1, 1) + 1}
    compare(batch=1, tokens=40, heads=4, key_heads=2, extra=extra, **CAUSAL)


@pytest.mark.parametrize("block_size", [1, 7, 16, 64, 100] if ON_GPU else [7])
def test_blocks(cut, block_size):
    compare(block_size=block_size, tokens=130 if ON_GPU else 50, **CAUSAL)


@pytest.mark.parametrize("shape", [(1, 1, 40, 1), (1, 1, 16), (1, 1, 40, 16)])
def test_mix_and_its_gradient(cut, shape):
    extra = {"alpha": 2.0, "beta": 2.0, "mix": torch.rand(shape)}
    compare(batch=1, tokens=40, extra=extra, block_size=16, **CAUSAL)


def test_blocks_with_masked_keys_and_a_guarded_row(cut):
    compare(batch=1, tokens=40, scale=20.0, block_size=16, key_mask=holes(1, 40), **CAUSAL)


def test_no_row_sees_the_future(cut):
    query, key, value = make_qkv(1, 1, 50, 16, device=DEVICE)
    options = {"alpha": 2.0, "beta": 2.0, "block_size": 16, "is_causal": True, "impl": "triton"}
    before = lln.lln_diag_attention(query, key, value, **options)
    for tensor in (query, key, value):
        tensor[:, :, 30:] += 1.0
    after = lln.lln_diag_attention(query, key, value, **options)
    # A later key of the same tile may move the common shift, and so the last digit.
    torch.testing.assert_close(before[:, :, :30], after[:, :, :30], rtol=1e-5, atol=1e-6)
    assert (before[:, :, 30:] - after[:, :, 30:]).abs().min() > 0


def test_unwritten_memory_never_shows(walks):
    inputs = make_qkv(1, 2, 50, 24, device=DEVICE, requires_grad=True)
    options = {"alpha": 2.0, "beta": 2.0, "is_causal": True, "impl": "triton"}
    with poison_empty():
        out = lln.lln_attention(*inputs, **options)
        grads = torch.autograd.grad(out.sum(), inputs)
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in grads)


def test_dropout_drops_whole_keys(walks):
    query, key, _ = make_qkv(1, 1, 40, 16, device=DEVICE)
    identity = torch.eye(40, device=DEVICE)[None, None]
    torch.manual_seed(0)
    options = {"alpha": 2.0, "beta": 2.0, "is_causal": True}
    dropped = lln.lln_attention(query, key, identity, dropout_p=0.4, impl="triton", **options)
    plain = lln.lln_attention(query, key, identity, impl="eager", **options)
    kept = dropped[0, 0].diagonal() > 0
    assert 8 < kept.sum() < 34
    expected = plain * kept / 0.6
    torch.testing.assert_close(dropped, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_compiles_whole():
    options = {"alpha": 2.0, "beta": 2.0, "is_causal": True, "impl": "triton"}
    check_compiled(partial(lln.lln_attention, **options), 1, 2, (20, 30))


def test_bit_equal_over_repetitions(walks):
    tokens = 300 if ON_GPU else 40
    inputs = make_qkv(2, 1, tokens, 16, device=DEVICE, requires_grad=True)
    options = {"alpha": 2.0, "beta": 2.0, "is_causal": True, "impl": "triton"}

    def outcome():
        out = lln.lln_attention(*inputs, **options)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    first = outcome()
    for _ in range(50 if ON_GPU else 1):
        for one, other in zip(first, outcome(), strict=True):
            assert torch.equal(one, other)
