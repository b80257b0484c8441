"""Blockwise attention against blocks cut and attended one by one."""

import math

import pytest
import torch
from lab.tests.peers.contract import build

from lln import reference
from lln.errors import InvalidInputError


def loop(query, key, value, shift, blocks):
    """One head without padding: consecutive blocks as even as can be."""
    count = len(query)
    blocks = min(blocks, count)
    borders = [index * count // blocks for index in range(blocks + 1)]
    out = torch.empty_like(value)
    for block in range(blocks):
        partner = (block + shift) % blocks
        rows = slice(borders[block], borders[block + 1])
        keys = slice(borders[partner], borders[partner + 1])
        scores = query[rows] @ key[keys].T / math.sqrt(query.shape[-1])
        out[rows] = scores.softmax(-1) @ value[keys]
    return out


@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 2, 4, 12, 23])
def test_every_block_attends_its_partner(blocks, length):
    shifts = [blocks // 2, blocks - 1]
    core = build("blockwise", blocks=blocks, shifts=shifts).core
    query, key, value = torch.randn(3, 2, 2, length, 16, dtype=torch.float64)
    # Padding anywhere: what counts is the order of the real tokens.
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, 1:-1:3] = False
    found, dense = core(query, key, value, mask), core.matrix(query, key, mask) @ value
    for sample in range(2):
        real = mask[sample]
        for head in range(2):
            one = (side[sample, head][real] for side in (query, key, value))
            expected = loop(*one, shifts[head], blocks)
            torch.testing.assert_close(found[sample, head][real], expected)
            torch.testing.assert_close(dense[sample, head][real], expected)


@pytest.mark.parametrize("length", [12, 14])
def test_without_padding(length):
    # 12 tokens are three equal blocks, which need no mask; 14 are not.
    core = build("blockwise", blocks=3, shifts=[1, 2]).core
    query, key, value = torch.randn(3, 2, 2, length, 16, dtype=torch.float64)
    found = core(query, key, value)
    for sample in range(2):
        for head in range(2):
            one = (side[sample, head] for side in (query, key, value))
            torch.testing.assert_close(found[sample, head], loop(*one, (1, 2)[head], 3))


def test_one_block_is_softmax():
    core = build("blockwise", blocks=1).core
    query, key, value = torch.randn(3, 2, 2, 20, 16, dtype=torch.float64)
    torch.testing.assert_close(
        core(query, key, value), reference.softmax_attention(query, key, value)
    )


@pytest.mark.parametrize(
    ("heads", "blocks", "expected"),
    [
        (12, 2, [10, 2]),
        (12, 3, [8, 2, 2]),
        (8, 3, [6, 1, 1]),
        (2, 4, [1, 1, 0, 0]),
        (1, 2, [1, 0]),
    ],
)
def test_heads_are_shared_out_as_in_the_paper(heads, blocks, expected):
    core = build("blockwise", embed_dim=24, num_heads=heads, blocks=blocks).core
    assert [core.shifts.count(shift) for shift in range(blocks)] == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"blocks": 0}, "blocks"),
        ({"blocks": 2, "shifts": [0]}, "2 whole numbers from 0 to 1"),
        ({"blocks": 2, "shifts": [0, 2]}, "2 whole numbers from 0 to 1"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(InvalidInputError, match=said):
        build("blockwise", **options)
