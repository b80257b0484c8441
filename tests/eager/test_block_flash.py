"""Blocks by fused attention: the numbers and gradients of the many steps it replaces."""

import pytest
import torch

from lln.eager import block_flash, diagonal
from lln.eager.diagonal import attend_blocks

CAUSAL = pytest.mark.parametrize("is_causal", [False, True])


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Also with MKL, and in float64, where roundings do not hide a wrong formula."""
    monkeypatch.setattr(block_flash, "suits", lambda query, value: True)


@pytest.fixture
def steps(monkeypatch):
    """The same by steps."""

    def attend(*sides, **options):
        with monkeypatch.context() as without:
            without.setattr(diagonal, "is_untraced_on_cpu", lambda *sides: False)
            return attend_blocks(*sides, **options)

    return attend


@pytest.fixture
def taken(monkeypatch):
    """How many calls went through fused attention."""
    calls = []
    own = block_flash.BlockFlash.apply

    class Counted:
        @staticmethod
        def apply(*given):
            calls.append(given)
            return own(*given)

    monkeypatch.setattr(block_flash, "BlockFlash", Counted)
    return calls


def blocks(dtype=torch.float64, transposed=False):
    """Query, key and value: two samples of two heads with three blocks of eight tokens."""
    generator = torch.Generator().manual_seed(0)
    sides = []
    for _ in range(3):
        side = torch.randn(2, 3, 8, 2, 4, generator=generator, dtype=torch.float64).to(dtype)
        side = side.movedim(3, 1) if transposed else side.movedim(3, 1).contiguous()
        sides.append(side.requires_grad_())
    return sides


@CAUSAL
@pytest.mark.parametrize("transposed", [False, True])
def test_output_and_gradients(is_causal, transposed, steps, taken):
    options = {"is_causal": is_causal, "scale": 0.3}
    sides = blocks(transposed=transposed)
    found, expected = attend_blocks(*sides, **options), steps(*sides, **options)
    assert len(taken) == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    for gradient in (torch.randn_like(found), torch.ones((), dtype=found.dtype).expand_as(found)):
        ours = torch.autograd.grad(found, sides, gradient, retain_graph=True)
        theirs = torch.autograd.grad(expected, sides, gradient, retain_graph=True)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_the_gradients_that_are_needed(wanted, steps):
    sides = [side.detach() for side in blocks()]
    leaves = [sides[place].requires_grad_() for place in wanted]
    ours = torch.autograd.grad(attend_blocks(*sides).square().sum(), leaves)
    theirs = torch.autograd.grad(steps(*sides).square().sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


@CAUSAL
def test_second_derivatives(is_causal):
    sides = [side[:1, :1, :2].detach().requires_grad_() for side in blocks()]
    torch.autograd.gradgradcheck(lambda *given: attend_blocks(*given, is_causal=is_causal), sides)


def test_gradients_in_batches():
    sides = blocks()
    out = attend_blocks(*sides)
    several = torch.randn(3, *out.shape, dtype=out.dtype)
    at_once = torch.autograd.grad(out, sides, several, retain_graph=True, is_grads_batched=True)
    for place, gradient in enumerate(several):
        alone = torch.autograd.grad(out, sides, gradient, retain_graph=True)
        for one, other in zip(at_once, alone, strict=True):
            torch.testing.assert_close(one[place], other, rtol=0, atol=1e-13)


def test_masks_and_tracers_go_the_other_way(taken):
    sides = [side.detach() for side in blocks()]
    mask = torch.ones(2, 1, 3, 8, dtype=torch.bool)
    expected = attend_blocks(*sides, token_mask=mask)
    mapped = torch.vmap(attend_blocks)(*sides)
    assert not taken
    torch.testing.assert_close(attend_blocks(*sides), expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(mapped, expected, rtol=0, atol=1e-14)
    assert len(taken) == 1


@CAUSAL
def test_float32(is_causal, steps):
    sides = blocks(torch.float32)
    wide = [side.detach().double().requires_grad_() for side in sides]
    out, exact = attend_blocks(*sides, is_causal=is_causal), steps(*wide, is_causal=is_causal)
    found = (out, *torch.autograd.grad(out.square().sum(), sides))
    expected = (exact, *torch.autograd.grad(exact.square().sum(), wide))
    for one, other in zip(found, expected, strict=True):
        largest = other.abs().max().item()
        assert (one - other).abs().max().item() < 32 * torch.finfo(torch.float32).eps * largest


def test_what_it_suits(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(block_flash, "_IS_FASTER", True)
    side = torch.ones(2, 8, 4)
    assert block_flash.suits(side, side)
    # Other widths of values are not known to fused attention; float64 is the reference's.
    assert not block_flash.suits(side, torch.ones(2, 8, 5))
    assert not block_flash.suits(side.double(), side.double())
    monkeypatch.setattr(block_flash, "_IS_FASTER", False)
    assert not block_flash.suits(side, side)
