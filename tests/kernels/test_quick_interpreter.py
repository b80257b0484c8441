"""The interpreter that works quickly still knows shapes and types."""

import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.common import ON_GPU
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.skipif(ON_GPU, reason="nothing is interpreted on a GPU")


@triton.jit
def spread(row, column, out, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    sides = tl.load(row + rows)[:, None] + tl.load(column + columns)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], sides * 2)


@triton.jit
def disagree(row, column, M: tl.constexpr, N: tl.constexpr):
    tl.store(row, tl.sum(tl.load(row + tl.arange(0, M)) + tl.load(column + tl.arange(0, N))))


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (4, 4), (1, 2)])
def test_shapes_are_spread_or_refused(sizes):
    row, column = torch.randn(sizes[0]), torch.randn(sizes[1])
    out = torch.empty(sizes)
    spread[(1,)](row, column, out, *sizes)
    assert torch.equal(out, 2 * (row[:, None] + column))
    if 1 not in sizes and sizes[0] != sizes[1]:
        with pytest.raises(InterpreterError, match="incompatible dimensions"):
            disagree[(1,)](row, column, *sizes)


@triton.jit
def round_off(number, whole, half, N: tl.constexpr):
    place = tl.arange(0, N)
    found = tl.load(number + place)
    tl.store(whole + place, found.to(tl.int32))
    tl.store(half + place, found.to(tl.float16) * 2)


def test_types_of_one_shape_are_told_apart():
    number = torch.tensor([1.7, -2.3, 0.1, 9.0])
    whole, half = number.int().zero_(), number.half().zero_()
    round_off[(1,)](number, whole, half, 4)
    assert whole.tolist() == [1, -2, 0, 9]
    assert torch.equal(half, number.half() * 2)
