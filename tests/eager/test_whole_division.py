"""Compiled by Inductor with sequences that no block divides: outputs and gradients are right."""

from functools import partial

import pytest
import torch

import lln
from lln.cpu.building import find_compiler
from lln.eager.whole_division import divided

GIVEN = {"alpha": 1.0, "beta": 1.0}
KEYS = {"block_size": 16, "keys": 4, "offset": -1.0, **GIVEN}
BOUNDS = torch.tensor([0, 13, 40])
MASK = torch.arange(40)[None] >= 5


def packed(attend, **options):
    def call(query, key, value):
        sides = (side[0].transpose(0, 1) for side in (query, key, value))
        return attend(*sides, BOUNDS, **options).transpose(0, 1)[None]

    return call


CALLS = {
    "diag": partial(lln.block_diagonal_attention, block_size=16),
    "lln_diag": partial(lln.lln_diag_attention, block_size=16, **GIVEN),
    "keys": partial(lln.lln_keys_attention, **KEYS),
    "keys, masked": partial(lln.lln_keys_attention, key_mask=MASK, **KEYS),
    "packed lln_diag": packed(lln.lln_diag_attention_varlen, block_size=16, **GIVEN),
    "packed keys": packed(lln.lln_keys_attention_varlen, **KEYS),
}


def test_whole_numbers():
    number = torch.arange(100)
    assert torch.equal(divided(number, 7), number // 7)
    assert divided(number.int(), 7).dtype == torch.int32


@pytest.mark.skipif(find_compiler() is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize(
    "name",
    [name if name == "diag" else pytest.param(name, marks=pytest.mark.slow) for name in CALLS],
)
def test_compiled_by_inductor(name):
    generator = torch.Generator().manual_seed(0)
    *inputs, sent = (torch.randn(1, 2, 40, 8, generator=generator) for _ in range(4))
    inputs = [side.requires_grad_() for side in inputs]
    found = []
    torch._dynamo.reset()
    for attend in (CALLS[name], torch.compile(CALLS[name], dynamic=False)):
        out = attend(*inputs)
        found.append((out, *torch.autograd.grad(out, inputs, sent)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
