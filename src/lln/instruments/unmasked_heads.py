"""Heads of one length with nothing masked: what every instrument computes on.

Dimension legend: G heads, T queries, S keys, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lln.instruments.chosen_keys import ChosenKeys


@dataclass(frozen=True)
class UnmaskedHeads:
    """Heads of one length without masks, in float64, detached.

    Attributes:
        query: ``[G, T, D]``.
        key: ``[G, S, D]``.
        kind: ``"softmax"``, ``"lln"``, ``"diag"``, ``"lln_diag"``, ``"window"`` or ``"lln_keys"``.
        scale: Factor of the softmax scores.
        is_causal: Whether row i sees keys 0 … i only.
        alpha: ``[G, 1, 1]``; 1 where the kind has none.
        beta: Likewise.
        mix: ``[G, T, 1]``, the LLN part's weight.
        block: int ``[S]``, never decreasing: the diagonal block of every token. In ``"window"``
            every place is a block of its own.
        chosen: The exact keys of ``"lln_keys"``; None for the other kinds.
        window: How many blocks away a row sees; 0 but in ``"window"``.
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
    chosen: ChosenKeys | None = None
    window: int = 0

    @property
    def is_near(self) -> bool:
        """Whether rows see near keys only, so that most of P is zero."""
        return self.kind in ("diag", "window")

    def part(self, start: int, end: int) -> UnmaskedHeads:
        """The heads from ``start`` up to ``end``."""
        names = ("query", "key", "alpha", "beta", "mix")
        chosen = None if self.chosen is None else self.chosen.part(start, end)
        sides = {name: getattr(self, name)[start:end] for name in names}
        return replace(self, **sides, chosen=chosen)

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

    def slot_shifts(self) -> tuple[Tensor, Tensor]:
        """What ``"lln_keys"`` adds to the logits αq_f + L_f of its slots.

        -βμ by feature, ``[G, 1, D]``, and scale·q·μ + g + ln ρ by row,
        ``[G, T, 1]``, with μ the mean of the keys that the slots hold and ρ the share of them that
        are not exact. ln ρ is -inf where all are, or where there are none.
        """
        assert self.chosen is not None
        own = torch.searchsorted(self.block, self.block, right=True)
        own = own - torch.searchsorted(self.block, self.block)
        exact = own + (self.chosen.indices >= 0).sum(-1)[:, self.chosen.group]
        held, centre = self.key.shape[1], self.key.mean(1, keepdim=True)
        share = (held - exact).to(self.query.dtype) / max(held, 1)
        level = self.scale * (self.query * centre).sum(-1) + share.log()
        return -self.beta * centre, level.unsqueeze(-1) + self.chosen.offset
