"""Heads of one length with nothing masked: what every instrument computes on.

Dimension legend: G heads, T queries, S keys, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class UnmaskedHeads:
    """Heads of one length without masks, in float64, detached.

    Attributes:
        query: ``[G, T, D]``.
        key: ``[G, S, D]``.
        kind: ``"softmax"``, ``"lln"``, ``"diag"`` or ``"lln_diag"``.
        scale: Factor of the softmax scores.
        is_causal: Whether row i sees keys 0 … i only.
        alpha: ``[G, 1, 1]``; 1 where the kind has none.
        beta: Likewise.
        mix: ``[G, T, 1]``, the LLN part's weight.
        block: int ``[S]``, never decreasing: the diagonal block of every token.
    """

    query: Tensor
    key: Tensor
    kind: str
    scale: float
    is_causal: bool
    alpha: Tensor
    beta: Tensor
    mix: Tensor
    block: Tensor

    def part(self, start: int, end: int) -> UnmaskedHeads:
        """The heads from ``start`` up to ``end``."""
        names = ("query", "key", "alpha", "beta", "mix")
        return replace(self, **{name: getattr(self, name)[start:end] for name in names})

    def lln_factors(self) -> tuple[Tensor, Tensor]:
        """A ``[G, T, D]`` and B ``[G, D, S]`` of bidirectional LLN attention, P = A·B.

        A is a softmax over features, B a softmax over tokens (docs/method.md). Both are
        row-stochastic, so what does not need the logarithm of single entries costs O(N·D²).
        """
        exponent = self.beta * self.key
        peak = exponent.amax(-2, keepdim=True)
        weight = (exponent - peak).exp_()
        mass = weight.sum(-2, keepdim=True)
        slots = (self.alpha * self.query + (peak + mass.log())).softmax(-1)
        return slots, weight.div_(mass).mT
