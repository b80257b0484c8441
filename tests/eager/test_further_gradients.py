"""Plain PyTorch's gradients of LLN, blocks and both: first, second and in batches."""

from functools import partial

import pytest
import torch

import lln
from lln.eager import products

KINDS = pytest.mark.parametrize("kind", ["lln", "diag", "lln_diag"])
SOME = torch.linspace(0.5, 1.5, 6).view(2, 3, 1, 1)
NUMBERS = {
    "numbers": (0.7, 1.3),
    "one entry": (torch.tensor(0.7), torch.full((1, 1, 1, 1), 1.3)),
    "heads": (SOME[:1], SOME[1:]),
    "samples and heads": (SOME, SOME[:, :1]),
}


BOTH = ("eager", "reference")


def attention(kind, query, key, value, alpha=0.7, beta=1.3, impl="eager", **options):
    """A call with blocks of 8 tokens, if it has blocks."""
    options["impl"] = impl
    if kind == "diag":
        return lln.block_diagonal_attention(query, key, value, block_size=8, **options)
    options |= {"alpha": alpha, "beta": beta}
    if kind == "lln":
        return lln.lln_attention(query, key, value, **options)
    return lln.lln_diag_attention(query, key, value, block_size=8, **options)


def sides_of(tokens=24, keys=None, transposed=False):
    """Query, key and value of two samples with three heads; values are wider than keys."""
    torch.manual_seed(0)
    sizes = ((tokens, 4), (keys or tokens, 4), (keys or tokens, 5))
    sides = []
    for length, width in sizes:
        side = torch.randn(2, length, 3, width, dtype=torch.float64).transpose(1, 2)
        sides.append((side if transposed else side.contiguous()).requires_grad_())
    return sides


def same(ours, theirs, atol=1e-13):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


@KINDS
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("takes_transposed", [False, True])
def test_output_and_gradients(kind, numbers, transposed, takes_transposed, monkeypatch):
    monkeypatch.setattr(products, "_TAKES_TRANSPOSED", takes_transposed)
    sides = sides_of(transposed=transposed)
    found = attention(kind, *sides, *NUMBERS[numbers])
    expected = attention(kind, *sides, *NUMBERS[numbers], impl="reference")
    same([found], [expected], atol=1e-14)
    with torch.no_grad():
        same([attention(kind, *sides, *NUMBERS[numbers])], [expected], atol=1e-14)
    # As autograd gives it for a sum: one number, expanded.
    for gradient in (torch.randn_like(found), torch.ones((), dtype=found.dtype).expand_as(found)):
        ours = torch.autograd.grad(found, sides, gradient, retain_graph=True)
        same(ours, torch.autograd.grad(expected, sides, gradient, retain_graph=True))


MASK = torch.rand(2, 24, generator=torch.Generator().manual_seed(1)) > 0.4
# One block has no key.
MASK[0, 8:16] = False


@KINDS
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_masked_and_causal_calls(kind, masked, is_causal):
    options = {"key_mask": MASK if masked else None, "is_causal": is_causal}
    sides = sides_of()
    found, expected = (attention(kind, *sides, impl=impl, **options) for impl in BOTH)
    same([found], [expected], atol=1e-14)
    gradient = torch.randn_like(found)
    same(*(torch.autograd.grad(out, sides, gradient) for out in (found, expected)), atol=1e-12)


@pytest.mark.parametrize("mix", [0.0, 0.25, 1.0, torch.full((3, 1, 1), 0.5)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_mix_and_scale(mix, scale):
    sides = sides_of(tokens=21)
    options = {"mix": mix, "scale": scale}
    found, expected = (attention("lln_diag", *sides, impl=impl, **options) for impl in BOTH)
    same([found], [expected], atol=1e-14)
    gradient = torch.randn_like(found)
    same(*(torch.autograd.grad(out, sides, gradient) for out in (found, expected)))


def test_other_lengths_of_keys():
    sides = sides_of(tokens=7, keys=19)
    found, expected = (attention("lln", *sides, impl=impl) for impl in BOTH)
    same([found], [expected], atol=1e-14)
    same(*(torch.autograd.grad(out.square().sum(), sides) for out in (found, expected)))


@KINDS
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_the_gradients_that_are_needed(kind, wanted):
    sides = [side.detach() for side in sides_of()]
    leaves = [sides[place].requires_grad_() for place in wanted]
    outs = [attention(kind, *sides, impl=impl).square().sum() for impl in BOTH]
    same(*(torch.autograd.grad(out, leaves) for out in outs))


@KINDS
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_second_derivatives(kind, masked, is_causal):
    options = {"key_mask": MASK[:1, :16] if masked else None, "is_causal": is_causal}
    sides = [side[:1, :1, :16].detach().requires_grad_() for side in sides_of()]
    # Every number of every side alone: `tests/functional/test_gradients.py`.
    attend = partial(attention, kind, **options)
    assert torch.autograd.gradgradcheck(attend, sides, fast_mode=True)


@KINDS
def test_gradients_in_batches(kind):
    sides = sides_of()
    out = attention(kind, *sides)
    several = torch.randn(3, *out.shape, dtype=out.dtype)
    at_once = torch.autograd.grad(out, sides, several, retain_graph=True, is_grads_batched=True)
    for place, gradient in enumerate(several):
        alone = torch.autograd.grad(out, sides, gradient, retain_graph=True)
        same((one[place] for one in at_once), alone)


@pytest.mark.parametrize("size", [1e4, 1e15])
def test_large_numbers_stay_finite(size):
    sides = [(size * side.detach()).float().requires_grad_() for side in sides_of()[:2]]
    sides.append(sides_of()[2].detach().float().requires_grad_())
    out = attention("lln_diag", *sides)
    gradients = torch.autograd.grad(out.sum(), sides)
    assert all(side.isfinite().all() for side in (out, *gradients))


@KINDS
def test_forward_mode(kind):
    sides = [side.detach() for side in sides_of()]
    out, tangent = torch.func.jvp(
        lambda *given: attention(kind, *given), tuple(sides), tuple(sides)
    )
    assert tangent.isfinite().all()
    same([out], [attention(kind, *sides)], atol=1e-14)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(sides[0], sides[0])
        out = attention(kind, dual, *sides[1:])
        assert torch.autograd.forward_ad.unpack_dual(out).tangent is not None
