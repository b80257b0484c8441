"""Moments and matched temperatures by the kernel, against the same statistics in float64."""

import pytest
import torch
from tests.kernels.common import DEVICE, DTYPES, holes

from lln.functional.match import match_inputs
from lln.kernels.moments.moment_ops import fused_moments
from lln.testing import make_qkv

# What float32 sums of a few thousand terms can differ by.
CLOSE = {"rtol": 2e-6, "atol": 0.0}


def expected_of(query, key, criterion, mask=None):
    return [side.float() for side in match_inputs(query, key, criterion, mask, "reference")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("criterion", ["variance", "entropy"])
def test_temperatures(dtype, criterion):
    query, key, _ = make_qkv(2, 4, 130, 24, key_heads=2, dtype=dtype, device=DEVICE)
    found = match_inputs(query, key, criterion, None, "triton")
    for one, other in zip(found, expected_of(query, key, criterion), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_masked_tokens_do_not_count():
    query, key, _ = make_qkv(2, 2, 70, 16, device=DEVICE)
    mask = holes(2, 70)
    hidden = ~mask[:, None, :, None]
    expected = expected_of(query, key, "entropy", mask)
    found = match_inputs(
        query.masked_fill(hidden, torch.nan),
        key.masked_fill(hidden, torch.inf),
        "entropy",
        mask,
        "triton",
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_a_large_mean_of_the_keys_costs_no_digits():
    query, key, _ = make_qkv(1, 2, 300, 16, device=DEVICE)
    key = key + 1000.0
    found = match_inputs(query, key, "variance", None, "triton")
    for one, other in zip(found, expected_of(query, key, "variance"), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_constant_heads_fall_back_to_one():
    query, key, _ = make_qkv(1, 2, 70, 16, device=DEVICE)
    key[:, 0] = 3.0
    query[:, 1] = 0.0
    alpha, beta = match_inputs(query, key, "variance", None, "triton")
    assert torch.equal(alpha, torch.ones_like(alpha))
    assert torch.equal(beta, torch.ones_like(beta))
    assert fused_moments(query, key, None, None, "variance", 0)[4].bool().all()


def test_nan_shows():
    query, key, _ = make_qkv(1, 2, 70, 16, device=DEVICE)
    query[0, 1, 3, 2] = torch.nan
    alpha, _ = match_inputs(query, key, "variance", None, "triton")
    assert alpha[0, 0].isfinite().all()
    assert alpha[0, 1].isnan().all()


def test_cross_attention_and_empty_sequences():
    query, key, _ = make_qkv(2, 2, 33, 16, keys=150, device=DEVICE)
    found = match_inputs(query, key, "entropy", None, "triton")
    for one, other in zip(found, expected_of(query, key, "entropy"), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    for tokens, keys in ((0, 5), (5, 0)):
        query, key, _ = make_qkv(2, 2, tokens, 16, keys=keys, device=DEVICE)
        alpha, beta = match_inputs(query, key, "variance", None, "triton")
        assert torch.equal(alpha, torch.ones_like(alpha))
        assert torch.equal(beta, torch.ones_like(beta))
