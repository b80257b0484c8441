"""Packed sequences on a CPU, one call for each: the numbers and gradients of the tiles."""

import pytest
import torch

import lln
from lln.functional import plain_ways, prepared_calls

LENGTHS = (5, 0, 1, 40, 0, 18)
HEADS, WIDTH = 4, 6


def inputs(key_heads=HEADS):
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, WIDTH) for heads in (HEADS, key_heads, key_heads)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def temperature(heads, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(len(LENGTHS), heads, 1, 1, generator=generator, dtype=torch.float64)
    return (1 + drawn).requires_grad_()


BOUNDS = torch.tensor((0, *LENGTHS)).cumsum(0)
OPTIONS = {
    "matched": lambda: {},
    "numbers": lambda: {"alpha": 1.5, "beta": 2.0},
    "tensors": lambda: {"alpha": temperature(HEADS, 1), "beta": temperature(2, 2)},
    "causal": lambda: {"alpha": 1.5, "beta": 2.0, "is_causal": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["lln", "lln_diag"])
def test_one_by_one_is_as_side_by_side(name, options, monkeypatch):
    given = OPTIONS[options]()
    sides = inputs(key_heads=2)
    attend = getattr(lln, f"{name}_attention_varlen")
    if name == "lln_diag":
        mix = torch.linspace(0, 1, sum(LENGTHS), dtype=torch.float64).view(-1, 1, 1)
        given |= {"block_size": 8, "mix": mix.requires_grad_()}
    leaves = [*sides, *(side for side in given.values() if isinstance(side, torch.Tensor))]
    calls = []
    own = plain_ways.one_by_one
    monkeypatch.setattr(plain_ways, "one_by_one", lambda *each: calls.append(each) or own(*each))

    def outcome():
        out = attend(*sides, BOUNDS, enable_gqa=True, impl="eager", **given)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        return out, *torch.autograd.grad((out * weights).sum(), leaves)

    found = outcome()
    assert len(calls) == 1
    monkeypatch.setattr(plain_ways, "is_untraced_on_cpu", lambda *sides: False)
    prepared_calls.clear()
    expected = outcome()
    assert len(calls) == 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_only_empty_sequences():
    empty = torch.zeros(0, HEADS, WIDTH, requires_grad=True)
    out = lln.lln_attention_varlen(empty, empty, empty, torch.zeros(4, dtype=torch.int64))
    assert out.shape == (0, HEADS, WIDTH)
