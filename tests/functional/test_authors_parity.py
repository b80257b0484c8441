"""The 48 numbers that the authors' notebook prints, and the α, β behind them."""

import pytest
import torch

from lln import lln_diag_attention, match_moments

PRINTED_TO = 5e-5

BIDIRECTIONAL = [
    [
        [0.5032, 0.5248, -0.1797],
        [0.6414, 0.4807, -0.0756],
        [0.4694, 0.5255, -0.2264],
        [1.0657, 0.3068, 0.3656],
    ],
    [
        [-0.7917, -1.0734, -0.5935],
        [-0.7895, -1.1420, -0.6682],
        [-0.7662, -0.2344, -0.5392],
        [-0.4690, -0.7762, -0.9950],
    ],
]

CAUSAL = [
    [
        [-0.0933, 0.6871, -0.8383],
        [-0.0615, 0.7395, -0.6900],
        [0.1475, 0.6462, -0.5867],
        [1.0657, 0.3068, 0.3656],
    ],
    [
        [-0.8025, -1.2952, -0.7502],
        [-0.8238, -1.2323, -0.7327],
        [-0.9951, -0.3673, -0.3389],
        [-0.4690, -0.7762, -0.9950],
    ],
]


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return tuple(torch.randn(1, 2, 4, 3) for _ in range(3))


def assert_printed(found, printed):
    torch.testing.assert_close(found, torch.tensor(printed), rtol=0, atol=PRINTED_TO)


def test_alpha_and_beta(qkv):
    alpha, beta = match_moments(*qkv[:2], criterion="paper", scope="tensor")
    assert_printed(alpha.squeeze(), 2.0836)
    assert_printed(beta.squeeze(), 2.2115)


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_bidirectional(qkv, impl):
    out = lln_diag_attention(*qkv, matching="paper", block_size=3, impl=impl)
    assert_printed(out, [BIDIRECTIONAL])


def test_bidirectional_with_default_block(qkv):
    assert_printed(lln_diag_attention(*qkv, matching="paper"), [BIDIRECTIONAL])


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_causal(qkv, impl):
    alpha, beta = match_moments(*qkv[:2], criterion="paper", scope="tensor")
    out = lln_diag_attention(*qkv, alpha=alpha, beta=beta, block_size=3, is_causal=True, impl=impl)
    assert_printed(out, [CAUSAL])
