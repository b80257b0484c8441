"""Heads of up to 32 channels in 16-bit types: passes sum up what the pass before left in parts."""

import pytest
import torch
from tests.kernels.common import DEVICE, HALF, compare, holes

import lln
from lln.functional import prepared_calls
from lln.kernels.launching import recipes, sizes
from lln.testing import make_qkv

BETWEEN = {"merge_kernel", "gather_kernel"}


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that a test launches, in order."""
    names, record = [], recipes.Step.record

    def note(step, live):
        names.append(step.kernel.fn.__name__)
        record(step, live)

    monkeypatch.setattr(recipes, "_recipes", {})
    prepared_calls.clear()
    monkeypatch.setattr(recipes.Step, "record", note)
    # Enough multiprocessors that sequences are split.
    monkeypatch.setitem(sizes.overrides, "cores", 64)
    monkeypatch.setitem(sizes.overrides, "short", False)
    return names


CALLS = {
    "plain": {"width": 32, "tokens": 256},
    "odd widths": {"width": 24, "value_width": 20, "tokens": 150},
    "mask": {"width": 32, "tokens": 150, "key_mask": holes(2, 150)},
    "shared summary": {"width": 32, "heads": 4, "key_heads": 2, "tokens": 150},
    "blocks": {"width": 32, "tokens": 256, "block_size": 64},
}


@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_gradients_without_launches_between(launched, name):
    compare(HALF[-1], **CALLS[name])
    assert {"summarise_kernel", "read_kernel", "query_bwd_kernel", "key_bwd_kernel"} <= {*launched}
    assert BETWEEN.isdisjoint(launched)


@pytest.mark.parametrize("block_size", [0, 64])
def test_the_same_bits_as_with_them(launched, monkeypatch, block_size):
    inputs = make_qkv(1, 4, 300, 32, key_heads=2, device=DEVICE, dtype=HALF[-1], requires_grad=True)
    found = []
    for folds in (False, True):
        monkeypatch.setitem(sizes.overrides, "folds", folds)
        launched.clear()
        options = {"alpha": 2.0, "beta": 1.5, "enable_gqa": True, "impl": "triton"}
        if block_size:
            out = lln.lln_diag_attention(*inputs, block_size=block_size, **options)
        else:
            out = lln.lln_attention(*inputs, **options)
        upstream = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out).to(out)
        found.append((out, *torch.autograd.grad(out, inputs, upstream)))
        assert BETWEEN.isdisjoint(launched) == folds
    for one, other in zip(*found, strict=True):
        assert one.abs().max() > 0.01
        assert torch.equal(one, other)


def test_a_forward_pass_alone(launched):
    query, key, value = make_qkv(1, 2, 300, 32, device=DEVICE, dtype=HALF[-1])
    out = lln.lln_attention(query, key, value, alpha=2.0, beta=2.0, impl="triton")
    wide = [side.double() for side in (query, key, value)]
    expected = lln.lln_attention(*wide, alpha=2.0, beta=2.0, impl="eager")
    assert BETWEEN.isdisjoint(launched)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.02)


def sizes_of(width, dtype=torch.bfloat16, tokens=4096, summaries=8, **options):
    sides = [torch.empty(1, 1, tokens, width, dtype=dtype, device="meta") for _ in range(3)]
    block_size = options.pop("block_size", 0)
    return sizes.choose_sizes(*sides, 1, summaries, block_size, **options)


def test_where_it_is_done():
    assert sizes_of(32).folds
    assert sizes_of(16).folds
    assert not sizes_of(33).folds
    assert not sizes_of(32, torch.float32).folds
    assert not sizes_of(32, causal=True).folds


def test_tiles_are_full():
    """Long tiles only where they divide the sequence."""
    assert sizes_of(32).summarise.tokens == 128
    assert sizes_of(32, tokens=4096 + 64).summarise.tokens == 64
    short = {"tokens": 512, "summaries": 10_000}
    assert sizes_of(32, **short).summarise.tokens == 32
    assert sizes_of(32, block_size=64, **short).query_grad.tokens == 128
    short["tokens"] = 448
    assert sizes_of(32, block_size=64, **short).query_grad.tokens == 64
