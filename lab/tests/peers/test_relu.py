"""ReLU attention against its formula."""

import pytest
import torch
from lab.tests.peers.contract import build


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_each_row_is_a_weighted_mean(dense, causal):
    core = build("relu", dense=dense, is_causal=causal).core
    query, key, value = torch.randn(3, 2, 2, 9, 16, dtype=torch.float64)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    found = core(query, key, value, mask)
    for sample, head, i in torch.cartesian_prod(*map(torch.arange, (2, 2, 9))).tolist():
        last = i + 1 if causal else 9
        seen = [j for j in range(last) if mask[sample, j]]
        q = query[sample, head, i]
        weights = []
        for j in seen:
            k = key[sample, head, j]
            product = (q @ k).clamp(min=0) if dense else q.clamp(min=0) @ k.clamp(min=0)
            weights.append(product)
        weights = torch.stack(weights)
        expected = weights @ value[sample, head, seen] / weights.sum().clamp(min=1e-24)
        torch.testing.assert_close(found[sample, head, i], expected)


@pytest.mark.parametrize("dense", [False, True])
def test_a_dead_row_is_zero_and_counts_as_such(dense):
    core = build("relu", dense=dense).core
    query, key, value = torch.randn(3, 1, 2, 9, 16, dtype=torch.float64)
    key = key.abs()
    query[0, 0, 4] = -query[0, 0, 4].abs()
    assert (core(query, key, value)[0, 0, 4] == 0).all()
    assert core.matrix(query, key)[0, 0].sum(-1)[4] == 0


def test_half_precision_inputs_are_summed_in_float32():
    core = build("relu", dense=True).core
    query, key, value = torch.randn(3, 1, 2, 300, 16).to(torch.bfloat16)
    found = core(query, key, value)
    assert found.dtype == torch.bfloat16
    expected = core(query.double(), key.double(), value.double())
    torch.testing.assert_close(found.double(), expected, rtol=0.01, atol=1e-3)
