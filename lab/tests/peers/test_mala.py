"""MALA against its formula, row by row."""

import pytest
import torch
from lab.tests.peers.contract import build


def row(q, keys, values):
    """One output of the paper's equation, for the keys a query sees."""

    def features(x):
        return torch.where(x > 0, x + 1, x.exp())

    n, width = keys.shape
    scores = features(keys) @ features(q) / (n * width**0.5)
    z = scores.sum()
    weights = (1 + 1 / z) * scores - z / n
    assert weights.sum().item() == pytest.approx(1.0)
    return weights @ values


@pytest.mark.parametrize("causal", [False, True])
def test_each_row_follows_the_equation(causal):
    core = build("mala", is_causal=causal).core
    query, key, value = torch.randn(3, 2, 2, 70, 16, dtype=torch.float64)
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[1, 66:] = False
    found = core(query, key, value, mask)
    for sample in range(2):
        for head in range(2):
            for i in (0, 5, 64, 65):
                seen = mask[sample].clone()
                if causal:
                    seen[i + 1 :] = False
                expected = row(
                    query[sample, head, i], key[sample, head, seen], value[sample, head, seen]
                )
                torch.testing.assert_close(found[sample, head, i], expected)


def test_rows_sum_to_one_and_have_negative_entries():
    query, key, _ = torch.randn(3, 1, 2, 40, 16, dtype=torch.float64)
    matrix = build("mala").core.matrix(query, key)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(1, 2, 40, dtype=torch.float64))
    assert (matrix < 0).any()


def test_a_longer_query_sharpens_its_row():
    query, key, _ = torch.randn(3, 1, 2, 40, 16, dtype=torch.float64)
    core = build("mala").core
    spreads = [core.matrix(a * query, key).std(-1).mean() for a in (0.5, 1, 2, 4)]
    assert spreads == sorted(spreads)
