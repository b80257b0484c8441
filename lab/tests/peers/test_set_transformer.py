"""Set Transformer against its equations with a loop over heads and tokens."""

import math

import pytest
import torch
from lab.tests.peers.contract import HEADS, WIDTH, build, some_padding, tokens

from lln.errors import InvalidInputError
from lln_lab import peers


def norm(part, x):
    centred = x - x.mean()
    return part.weight * centred / (centred.square().mean() + 1e-5).sqrt() + part.bias


def apply(part, x):
    return part.weight @ x + part.bias


def block(part, xs, ys):
    """MAB(X, Y), one row of X at a time."""
    width = WIDTH // HEADS
    keys = torch.stack([apply(part.key, y) for y in ys])
    values = torch.stack([apply(part.value, y) for y in ys])
    rows = []
    for x in xs:
        query, heads = apply(part.query, x), []
        for head in range(HEADS):
            own = slice(head * width, (head + 1) * width)
            weights = (keys[:, own] @ query[own] / math.sqrt(width)).softmax(0)
            heads.append(weights @ values[:, own])
        hidden = norm(part.norm_attention, x + apply(part.out, torch.cat(heads)))
        rows.append(norm(part.norm_out, hidden + apply(part.feed_forward, hidden).clamp_min(0)))
    return torch.stack(rows)


@torch.no_grad()
def test_agrees_with_its_equations():
    layer, x, mask = build("set_transformer", points=5), tokens(length=17), some_padding(17)
    found = layer(x, mask)
    for sample in range(2):
        real = x[sample][mask[sample]]
        expected = block(layer.spread, real, block(layer.gather, layer.points, real))
        torch.testing.assert_close(found[sample][mask[sample]], expected)


def test_parameters_are_those_of_the_card():
    layer = build("set_transformer", points=5)
    each = 5 * (WIDTH * WIDTH + WIDTH) + 4 * WIDTH
    assert peers.parameter_count(layer) == 2 * each + 5 * WIDTH


def test_points_must_be_some():
    with pytest.raises(InvalidInputError, match="points"):
        build("set_transformer", points=0)
