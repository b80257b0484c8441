"""LLN attention's P as the product of two thin row-stochastic matrices.

P = A·B with A a softmax over features and B a softmax over tokens (docs/method.md). Everything of P
that is not a sum over entries' logarithms then costs O(N·D²).
"""

from __future__ import annotations

from torch import Tensor

from lln.instruments.head_groups import Heads


def factors(heads: Heads) -> tuple[Tensor, Tensor]:
    """A ``[G, T, D]`` and B ``[G, D, S]`` of bidirectional LLN attention."""
    exponent = heads.beta * heads.key
    peak = exponent.amax(-2, keepdim=True)
    weight = (exponent - peak).exp_()
    mass = weight.sum(-2, keepdim=True)
    slots = (heads.alpha * heads.query + (peak + mass.log())).softmax(-1)
    return slots, weight.div_(mass).mT
