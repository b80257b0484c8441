"""Sliding windows against softmax, row by row."""

import pytest
import torch
from lab.tests.peers.contract import build, tokens
from torch.nn import functional as F

from lln.errors import InvalidInputError


@pytest.mark.parametrize("causal", [False, True])
def test_every_row_is_softmax_attention_to_its_window(causal):
    core = build("window", is_causal=causal).core
    query, key, value = torch.randn(3, 2, 2, 40, 16, dtype=torch.float64)
    found = core(query, key, value)
    for row in range(40):
        near = slice(max(row - 7, 0), row + 1 if causal else row + 8)
        sides = query[..., row : row + 1, :], key[..., near, :], value[..., near, :]
        expected = F.scaled_dot_product_attention(*sides)
        torch.testing.assert_close(found[..., row : row + 1, :], expected)


def test_a_window_of_all_tokens_is_softmax():
    x = tokens()
    window, softmax = build("window", window=39), build("softmax")
    softmax.load_state_dict(window.state_dict())
    torch.testing.assert_close(window(x), softmax(x))


def test_a_window_of_no_neighbours_is_the_value():
    core = build("window", window=0).core
    query, key, value = torch.randn(3, 2, 2, 40, 16, dtype=torch.float64)
    torch.testing.assert_close(core(query, key, value), value)


def test_a_window_has_a_width():
    with pytest.raises(InvalidInputError, match="window must be an integer of at least 0"):
        build("window", window=-1)
