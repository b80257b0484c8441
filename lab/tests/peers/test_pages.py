"""Pages against softmax: where they hold everything, and where a token stands out."""

import pytest
import torch
from lab.tests.peers.contract import build, tokens
from torch.nn import functional as F

from lln.errors import InvalidInputError


def test_pages_of_all_tokens_are_softmax():
    x = tokens()
    pages, softmax = build("pages", pages=20), build("softmax")
    softmax.load_state_dict(pages.state_dict())
    torch.testing.assert_close(pages(x), softmax(x))


@pytest.mark.parametrize("causal", [False, True])
def test_a_token_that_stands_out_is_found_wherever_it_is(causal):
    core = build("pages", is_causal=causal, window=2, pages=1).core
    query, key, value = torch.randn(3, 1, 2, 40, 16, dtype=torch.float64)
    query[..., 0], key[..., 0] = 9.0, 0.0
    key[:, :, 13, 0] = 9.0
    found = core(query, key, value)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    torch.testing.assert_close(found[:, :, 14:], expected[:, :, 14:], rtol=0, atol=1e-5)


def test_sizes_are_checked():
    with pytest.raises(InvalidInputError, match="page_size must be an integer of at least 1"):
        build("pages", page_size=0)
