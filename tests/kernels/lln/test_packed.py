"""Packed sequences by the kernels: equal to one reference call a sequence."""

import warnings
from itertools import pairwise

import pytest
import torch
from tests.kernels.common import (
    DEVICE,
    DTYPES,
    ON_GPU,
    let_auto_take_kernels,
    limit_chips,
    sums_of,
    upstream_of,
)

import lln
from lln.functional import kernel_ways
from lln.kernels.launching import limits, sizes
from lln.testing import assert_close

# One token, an empty sequence, longer ones.
BOUNDS = [0, 1, 31, 31, 90]


def packed(dtype=torch.float32, heads=2, key_heads=2, width=16):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(BOUNDS[-1], count, width, generator=generator).to(DEVICE, dtype)
        for count in (heads, key_heads, key_heads)
    ]


def outcome(inputs, attend, kind, extra, **options):
    tensors = [tensor.detach().to(kind).requires_grad_() for tensor in inputs]
    sides = {
        name: side.detach().to(kind if kind == torch.float64 else side.dtype).requires_grad_()
        if torch.is_tensor(side)
        else side
        for name, side in extra.items()
    }
    bounds = torch.tensor(BOUNDS, device=DEVICE)
    out = attend(*tensors, bounds, enable_gqa=True, **sides, **options)
    leaves = [*tensors, *(side for side in sides.values() if torch.is_tensor(side))]
    return out, torch.autograd.grad(out, leaves, upstream_of(out))


def dense(sequence):
    return sequence.transpose(0, 1).unsqueeze(0)


def sums_of_sequences(inputs, extra, upstream, **options):
    """The sizes of the gradients of α, β and mix, the largest over the sequences."""
    sizes = dict.fromkeys(extra, 0.0)
    for index, (start, end) in enumerate(pairwise(BOUNDS)):
        *parts, sent = (dense(side[start:end]) for side in (*inputs, upstream))
        own = {
            name: dense(side[start:end]) if name == "mix" else side[index : index + 1]
            for name, side in extra.items()
            if torch.is_tensor(side)
        }
        for name, size in sums_of(parts, extra | own, sent, **options).items():
            sizes[name] = max(sizes[name], size)
    return sizes


def compare(dtype=torch.float32, extra=None, key_heads=2, impl="triton", **options):
    inputs = packed(dtype, key_heads=key_heads)
    diag = "block_size" in options
    attend = lln.lln_diag_attention_varlen if diag else lln.lln_attention_varlen
    extra = {"alpha": 2.0, "beta": 2.0} if extra is None else extra
    extra = {n: s.to(DEVICE) if torch.is_tensor(s) else s for n, s in extra.items()}
    found, found_grads = outcome(inputs, attend, dtype, extra, impl=impl, **options)
    wide, wide_grads = outcome(inputs, attend, torch.float64, extra, impl="reference", **options)
    plain, plain_grads = outcome(inputs, attend, dtype, extra, impl="eager", **options)
    assert_close(found, wide, plain)
    size = max(gradient.abs().max().item() for gradient in wide_grads[:3])
    sums = sums_of_sequences(inputs, extra, upstream_of(wide), **options)
    names = ["query", "key", "value", *(n for n, side in extra.items() if torch.is_tensor(side))]
    for name, got, want, eager in zip(names, found_grads, wide_grads, plain_grads, strict=True):
        what, terms = f"gradient of {name}", max(size, sums.get(name, 0.0))
        assert_close(got, want, eager, backward=True, magnitude=terms, what=what)


@pytest.fixture(params=["short", "long"])
def plan(request):
    sizes.overrides["short"] = request.param == "short"
    yield request.param
    sizes.overrides.clear()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bidirectional(plan, dtype):
    compare(dtype)


def test_longest_sequence_known(plan):
    compare(max_seqlen=59)


def test_blocks_start_anew_with_every_sequence(plan):
    mix = torch.rand(BOUNDS[-1], 2, 1)
    compare(block_size=16, extra={"alpha": 2.0, "beta": 2.0, "mix": mix})


def test_temperatures_of_every_sequence(plan):
    scales = {name: torch.rand(4, 2, 1, 1) + 1 for name in ("alpha", "beta")}
    compare(extra=scales)


def test_grouped_heads(plan):
    compare(key_heads=1)


@pytest.mark.parametrize("cores", [1, 64])
@pytest.mark.parametrize("channels", [1, 16])
def test_causal(monkeypatch, channels, cores):
    # Many cores: sequences are cut into stretches.
    monkeypatch.setitem(sizes.overrides, "cores", cores)
    mix = torch.rand(BOUNDS[-1], 2, channels)
    compare(is_causal=True)
    compare(is_causal=True, block_size=16, extra={"alpha": 2.0, "beta": 2.0, "mix": mix})


def test_blocks_beside_the_kernels(monkeypatch):
    """Blocks too large for a tile: the LLN part by the kernel, the diagonal in plain PyTorch."""
    limit_chips(monkeypatch, block_tokens=16)
    let_auto_take_kernels(monkeypatch)
    mix = torch.rand(BOUNDS[-1], 2, 1)
    compare(block_size=40, extra={"alpha": 2.0, "beta": 2.0, "mix": mix}, impl="auto")


@pytest.mark.parametrize("is_causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_blocks_in_a_kernel_beside_the_kernels(monkeypatch, is_causal):
    """A chip with room for blocks and for a summary, but not for both at once."""
    limit_chips(monkeypatch, joint_tokens=0)
    monkeypatch.setattr(limits, "MAX_CAUSAL_BLOCK_BYTES", 0)
    taken, blocks = [], kernel_ways.fused_blocks
    monkeypatch.setattr(
        kernel_ways, "fused_blocks", lambda *a, **o: taken.append(1) or blocks(*a, **o)
    )
    mix = torch.rand(BOUNDS[-1], 2, 1)
    extra = {"alpha": 2.0, "beta": 2.0, "mix": mix}
    compare(block_size=40, extra=extra, is_causal=is_causal)
    compare(block_size=16, extra=extra, is_causal=is_causal, key_heads=1)
    assert len(taken) == 2


def test_matched_moments():
    inputs = packed()
    bounds = torch.tensor(BOUNDS, device=DEVICE)
    found = lln.lln_attention_varlen(*inputs, bounds, impl="triton")
    wide = [tensor.double() for tensor in inputs]
    expected = lln.lln_attention_varlen(*wide, bounds, impl="reference")
    eager = lln.lln_attention_varlen(*inputs, bounds, impl="eager")
    assert_close(found, expected, eager)


@pytest.mark.skipif(not ON_GPU, reason="bounds are only unread on a GPU")
def test_bounds_are_not_read_back():
    inputs = packed()
    bounds = torch.tensor(BOUNDS, device=DEVICE)
    lln.lln_attention_varlen(*inputs, bounds, alpha=2.0, beta=2.0, impl="triton")
    try:
        with warnings.catch_warnings():
            # It calls itself a prototype.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        lln.lln_attention_varlen(*inputs, bounds, alpha=2.0, beta=2.0, impl="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
