"""NaLaFormer against its formula."""

import math

import pytest
import torch
from lab.tests.peers.contract import build


def weight(q, k):
    """φ(q)·φ(k), channel by channel."""
    length = math.sqrt(sum(x * x for x in q))
    power = 3 * (0.5 + math.tanh(length))
    total = 0.0
    for x, y in zip(q, k, strict=True):
        if (x > 0) == (y > 0):
            total += (abs(x) / length) ** power * abs(y) ** 3
    return total


@pytest.mark.parametrize("causal", [False, True])
def test_each_weight_follows_the_equation(causal):
    query, key, _ = torch.randn(3, 1, 2, 7, 16, dtype=torch.float64)
    query = query * torch.linspace(0.01, 1, 7, dtype=torch.float64)[:, None]
    found = build("nalaformer", is_causal=causal).core.matrix(query, key)
    for head in range(2):
        for i in range(7):
            last = i + 1 if causal else 7
            q = query[0, head, i].tolist()
            weights = [weight(q, key[0, head, j].tolist()) for j in range(last)]
            row = torch.tensor(weights, dtype=torch.float64)
            torch.testing.assert_close(found[0, head, i, :last], row / row.sum())


def test_only_the_length_of_the_query_sets_the_sharpness():
    query, key, _ = torch.randn(3, 1, 2, 40, 16, dtype=torch.float64)
    core = build("nalaformer").core
    query = query / query.norm(dim=-1, keepdim=True)
    peaks = [core.matrix(a * query, key).amax(-1).mean() for a in (0.1, 0.5, 1, 2)]
    assert peaks == sorted(peaks)
    torch.testing.assert_close(core.matrix(query, 5 * key), core.matrix(query, key))


def test_a_query_of_zeros_has_finite_gradients():
    query, key, value = torch.randn(3, 1, 2, 5, 16, dtype=torch.float64)
    query[0, 0, 2] = 0
    query.requires_grad_()
    build("nalaformer").core(query, key, value).sum().backward()
    assert query.grad.isfinite().all()
