"""Exact keys by all scores and a mask: what copied keys give, forward and backward, and when."""

import pytest
import torch
from torch.autograd import forward_ad

import lln
from lln.eager import key_attention, masked_keys
from lln.functional import plain_ways, prepared_calls
from lln.testing import assert_close, make_qkv

CALLS = [
    {"tokens": 64, "block_size": 16, "keys": 8, "select": "query"},
    {"tokens": 70, "block_size": 16, "keys": 7, "select": "query"},
    {"tokens": 70, "block_size": 16, "keys": 6, "select": "query"},
    {"tokens": 70, "block_size": 16, "group_size": 1, "keys": 5},
    {"tokens": 33, "block_size": 64, "keys": 4, "select": "query"},
    {"tokens": 64, "block_size": 16, "keys": 48, "select": "query"},
    {"tokens": 64, "block_size": 16, "keys": 0, "select": "query"},
    {"tokens": 130, "block_size": 8, "keys": 6, "select": "query", "width": 24, "key_heads": 1},
    {"tokens": 60, "block_size": 8, "keys": 6, "select": "query", "value_width": 40},
    {"tokens": 50, "block_size": 8, "keys": 6, "select": "query", "scale": 0.03},
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

MASKED = [(CALLS[place], True) for place in (0, 1, 3, 7)]


@pytest.fixture
def taken(monkeypatch):
    """How often keys were masked."""
    calls = []
    masked = key_attention.attend_masked

    def counted(*arguments, **options):
        calls.append(1)
        return masked(*arguments, **options)

    monkeypatch.setattr(key_attention, "attend_masked", counted)
    monkeypatch.setattr(masked_keys, "SCORES_PER_ROW", 1000)
    # Several stretches of queries.
    monkeypatch.setitem(masked_keys.MOST_NUMBERS, DEVICE, 1)
    return calls


def inputs_of(call, dtype=torch.float32):
    options = dict(call)
    shape = {"batch": 2, "heads": 2, "tokens": options.pop("tokens"), "width": 16}
    for name in ("width", "value_width", "key_heads"):
        if name in options:
            shape[name] = options.pop(name)
    inputs = make_qkv(**shape, dtype=dtype, device=DEVICE, requires_grad=True)
    sizes = {"alpha": 2, "beta": shape.get("key_heads", 2), "offset": 2}
    numbers = {
        name: torch.linspace(0.7, 1.1, heads, device=DEVICE).view(1, heads, 1, 1).requires_grad_()
        for name, heads in sizes.items()
    }
    return inputs, numbers, options | {"enable_gqa": True, "impl": "eager"}


def run(inputs, numbers, options):
    out = lln.lln_keys_attention(*inputs, **numbers, **options)
    generator = torch.Generator().manual_seed(7)
    upstream = torch.randn(out.shape, generator=generator).to(DEVICE, out.dtype)
    return out, *torch.autograd.grad(out, (*inputs, *numbers.values()), upstream)


def holes(tokens):
    mask = (torch.arange(tokens, device=DEVICE) % 5 != 3).repeat(2, 1)
    mask[1, :20] = False
    return mask


@pytest.mark.parametrize(("call", "masked"), [*((call, False) for call in CALLS), *MASKED])
def test_it_gives_what_copied_keys_give(taken, monkeypatch, call, masked):
    inputs, numbers, options = inputs_of(call)
    if masked:
        options["key_mask"] = holes(call["tokens"])
    found = run(inputs, numbers, options)
    assert taken
    monkeypatch.setattr(plain_ways, "can_mask", lambda *sides, **options: False)
    prepared_calls.clear()
    plain = run(inputs, numbers, options)
    wide = [side.detach().double().requires_grad_() for side in inputs]
    wide_numbers = {name: side.double() for name, side in numbers.items()}
    exact = run(wide, wide_numbers, options)
    for place, sides in enumerate(zip(found[:4], exact[:4], strict=True)):
        assert_close(*sides, backward=place > 0, what=("output", "dq", "dk", "dv")[place])
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("call", [CALLS[1], CALLS[2], CALLS[7]])
def test_half_precision_stays_within_its_budget(taken, call, dtype):
    inputs, numbers, options = inputs_of(call, dtype)
    plain = run(inputs, numbers, options)
    # On a GPU this way rounds weights as the kernels do, and has their budget.
    found = run(inputs, numbers, options | {"impl": "auto"})
    # On a GPU the kernels take keys by query, in blocks of at least 16.
    in_kernels = DEVICE == "cuda" and call["select"] == "query" and call["block_size"] >= 16
    assert len(taken) == (1 if in_kernels else 2)
    wide = [side.detach().double().requires_grad_() for side in inputs]
    exact = run(wide, {name: side.double() for name, side in numbers.items()}, options)
    for place, sides in enumerate(zip(found[:4], exact[:4], plain[:4], strict=True)):
        backward, name = place > 0, ("output", "dq", "dk", "dv")[place]
        assert_close(*sides, backward=backward, what=name)
        assert_close(sides[2], sides[1], backward=backward, what=name)
    for one, other in zip(found[4:], exact[4:], strict=True):
        torch.testing.assert_close(one.double(), other, atol=0.05, rtol=0.02)


def test_a_sample_of_padding_and_nan_in_padding(taken):
    inputs, numbers, options = inputs_of(CALLS[1])
    mask = holes(70)
    mask[0] = False
    bad = [torch.where(mask[:, None, :, None], side, torch.nan) for side in inputs]
    bad = [side.detach().requires_grad_() for side in bad]
    zeroed = [torch.where(mask[:, None, :, None], side, 0.0) for side in inputs]
    zeroed = [side.detach().requires_grad_() for side in zeroed]
    found = run(bad, numbers, options | {"key_mask": mask})
    clean = run(zeroed, numbers, options | {"key_mask": mask})
    assert taken
    rows = mask[:, None, :].expand(2, 2, -1)
    assert torch.equal(found[0][rows], clean[0][rows])
    assert (clean[0][0] == 0).all()
    assert all(side.isfinite().all() for side in clean)


def test_gradients_of_gradients_and_batched_ones(taken):
    inputs, numbers, options = inputs_of(
        {"tokens": 40, "block_size": 8, "keys": 4, "select": "query"}
    )

    def curvature(dtype):
        sides = [side.detach().to(dtype).requires_grad_() for side in inputs]
        own = {name: side.detach().to(dtype) for name, side in numbers.items()}
        out = lln.lln_keys_attention(*sides, **own, **options)
        grads = torch.autograd.grad(out.square().sum(), sides, create_graph=True)
        return torch.autograd.grad(sum(side.square().sum() for side in grads), sides)

    for one, other in zip(curvature(torch.float32), curvature(torch.float64), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-2, rtol=1e-3)
    assert taken
    out = lln.lln_keys_attention(*inputs, **numbers, **options)
    upstream = torch.randn(3, *out.shape, device=DEVICE)
    several = torch.autograd.grad(out, inputs, upstream, retain_graph=True, is_grads_batched=True)
    for one, other in zip(several, torch.autograd.grad(out, inputs, upstream[1]), strict=True):
        torch.testing.assert_close(one[1], other, atol=1e-4, rtol=1e-4)


def test_what_it_does_not_compute_goes_another_way(taken, monkeypatch):
    inputs, numbers, options = inputs_of(CALLS[0])
    run(inputs, numbers, options | {"is_causal": True})
    wide = [side.detach().double().requires_grad_() for side in inputs]
    run(wide, numbers, options)
    run(inputs, numbers, options | {"select": "block", "group_size": 2})
    # All scores of a long sequence take longer than a few keys: 64 + 16 against 16 + 8 + 16.
    prepared_calls.clear()
    monkeypatch.setattr(masked_keys, "SCORES_PER_ROW", 1.9)
    run(inputs, numbers, options)
    assert not taken
    prepared_calls.clear()
    monkeypatch.setattr(masked_keys, "SCORES_PER_ROW", 2)
    run(inputs, numbers, options)
    assert taken


@pytest.mark.slow
def test_forward_mode_goes_another_way(taken):
    inputs, numbers, options = inputs_of(CALLS[0])
    with forward_ad.dual_level():
        query = forward_ad.make_dual(inputs[0].detach(), torch.ones_like(inputs[0]))
        out = lln.lln_keys_attention(query, *inputs[1:], **numbers, **options)
        assert forward_ad.unpack_dual(out).tangent is not None
    assert not taken


def test_it_agrees_with_the_reference(taken):
    inputs, numbers, options = inputs_of(CALLS[0])
    found = lln.lln_keys_attention(*inputs, **numbers, **options)
    expected = lln.lln_keys_attention(*inputs, **numbers, **options | {"impl": "reference"})
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_bits_repeat(taken):
    inputs, numbers, options = inputs_of(CALLS[2] | {"tokens": 300})
    once, again = (run(inputs, numbers, options) for _ in range(2))
    assert taken
    assert all(torch.equal(*sides) for sides in zip(once, again, strict=True))
