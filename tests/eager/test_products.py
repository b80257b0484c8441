"""Products without MKL: no right operand is a transposed view, and gradients are right."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lln
from lln.eager import products

CALLS = {
    "lln": lln.lln_attention,
    "lln_diag": lln.lln_diag_attention,
    "lln_keys": lambda *sides: lln.lln_keys_attention(*sides, keys=16, block_size=16),
    "lln causal": lambda *sides: lln.lln_attention(*sides, alpha=2.0, beta=2.0, is_causal=True),
    "diag": lambda *sides: lln.block_diagonal_attention(*sides, block_size=16),
}


class Transposed(TorchDispatchMode):
    """Counts products by the layout of their right operand."""

    def __init__(self):
        super().__init__()
        self.products = self.transposed = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            right = [side for side in arguments if isinstance(side, Tensor)][-1]
            self.products += 1
            self.transposed += right.stride(-1) != 1 and min(right.shape[-2:]) > 1
        return function(*arguments, **(options or {}))


@pytest.fixture
def without_mkl(monkeypatch):
    monkeypatch.setattr(products, "_TAKES_TRANSPOSED", False)


@pytest.mark.parametrize("name", CALLS)
def test_no_product_has_a_transposed_right_operand(name, without_mkl):
    sides = [torch.randn(2, 3, 64, 8, requires_grad=True) for _ in range(3)]
    with Transposed() as seen:
        CALLS[name](*sides).square().sum().backward()
    assert seen.products > 2
    assert seen.transposed == 0


def test_transposed_operands_are_counted():
    left, right = torch.ones(2, 3, 4), torch.ones(2, 5, 4)
    with Transposed() as seen:
        left @ right.mT
        left @ right.mT.contiguous()
    assert (seen.products, seen.transposed) == (2, 1)


@pytest.mark.parametrize("shapes", [((2, 3, 4), (2, 4, 5)), ((2, 5, 4), (2, 4, 2))])
def test_gradients_of_products(shapes, without_mkl):
    # The first gradient is smaller than the right operand, the second one larger.
    generator = torch.Generator().manual_seed(0)
    sides = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]
    assert torch.autograd.gradcheck(products.multiply, sides, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(products.multiply, sides)
    assert torch.equal(products.multiply(*sides), sides[0] @ sides[1])
