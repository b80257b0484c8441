"""Pages by the entry points, computed by kernels in the interpreter."""

import pytest
import torch

import lln
from lln.testing import make_qkv

FORM = {"window": 6, "sinks": 3, "pages": 3, "page_size": 8}


@pytest.mark.parametrize("is_causal", [False, True], ids=["both sides", "causal"])
def test_dense_calls_equal_plain_pytorch(is_causal):
    query, key, value = make_qkv(2, 4, 70, 16, key_heads=2, requires_grad=True)
    mask = torch.arange(70) < torch.tensor([[70], [50]])
    choice = make_qkv(2, 4, 70, 8, key_heads=2)[:2]
    options = FORM | {"key_mask": mask, "is_causal": is_causal, "enable_gqa": True}
    options |= {"choice": choice, "scale": 0.3}
    found, expected = (
        lln.page_attention(query, key, value, impl=impl, **options) for impl in ("triton", "eager")
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(expected)
    for one, other in zip(
        *(torch.autograd.grad(out, (query, key, value), upstream) for out in (found, expected)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_calls_of_one_layout_and_other_numbers_are_not_taken_for_each_other():
    """Launches are kept by layout and numbers; more sinks than tokens are all tokens."""
    inputs = make_qkv(1, 2, 26, 16, key_heads=1, requires_grad=True)
    upstream = torch.randn(1, 2, 26, 16)
    for change in (
        {},
        {"scale": 0.6},
        {"window": 2},
        {"sinks": 9},
        {"sinks": 200},
        {"page_size": 4},
        {"pages": 1},
        {"is_causal": True},
        {"scale": -0.3},
        {},
    ):
        sides = []
        for impl in ("triton", "eager"):
            out = lln.page_attention(*inputs, impl=impl, enable_gqa=True, **FORM | change)
            sides.append((out, *torch.autograd.grad(out, inputs, upstream)))
        for found, expected in zip(*sides, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=str(change))


def test_packed_sequences_equal_plain_pytorch():
    query, key, value = torch.randn(3, 90, 2, 16)
    choice = torch.randn(2, 90, 2, 8).unbind()
    bounds = torch.tensor([0, 0, 13, 70, 90])
    found, expected = (
        lln.page_attention_varlen(query, key, value, bounds, choice=choice, impl=impl, **FORM)
        for impl in ("triton", "eager")
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_choice_alone():
    query, key, _ = make_qkv(1, 4, 60, 16, key_heads=2)
    sizes = {name: FORM[name] for name in ("window", "sinks", "page_size")}
    options = sizes | {"is_causal": True, "enable_gqa": True}
    found, expected = (
        lln.choose_pages(query, key, 3, impl=impl, **options) for impl in ("triton", "eager")
    )
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)
