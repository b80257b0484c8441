"""Modules of a window, sinks and pages."""

import pytest
import torch
from torch import nn

import lln
from lln.errors import InvalidInputError
from lln.testing import make_qkv

FORM = {"window": 4, "sinks": 2, "pages": 2, "page_size": 4}


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_core_is_the_function(is_causal):
    sides = make_qkv(2, 4, 30, 8, key_heads=2, value_width=5)
    mask = torch.arange(30) < torch.tensor([[30], [20]])
    found = lln.PageCore(4, 8, scale=0.3, **FORM)(*sides, key_mask=mask, is_causal=is_causal)
    options = {"key_mask": mask, "is_causal": is_causal, "enable_gqa": True}
    assert torch.equal(found, lln.page_attention(*sides, scale=0.3, **FORM, **options))


def test_it_has_no_state_and_says_its_form():
    core = lln.PageCore(2, 8, **FORM)
    assert not core.state_dict()
    assert "window=4, sinks=2, pages=2, page_size=4" in str(core)


def test_pages_of_all_tokens_are_multihead_attention():
    softmax = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    layer = lln.PageAttention(16, 2, batch_first=True, pages=8, page_size=4).eval()
    layer.load_state_dict(softmax.state_dict(), strict=True)
    x, ignored = torch.randn(2, 30, 16), torch.arange(30) >= torch.tensor([[30], [20]])
    expected, _ = softmax(x, x, x, key_padding_mask=ignored)
    torch.testing.assert_close(layer(x, x, x, key_padding_mask=ignored)[0], expected)


@pytest.mark.parametrize("name", ["window", "sinks", "pages", "page_size"])
def test_sizes_that_are_none_get_a_sentence(name):
    with pytest.raises(InvalidInputError, match=f"{name} must be an integer of at least"):
        lln.PageCore(2, 8, **{name: -1})


def test_tokens_of_other_texts_are_refused():
    query, key, value = make_qkv(1, 2, 10, 8)
    with pytest.raises(InvalidInputError, match="PageCore pairs queries and keys"):
        lln.PageCore(2, 8)(query[:, :, :4], key, value)
