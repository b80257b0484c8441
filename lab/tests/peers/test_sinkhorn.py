"""Sinkhorn attention against its equations, block by block, outside of logarithms."""

import math

import pytest
import torch
from lab.tests.peers.contract import HEADS, WIDTH, build, some_padding, tokens

from lln.errors import InvalidInputError
from lln_lab import peers


def linear(part, x):
    return x @ part.weight.T + part.bias


def sort(layer, x, head):
    """S of one head for the used blocks only, x without its padding."""
    blocks = [x[i : i + layer.block_size] for i in range(0, len(x), layer.block_size)]
    most = layer.sort_out.out_features // HEADS
    rows = []
    for block in blocks:
        hidden = linear(layer.sort_hidden, block.sum(0)).clamp_min(0)
        rows.append(linear(layer.sort_out, hidden)[head * most : head * most + len(blocks)])
    matrix = (torch.stack(rows) / layer.temperature).exp()
    for _ in range(layer.iterations):
        matrix = matrix / matrix.sum(1, keepdim=True)
        matrix = matrix / matrix.sum(0, keepdim=True)
    return matrix


def loop(layer, x):
    """One sequence of real tokens, a query at a time."""
    size, width, out = layer.block_size, WIDTH // HEADS, torch.zeros_like(x)
    query, key, value = (linear(part, x) for part in (layer.query, layer.key, layer.value))
    for head in range(HEADS):
        own = slice(head * width, (head + 1) * width)
        order = sort(layer, x, head)
        for i in range(len(x)):
            block = i // size
            mine = [j for j in range(len(x)) if j // size == block]
            keys, values = [key[j, own] for j in mine], [value[j, own] for j in mine]
            for offset in range(min(size, len(x))):
                there = [j for j in range(len(x)) if j % size == offset]
                keys.append(sum(order[block, j // size] * key[j, own] for j in there))
                values.append(sum(order[block, j // size] * value[j, own] for j in there))
            weights = (torch.stack(keys) @ query[i, own] / math.sqrt(width)).softmax(0)
            out[i, own] = weights @ torch.stack(values)
    return linear(layer.out, out)


@pytest.mark.parametrize("length", [1, 5, 8, 16, 27])
@torch.no_grad()
def test_agrees_with_its_equations(length):
    layer, x = build("sinkhorn"), tokens(length=length)
    mask = some_padding(length) if length > 7 else torch.ones(2, length, dtype=torch.bool)
    found = layer(x, mask)
    for sample in range(2):
        expected = loop(layer, x[sample][mask[sample]])
        torch.testing.assert_close(found[sample][mask[sample]], expected)


def test_the_order_is_doubly_stochastic_after_many_iterations():
    layer = build("sinkhorn", iterations=200)
    x = tokens(length=40).unflatten(1, (5, 8))
    used = torch.tensor([[True] * 5, [True, True, False, True, False]])
    order = layer.sorting(x, used)
    ones = used[:, None].expand(-1, HEADS, -1).to(order)
    torch.testing.assert_close(order.sum(-1), ones, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(order.sum(-2), ones, rtol=1e-6, atol=1e-6)


def test_noise_in_training_only():
    layer, x = build("sinkhorn"), tokens()
    assert torch.equal(layer(x), layer(x))
    layer.train()
    torch.manual_seed(0)
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(layer(x), first)


def test_the_noise_is_gumbel():
    layer = build("sinkhorn", iterations=1, temperature=1.0)
    with torch.no_grad():
        layer.sort_out.weight.zero_()
        layer.sort_out.bias.zero_()
    layer.train()
    torch.manual_seed(0)
    blocks, used = torch.zeros(4000, 3, 8, WIDTH).double(), torch.ones(4000, 3, dtype=torch.bool)
    order = layer.sorting(blocks, used)
    # Three blocks: of two, noise and its negative would give the same distribution.
    noise = -(-torch.rand(20000, 3, 3).double().log()).log()
    rows = noise.softmax(-1)
    expected = rows / rows.sum(-2, keepdim=True)
    quantiles = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9], dtype=torch.float64)
    torch.testing.assert_close(
        order[..., 0, 0].flatten().quantile(quantiles),
        expected[..., 0, 0].quantile(quantiles),
        rtol=0,
        atol=0.02,
    )


def test_one_block_sees_itself_twice():
    """With a single block S = 1: every key is doubled, which is softmax attention."""
    layer, x = build("sinkhorn", block_size=64), tokens(length=20)
    query, key, value = (
        linear(part, x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for part in (layer.query, layer.key, layer.value)
    )
    plain = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    expected = linear(layer.out, plain.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected)


def test_parameters_are_those_of_the_card():
    own = WIDTH * WIDTH + WIDTH + (WIDTH + 1) * HEADS * 12
    assert peers.parameter_count(build("sinkhorn")) == 4 * (WIDTH * WIDTH + WIDTH) + own


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_size": 0}, "block_size"),
        ({"iterations": 0}, "iterations"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(InvalidInputError, match=said):
        build("sinkhorn", **options)
