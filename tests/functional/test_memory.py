"""Memory grows linearly with the number of tokens; no N×N tensor exists anywhere."""

import math

import numpy as np
import pytest
import torch
from tests.memory import peak_bytes

import lln

# A matrix of N² float32 is 128 units at the first length (see `units`) and 4,096 at the last, where
# it would take 64 GiB.
TOKENS = (1 << 12, 1 << 14, 1 << 17)
WIDTH = 32
MOST_UNITS = 40
FIXED = {"alpha": 1.5, "beta": 1.5}

CASES = {
    "lln": lambda dense, packed, n: lln.lln_attention(*dense),
    "diag": lambda dense, packed, n: lln.lln_diag_attention(*dense, block_size=64),
    "masked": lambda dense, packed, n: lln.lln_diag_attention(
        *dense, block_size=64, key_mask=torch.ones(1, n) > 0
    ),
    "window": lambda dense, packed, n: lln.window_attention(
        *dense, window=16, key_mask=torch.ones(1, n) > 0
    ),
    "window_varlen": lambda dense, packed, n: lln.window_attention_varlen(
        *packed, torch.tensor([0, 5, n // 2, n]), window=16
    ),
    "causal": lambda dense, packed, n: lln.lln_attention(*dense, **FIXED, is_causal=True),
    "varlen": lambda dense, packed, n: lln.lln_diag_attention_varlen(
        *packed, torch.tensor([0, 5, n // 2, n])
    ),
    "causal_varlen": lambda dense, packed, n: lln.lln_attention_varlen(
        *packed, torch.arange(0, n + 1, 512), **FIXED, is_causal=True
    ),
}


@pytest.fixture(autouse=True)
def _one_thread():
    """Every thread would have buffers of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def units(case, tokens):
    """Peak of forward and backward in units of one of query, key, value."""
    leaf = torch.randn(3, tokens, WIDTH, requires_grad=True)
    dense, packed = leaf[:, None, None].unbind(), leaf[:, :, None].unbind()
    peak = peak_bytes(lambda: case(dense, packed, tokens).square().sum().backward())
    assert leaf.grad.isfinite().all()
    return peak / dense[0].nbytes


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] * name.startswith("causal"))
        for name, case in CASES.items()
    ],
)
def test_peak_memory_is_linear_in_the_number_of_tokens(case):
    found = []
    for tokens in TOKENS:
        found.append(units(case, tokens))
        # A fixed number of them, not one that grows.
        assert found[-1] < MOST_UNITS, found
    # The exponent of growth over a factor of 8; 2 for anything square.
    growth = 1 + math.log(found[-1] / found[-2]) / math.log(TOKENS[-1] / TOKENS[-2])
    assert growth < 1.1, found


def test_a_square_matrix_is_seen():
    def softmax(dense, packed, n):
        query, key, value = (side[0, 0] for side in dense)
        return torch.softmax(query @ key.mT, -1) @ value

    square = TOKENS[0] / WIDTH
    assert units(softmax, TOKENS[0]) > 2 * square > MOST_UNITS


def test_what_operators_and_gradients_hold_for_a_moment_is_seen():
    leaf = torch.randn(1000, requires_grad=True)

    class Wasteful(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, upstream):
            torch.empty(1 << 20)
            return upstream

    out = Wasteful.apply(leaf)
    assert peak_bytes(lambda: out.sum().backward()) >= 4 << 20
    # The operator writes 8 bytes and sorts a copy.
    numbers = torch.randn(1 << 20)
    assert peak_bytes(numbers.median) >= 4 << 20
    assert peak_bytes(lambda: np.zeros(1 << 20)) >= 8 << 20
    assert peak_bytes(lambda: None) < 1 << 12
