"""Block-diagonal attention against softmax, block by block."""

import itertools

import pytest
import torch
from lab.tests.peers.contract import build, tokens
from torch.nn import functional as F

from lln.errors import InvalidInputError


def heads(length=40):
    return torch.randn(3, 2, 2, length, 16, dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True])
def test_every_block_is_softmax_attention_by_itself(causal):
    core = build("diag", is_causal=causal).core
    query, key, value = heads()
    found = core(query, key, value)
    for start in range(0, 40, 16):
        part = [side[..., start : start + 16, :] for side in (query, key, value)]
        expected = F.scaled_dot_product_attention(*part, is_causal=causal)
        torch.testing.assert_close(found[..., start : start + 16, :], expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [40, 12])
def test_shifted_blocks_begin_later(causal, length):
    core = build("diag", is_causal=causal, shift=5).core
    query, key, value = heads(length)
    found = core(query, key, value)
    edges = [edge for edge in (0, 5, 21, 37) if edge < length] + [length]
    for start, end in itertools.pairwise(edges):
        part = [side[..., start:end, :] for side in (query, key, value)]
        expected = F.scaled_dot_product_attention(*part, is_causal=causal)
        torch.testing.assert_close(found[..., start:end, :], expected)
    torch.testing.assert_close(core.matrix(query, key) @ value, found)


def test_shifted_blocks_take_no_padding():
    core = build("diag", shift=5).core
    query, key, value = heads()
    mask = torch.ones(2, 40, dtype=torch.bool)
    for call in (lambda: core(query, key, value, mask), lambda: core.matrix(query, key, mask)):
        with pytest.raises(InvalidInputError, match="shift=5 takes no key_mask"):
            call()
    for wrong in (16, -1, 1.5):
        with pytest.raises(InvalidInputError, match="shift must be"):
            build("diag", shift=wrong)


def test_one_block_is_softmax():
    x = tokens()
    diag, softmax = build("diag", block_size=40), build("softmax")
    softmax.load_state_dict(diag.state_dict())
    torch.testing.assert_close(diag(x), softmax(x))


def test_a_block_of_padding_gives_zeros():
    core = build("diag").core
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1, 16:32] = False
    out = core(*heads(), mask)
    assert (out[1, :, 16:32] == 0).all()
    assert (out[1, :, 32:] != 0).all()


def test_a_block_needs_a_token():
    with pytest.raises(InvalidInputError, match="block_size"):
        build("diag", block_size=0)
