"""Softmax inside blocks in one step: the numbers and gradients of the many steps it replaces."""

import pytest
import torch

from lln.eager import block_flash, block_softmax, diagonal, products
from lln.eager.diagonal import attend_blocks

MASKS = pytest.mark.parametrize("masked", [False, True])
CAUSAL = pytest.mark.parametrize("is_causal", [False, True])


@pytest.fixture(params=["products", "fused"], autouse=True)
def way(request, monkeypatch):
    """How blocks without a mask are computed, whatever this machine would choose."""
    fused = request.param == "fused"
    # In float64 too, where roundings do not hide a wrong formula.
    monkeypatch.setattr(block_flash, "suits", lambda query, value: fused)
    return request.param


def blocks(way, dtype=torch.float64, transposed=False, seed=0):
    """Query, key and value: two samples of two heads with three blocks of eight tokens."""
    torch.manual_seed(seed)
    sides = []
    # Fused attention takes values as wide as keys only.
    for width in (4, 4, 4 if way == "fused" else 5):
        side = torch.randn(2, 3, 8, 2, width, dtype=dtype)
        side = side.movedim(3, 1) if transposed else side.movedim(3, 1).contiguous()
        sides.append(side.requires_grad_())
    return sides


def mask_of(masked):
    """Some tokens masked, and one block wholly."""
    if not masked:
        return None
    mask = torch.rand(2, 1, 3, 8, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0, 0, 1] = False
    return mask


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
    """Which calls went through one step, and by which way."""
    calls = []

    def counted(name, own):
        class Counted:
            @staticmethod
            def apply(*given):
                calls.append(name)
                return own.apply(*given)

        return Counted

    fused = counted("fused", block_flash.BlockFlash)
    monkeypatch.setattr(block_flash, "BlockFlash", fused)
    monkeypatch.setattr(diagonal, "BlockSoftmax", counted("products", block_softmax.BlockSoftmax))
    return calls


@MASKS
@CAUSAL
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("takes_transposed", [False, True])
def test_output_and_gradients(
    way, masked, is_causal, transposed, takes_transposed, steps, taken, monkeypatch
):
    monkeypatch.setattr(products, "_TAKES_TRANSPOSED", takes_transposed)
    options = {"token_mask": mask_of(masked), "is_causal": is_causal, "scale": 0.3}
    sides = blocks(way, transposed=transposed)
    found = attend_blocks(*sides, **options)
    # Fused attention takes no mask.
    assert taken == ["products" if masked else way]
    expected = steps(*sides, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    # As autograd gives it for a sum: one number, expanded.
    for gradient in (torch.randn_like(found), torch.ones((), dtype=found.dtype).expand_as(found)):
        ours = torch.autograd.grad(found, sides, gradient, retain_graph=True)
        theirs = torch.autograd.grad(expected, sides, gradient, retain_graph=True)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
    if masked:
        assert not found[0, :, 1].any()


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_the_gradients_that_are_needed(way, wanted, steps):
    sides = [side.detach() for side in blocks(way)]
    leaves = [sides[place].requires_grad_() for place in wanted]
    ours = torch.autograd.grad(attend_blocks(*sides).square().sum(), leaves)
    theirs = torch.autograd.grad(steps(*sides).square().sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


@MASKS
@CAUSAL
def test_second_derivatives(way, masked, is_causal):
    mask = mask_of(masked)
    sides = [side[:1, :1, :2].detach().requires_grad_() for side in blocks(way)]
    options = {"token_mask": None if mask is None else mask[:1, :, :2], "is_causal": is_causal}
    torch.autograd.gradgradcheck(lambda *given: attend_blocks(*given, **options), sides)


def test_gradients_in_batches(way):
    sides = blocks(way)
    out = attend_blocks(*sides)
    several = torch.randn(3, *out.shape, dtype=out.dtype)
    at_once = torch.autograd.grad(out, sides, several, retain_graph=True, is_grads_batched=True)
    for place, gradient in enumerate(several):
        alone = torch.autograd.grad(out, sides, gradient, retain_graph=True)
        for one, other in zip(at_once, alone, strict=True):
            torch.testing.assert_close(one[place], other, rtol=0, atol=1e-13)


def test_whoever_traces_sees_the_steps(way, taken):
    sides = [side.detach() for side in blocks(way)]
    expected = attend_blocks(*sides)
    assert taken == [way]
    mapped = torch.vmap(attend_blocks)(*sides)
    torch.testing.assert_close(mapped, expected, rtol=0, atol=1e-14)
    _, tangent = torch.func.jvp(attend_blocks, tuple(sides), tuple(sides))
    assert tangent.isfinite().all()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(sides[0], sides[1])
        out = attend_blocks(dual, *sides[1:])
        assert torch.autograd.forward_ad.unpack_dual(out).tangent is not None
    attend_blocks(*(side.to("meta") for side in sides))
    assert taken == [way]


@CAUSAL
def test_float32(way, is_causal, steps):
    sides = blocks(way, torch.float32)
    wide = [side.detach().double().requires_grad_() for side in sides]
    out, exact = attend_blocks(*sides, is_causal=is_causal), steps(*wide, is_causal=is_causal)
    found = (out, *torch.autograd.grad(out.square().sum(), sides))
    expected = (exact, *torch.autograd.grad(exact.square().sum(), wide))
    for one, other in zip(found, expected, strict=True):
        largest = other.abs().max().item()
        # Over 200 seeds at most 9.3 roundings of the largest number.
        assert (one - other).abs().max().item() < 32 * torch.finfo(torch.float32).eps * largest


def test_what_fused_attention_suits(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(block_flash, "_IS_FASTER", True)
    side = torch.ones(2, 8, 4)
    assert block_flash.suits(side, side)
    # Other widths of values are not known to fused attention; float64 is the reference's.
    assert not block_flash.suits(side, torch.ones(2, 8, 5))
    assert not block_flash.suits(side.double(), side.double())
    monkeypatch.setattr(block_flash, "_IS_FASTER", False)
    assert not block_flash.suits(side, side)
