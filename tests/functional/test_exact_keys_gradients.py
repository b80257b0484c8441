"""Gradients of attention with exact keys against finite differences, and where there are none.

The choice of keys is held fixed: it jumps where two keys change their order.
"""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from lln import choose_keys, lln_keys_attention, lln_keys_attention_varlen
from lln.testing import make_qkv

FP64 = torch.float64
SHAPES = {"full": (2, 2, 1, 1), "head": (2, 1, 1), "scalar": ()}


def leaves(batch=2, heads=2, tokens=7, width=2, **others):
    return make_qkv(batch, heads, tokens, width, dtype=FP64, requires_grad=True, **others)


def holes(batch, tokens):
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    mask[:, 1::4] = False
    mask[-1, :2] = False
    return mask


def numbers_of(shape):
    positive = [(0.5 + torch.rand(shape, dtype=FP64)).requires_grad_() for _ in range(2)]
    return [*positive, (-2 * torch.rand(shape, dtype=FP64)).requires_grad_()]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_input(shape, masked):
    sides = leaves(value_width=1)
    options = {"block_size": 2, "key_mask": holes(2, 7) if masked else None}
    keys = choose_keys(*sides[:2], 2, **options)

    def attend(query, key, value, alpha, beta, offset):
        numbers = {"alpha": alpha, "beta": beta, "offset": offset}
        return lln_keys_attention(query, key, value, keys=keys, **numbers, **options)

    assert gradcheck(attend, (*sides, *numbers_of(shape)), fast_mode=shape != ())


def test_with_numbers_and_groups():
    sides = leaves(1, 4, 7, 2, key_heads=2)
    options = {"block_size": 4, "group_size": 2, "enable_gqa": True}
    keys = choose_keys(*sides[:2], 2, **options)

    def attend(query, key, value):
        given = {"alpha": 0.7, "beta": 0.9, "offset": -1.0}
        return lln_keys_attention(query, key, value, keys=keys, **given, **options)

    assert gradcheck(attend, sides, fast_mode=True)


def test_beta_per_key_head():
    sides = leaves(1, 4, 7, 2, key_heads=2)
    beta = (0.5 + torch.rand(1, 2, 1, 1, dtype=FP64)).requires_grad_()
    keys = choose_keys(*sides[:2], 2, block_size=4, enable_gqa=True)

    def attend(query, key, value, beta):
        given = {"alpha": 0.7, "beta": beta, "offset": -1.0, "enable_gqa": True}
        return lln_keys_attention(query, key, value, keys=keys, block_size=4, **given)

    assert gradcheck(attend, (*sides, beta), fast_mode=True)


def test_packed():
    sides = [torch.randn(9, 2, 2, dtype=FP64, requires_grad=True) for _ in range(3)]
    bounds = torch.tensor([0, 3, 3, 9])
    keys = torch.tensor([8, 1]).expand(2, 9 // 2 + 3, 2)

    def attend(query, key, value, alpha, beta, offset):
        given = {"alpha": alpha, "beta": beta, "offset": offset}
        given |= {"block_size": 2, "keys": keys}
        return lln_keys_attention_varlen(query, key, value, bounds, **given)

    assert gradcheck(attend, (*sides, *numbers_of((3, 2, 1, 1))), fast_mode=True)


def test_second_derivatives():
    sides = leaves(1, 1, 4, 2)
    keys = choose_keys(*sides[:2], 1, block_size=2)

    def attend(query, key, value, alpha, beta, offset):
        given = {"alpha": alpha, "beta": beta, "offset": offset, "keys": keys}
        return lln_keys_attention(query, key, value, block_size=2, **given)

    assert gradgradcheck(attend, (*sides, *numbers_of(())), fast_mode=True)


@pytest.mark.parametrize("group", [4, 1])
def test_the_choice_has_no_part_in_the_gradient(group):
    query, key, value = leaves(2, 2, 20, 4)
    options = {"alpha": 0.7, "beta": 0.9, "offset": -1.0, "block_size": 4, "group_size": group}
    chosen = choose_keys(query, key, 4, block_size=4, group_size=group)
    found, wanted = (
        torch.autograd.grad(
            lln_keys_attention(query, key, value, **options, **how).square().sum(),
            (query, key, value),
        )
        for how in ({"keys": 4}, {"keys": chosen})
    )
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("group", [8, 1])
def test_masked_tokens_get_no_gradient(group):
    query, key, value = leaves(2, 2, 30, 3)
    mask = holes(2, 30)
    options = {"alpha": 0.7, "beta": 0.9, "offset": -1.0, "group_size": group}
    out = lln_keys_attention(query, key, value, key_mask=mask, block_size=8, keys=4, **options)
    out.square().sum().backward()
    hidden = ~mask[:, None, :, None]
    for tensor in (key, value):
        assert not tensor.grad.masked_select(hidden).any()
        assert tensor.grad.masked_select(~hidden).all()


@pytest.mark.parametrize("asked", range(6))
def test_only_one_input_requires_grad(asked):
    def attend(query, key, value, alpha, beta, offset):
        given = {"alpha": alpha, "beta": beta, "offset": offset, "block_size": 4, "keys": 3}
        return lln_keys_attention(query, key, value, **given).square().sum()

    inputs = (*leaves(1), *numbers_of(()))
    wanted = torch.autograd.grad(attend(*inputs), inputs)[asked]
    alone = [tensor.detach() for tensor in inputs]
    alone[asked].requires_grad_()
    (found,) = torch.autograd.grad(attend(*alone), alone[asked])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
