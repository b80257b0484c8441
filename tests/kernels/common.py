"""What the tests of every kernel share: where they run, and the comparison with the reference.

On a GPU the kernels run as they are; elsewhere in Triton's interpreter (TRITON_INTERPRET=1), which
has float32 and float16 only.
"""

import os

import pytest
import torch
from tests.terms import kept_pairs, sizes_of_sums

import lln
from lln.functional import kernel_ways, prepared_calls
from lln.functional.match import match_inputs
from lln.kernels.launching import limits
from lln.testing import assert_close, make_qkv

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

HALF = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]
DTYPES = [torch.float32, *HALF]

# The interpreter takes milliseconds a tile: small there, odd everywhere.
SHAPE = {
    "batch": 2,
    "heads": 3 if ON_GPU else 1,
    "tokens": 70,
    "width": 16,
    "keys": None,
    "key_heads": None,
    "value_width": None,
    "scale": 1.0,
}


def room_of(elements):
    """A float16 tensor of gigabytes for a few far apart numbers: other pages are never touched."""
    try:
        return torch.empty(elements, device=DEVICE, dtype=torch.float16)
    except RuntimeError:
        pytest.skip(f"needs {elements * 2 >> 30} GB of address space")


def holes(batch, keys, seed=3):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(batch, keys, generator=generator) > 0.3
    mask[0, : keys // 2] = False
    return mask.to(DEVICE)


def limit_chips(monkeypatch, **less):
    """Every chip takes no more than that; see `lln.kernels.launching.limits.Chip`."""
    monkeypatch.setattr(limits, "CHIPS", tuple(chip._replace(**less) for chip in limits.CHIPS))
    prepared_calls.clear()


def check_compiled(attend, batch, heads, lengths):
    """One graph for all lengths, whose output and gradients are those of the plain call."""
    layer = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in lengths:
        inputs = make_qkv(batch, heads, tokens, 16, device=DEVICE, requires_grad=True)
        out, plain = layer(*inputs), attend(*inputs)
        torch.testing.assert_close(out, plain)
        grads, plain_grads = (torch.autograd.grad(side.sum(), inputs) for side in (out, plain))
        torch.testing.assert_close(grads, plain_grads)


def let_auto_take_kernels(monkeypatch):
    """``impl="auto"`` takes the kernels also in the interpreter, as it does on a GPU."""
    monkeypatch.setattr(kernel_ways.KernelWay, "pays", lambda way, call: True)
    prepared_calls.clear()


def run(inputs, extra, options, impl):
    """Output and gradients of everything that asks for one."""
    attend = lln.lln_diag_attention if "block_size" in options else lln.lln_attention
    out = attend(*inputs, **extra, **options, impl=impl)
    leaves = [t for t in (*inputs, *extra.values()) if torch.is_tensor(t) and t.requires_grad]
    return out, torch.autograd.grad(out, leaves, upstream_of(out))


def upstream_of(out):
    """The gradient that is sent up, the same for every implementation."""
    generator = torch.Generator().manual_seed(7)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return upstream.to(out.device, out.dtype)


def sums_of(inputs, extra, upstream, *, key_mask=None, is_causal=False, block_size=None, **_):
    """The sizes of the gradients of α, β and mix, see `tests.terms`."""
    sides = {name: side for name, side in extra.items() if side is not None}
    if "alpha" not in sides:
        matched = match_inputs(*inputs[:2], "variance", key_mask, "reference")
        sides |= dict(zip(("alpha", "beta"), matched, strict=True))
    keep = kept_pairs(key_mask, is_causal, inputs[0].shape[2], DEVICE)
    return sizes_of_sums(inputs, upstream, **sides, block_size=block_size, keep=keep)


def compare(
    dtype=torch.float32, extra=None, layout="contiguous", offset=0.0, impl="triton", **options
):
    """Kernels against reference and eager, forward and backward, within budget.

    offset: Added to all queries and keys, which changes no attention.
    impl: ``"auto"`` where plain PyTorch may take a part, see `let_auto_take_kernels`.
    """
    shape = {name: options.pop(name) for name in list(options) if name in SHAPE}
    sizes = {**SHAPE, **shape}
    inputs = make_qkv(**sizes, dtype=dtype, device=DEVICE, layout=layout, requires_grad=True)
    if offset:
        inputs = [(side.detach() + offset).requires_grad_() for side in inputs[:2]] + [inputs[2]]
    extra = {
        name: side.to(DEVICE).requires_grad_() if torch.is_tensor(side) else side
        for name, side in (extra or {"alpha": 2.0, "beta": 2.0}).items()
    }
    options["enable_gqa"] = True

    def again(kind):
        tensors = [t.detach().to(kind).requires_grad_() for t in inputs]
        scales = {
            name: side.detach().clone().requires_grad_() if torch.is_tensor(side) else side
            for name, side in extra.items()
        }
        return tensors, scales

    found, found_grads = run(inputs, extra, options, impl)
    wide, wide_extra = again(torch.float64)
    wide_extra = {
        n: s.detach().double().requires_grad_() if torch.is_tensor(s) else s
        for n, s in wide_extra.items()
    }
    expected, expected_grads = run(wide, wide_extra, options, "reference")
    eager, eager_grads = run(*again(dtype), options, "eager")
    assert found.dtype == dtype
    assert_close(found, expected, eager, what="output")
    # A gradient may cancel to zero (one token: dq = 0); its terms are as large as the others'.
    size = max(gradient.abs().max().item() for gradient in expected_grads[:3])
    # The mean of queries and keys must not weigh in, so that the sums are judged without it.
    near = [side.detach() - offset for side in wide[:2]] + [wide[2]]
    sums = sums_of(near, wide_extra, upstream_of(expected), **options)
    names = ["query", "key", "value", *(n for n, side in extra.items() if torch.is_tensor(side))]
    for name, got, want, plain in zip(names, found_grads, expected_grads, eager_grads, strict=True):
        what, terms = f"gradient of {name}", max(size, sums.get(name, 0.0))
        assert_close(got, want, plain, backward=True, magnitude=terms, what=what)
