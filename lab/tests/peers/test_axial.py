"""Axial attention against two masked N×N attentions, one after the other."""

import math

import pytest
import torch
from lab.tests.peers.contract import HEADS, WIDTH, build, some_padding, tokens

from lln.errors import InvalidInputError
from lln_lab import peers


def dense(part, x, allowed):
    """Multi-head attention of one sequence under an N×N mask."""
    width, heads = WIDTH // HEADS, []
    query, key, value = (
        x @ side.weight.T + side.bias for side in (part.query, part.key, part.value)
    )
    for head in range(HEADS):
        own = slice(head * width, (head + 1) * width)
        scores = query[:, own] @ key[:, own].T / math.sqrt(width)
        heads.append(scores.masked_fill(~allowed, -math.inf).softmax(-1) @ value[:, own])
    return torch.cat(heads, -1) @ part.out.weight.T + part.out.bias


@pytest.mark.parametrize("length", [1, 5, 12, 21, 24])
@torch.no_grad()
def test_agrees_with_two_masked_attentions(length):
    layer, x = build("axial", max_len=24, shape=(4, 6)), tokens(length=length)
    mask = some_padding(length) if length > 7 else torch.ones(2, length, dtype=torch.bool)
    found = layer(x, mask)
    place = torch.arange(length)
    same_row = place[:, None] // 6 == place // 6
    same_column = place[:, None] % 6 == place % 6
    for sample in range(2):
        real = mask[sample]
        pairs = real[:, None] & real
        mine = torch.eye(length, dtype=torch.bool)
        rows = dense(layer.row, x[sample], (same_row & pairs) | mine)
        columns = dense(layer.column, x[sample] + rows, (same_column & pairs) | mine)
        torch.testing.assert_close(found[sample][real], (rows + columns)[real])
        if real.all():
            torch.testing.assert_close(layer(x[sample : sample + 1])[0], rows + columns)


@pytest.mark.parametrize(
    ("max_len", "shape"),
    [(1, (1, 1)), (2, (1, 2)), (16, (4, 4)), (97, (10, 10)), (512, (23, 23)), (1024, (32, 32))],
)
def test_the_default_grid_is_the_most_square_one(max_len, shape):
    assert build("axial", max_len=max_len).shape == shape
    assert math.prod(shape) >= max_len


def test_only_the_columns_decide():
    """Longer inputs than the grid add rows."""
    small, large = build("axial", shape=(10, 10)), build("axial", shape=(20, 10))
    x = tokens(length=130)
    assert torch.equal(small(x), large(x))


def test_one_row_and_one_column_reach_every_token_in_two_steps():
    layer, x = build("axial", max_len=16), tokens(length=16)
    changed = x.clone()
    changed[:, 5] += 1.0
    moved = (layer(changed) - layer(x)).abs().amax((0, 2)) > 1e-9
    assert moved.all()


def test_parameters_are_those_of_the_card():
    assert peers.parameter_count(build("axial")) == 8 * (WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((96,), "rows and columns"),
        ((0, 96), "shape's rows"),
        ((5, 5), "holds 25 tokens"),
    ],
)
def test_bad_options(shape, said):
    with pytest.raises(InvalidInputError, match=said):
        build("axial", shape=shape)
