"""What the tests of exact keys share: the comparison with the reference."""

import torch
from tests.kernels.common import DEVICE, ON_GPU

import lln
from lln.kernels.launching import recipes
from lln.testing import assert_close, make_qkv, poison_empty

GIVEN = {"alpha": 0.8, "beta": 0.9, "offset": -1.0}


def set_size(monkeypatch, module, name, size):
    """Another size for a while; recipes hold the sizes of the calls that wrote them."""
    monkeypatch.setattr(module, name, size)
    monkeypatch.setattr(recipes, "_recipes", {})


def run(inputs, numbers, options, impl):
    out = lln.lln_keys_attention(*inputs, **numbers, **options, enable_gqa=True, impl=impl)
    generator = torch.Generator().manual_seed(7)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    learned = [side for side in numbers.values() if isinstance(side, torch.Tensor)]
    wanted = (*inputs, *learned)
    return out, torch.autograd.grad(out, wanted, upstream.to(out.device, out.dtype))


def sizes_of_numbers(inputs, grads, numbers):
    """√Σ term² of the gradients of α, β and offset: where terms cancel, their sum is no measure."""
    query, key, value = inputs
    by_alpha = (query * grads[0]).sum(-1).square().sum().sqrt().item()
    by_beta = (key * grads[1]).sum(-1).square().sum().sqrt().item()
    upstream = value.abs().mean().item() * query.shape[2] ** 0.5
    return {"alpha": by_alpha, "beta": by_beta, "offset": max(by_alpha, upstream)}


def compare(
    dtype=torch.float32,
    *,
    tokens,
    width=16,
    value_width=None,
    key_heads=None,
    learned=False,
    layout="contiguous",
    inputs=None,
    **options,
):
    """Kernels against the reference and plain PyTorch, forward and backward, within budget.

    All get the keys that plain PyTorch chooses.
    """
    # Masks and numbers differ by sample; elsewhere the interpreter is spared the second one.
    batch = 2 if ON_GPU or learned or options.get("key_mask") is not None else 1
    shape = {"batch": batch, "heads": 2, "tokens": tokens, "width": width}
    shape |= {"value_width": value_width, "key_heads": key_heads}
    if inputs is None:
        inputs = make_qkv(**shape, dtype=dtype, device=DEVICE, layout=layout, requires_grad=True)
    numbers = dict(GIVEN)
    if learned:
        heads = {"alpha": 2, "beta": key_heads or 2, "offset": 2}
        numbers = {
            name: torch.linspace(0.7, 1.1, 2 * heads[name], device=DEVICE)
            .view(2, heads[name], 1, 1)
            .requires_grad_()
            for name in numbers
        }
    chosen = {k: options[k] for k in ("block_size", "group_size", "key_mask") if k in options}
    chosen |= {"enable_gqa": True, "impl": "eager", "scale": options.get("scale")}
    options["keys"] = lln.choose_keys(*inputs[:2], options["keys"], **chosen)
    with poison_empty():
        found, found_grads = run(inputs, numbers, options, "triton")
    wide, plain = (
        [side.detach().to(kind).requires_grad_() for side in inputs]
        for kind in (torch.float64, dtype)
    )
    wide_numbers = {
        name: side.detach().double().requires_grad_() if learned else side
        for name, side in numbers.items()
    }
    expected, expected_grads = run(wide, wide_numbers, options, "reference")
    eager, eager_grads = run(plain, numbers, options, "eager")
    assert found.dtype == dtype
    assert_close(found, expected, eager, what="output")
    size = max(gradient.abs().max().item() for gradient in expected_grads[:3])
    sums = sizes_of_numbers(wide, expected_grads, numbers)
    names = ("query", "key", "value", *numbers)
    for name, got, want, simple in zip(
        names, found_grads, expected_grads, eager_grads, strict=False
    ):
        # With one token the gradients of its weight cancel: terms of the size of dO·v remain.
        size_here = sums.get(name, max(size, 4.0 if tokens == 1 else 0.0))
        if name in sums:
            # The kernels take rowsum(dO ∘ O) from the rounded output.
            got, simple = got.to(dtype), simple.to(dtype)
        what = f"gradient of {name}"
        assert_close(got, want, simple, backward=True, magnitude=size_here, what=what)
