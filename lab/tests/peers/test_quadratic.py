"""Quadratic attention against its formula."""

import pytest
import torch
from lab.tests.peers.contract import build

from lln_lab.peers.quadratic import outer_features


def heads(length=40):
    return torch.randn(3, 2, 2, length, 16, dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_agrees_with_the_kernel_written_out(exact, causal):
    query, key, value = heads(70)
    if exact:
        weights = torch.einsum("bhic,bhjc->bhij", query, key) ** 2
    else:
        weights = torch.einsum("bhic,bhic,bhjc,bhjc->bhij", query, query, key, key)
    if causal:
        weights = weights.tril()
    expected = weights / weights.sum(-1, keepdim=True) @ value
    found = build("quadratic", exact=exact, is_causal=causal).core(query, key, value)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_the_exact_map_has_half_the_outer_product():
    query, key = torch.randn(2, 5, 16, dtype=torch.float64)
    features = outer_features(query)
    assert features.shape == (5, 16 * 17 // 2)
    product = (features * outer_features(key)).sum(-1)
    torch.testing.assert_close(product, (query * key).sum(-1) ** 2)
