"""What the tests of blocks on the diagonal share: a call, and its comparison with the reference."""

import torch
from tests.kernels.common import DEVICE, SHAPE

import lln
from lln.testing import assert_close, make_qkv


def run(inputs, options, impl):
    out = lln.block_diagonal_attention(*inputs, **options, enable_gqa=True, impl=impl)
    generator = torch.Generator().manual_seed(7)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return out, torch.autograd.grad(out, inputs, upstream.to(out.device, out.dtype))


def compare(dtype=torch.float32, layout="contiguous", **options):
    shape = {name: options.pop(name) for name in list(options) if name in SHAPE}
    inputs = make_qkv(
        **{**SHAPE, **shape}, dtype=dtype, device=DEVICE, layout=layout, requires_grad=True
    )
    if isinstance(options.get("scores"), float):
        options["scale"] = options.pop("scores")
    found, found_grads = run(inputs, options, "triton")
    wide, plain = (
        [side.detach().to(kind).requires_grad_() for side in inputs]
        for kind in (torch.float64, dtype)
    )
    expected, expected_grads = run(wide, options, "reference")
    eager, eager_grads = run(plain, options, "eager")
    assert found.dtype == dtype
    assert_close(found, expected, eager, what="output")
    size = max(gradient.abs().max().item() for gradient in expected_grads)
    for name, got, want, simple in zip(
        ("query", "key", "value"), found_grads, expected_grads, eager_grads, strict=True
    ):
        what = f"gradient of {name}"
        assert_close(got, want, simple, backward=True, magnitude=size, what=what)
