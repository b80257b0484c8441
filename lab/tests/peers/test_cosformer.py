"""cosFormer against its formula, with the cosine of the distance written out."""

import math

import pytest
import torch
from lab.tests.peers.contract import MAX_LEN, build


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [7, MAX_LEN])
def test_agrees_with_the_cosine_of_the_distance(length, causal):
    query, key, value = torch.randn(3, 2, 2, length, 16, dtype=torch.float64)
    i, j = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
    cosine = torch.cos((i - j).double() * math.pi / 2 / MAX_LEN)
    weights = query.clamp(min=0) @ key.clamp(min=0).mT * cosine
    if causal:
        weights = weights.tril()
    expected = weights / weights.sum(-1, keepdim=True) @ value
    found = build("cosformer", is_causal=causal).core(query, key, value)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def test_near_tokens_weigh_more_than_far_ones():
    core = build("cosformer").core
    alike = torch.ones(1, 2, MAX_LEN, 16, dtype=torch.float64)
    first = core.matrix(alike, alike)[0, 0, 0]
    assert (first.diff() < 0).all()
    # The last token is one step short of a right angle away.
    assert first[-1] / first[0] == pytest.approx(math.sin(math.pi / 2 / MAX_LEN))


def test_a_dead_row_is_zero():
    query, key, value = torch.randn(3, 1, 2, 9, 16, dtype=torch.float64)
    query[0, 0, 4] = -query[0, 0, 4].abs()
    assert (build("cosformer").core(query, key, value)[0, 0, 4] == 0).all()
