"""What attention with exact keys is computed from, whichever way its chosen keys are read.

Dimension legend: see `lln.eager.key_attention`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from lln.eager.key_blocks import Groups

# L - βμ, C and μ.
Slots = tuple[Tensor, Tensor, Tensor]


class KeyTerms(NamedTuple):
    """A call in the accumulation dtype, whose tokens lie in blocks.

    Attributes:
        query: ``[B, H, T, D]``.
        key: Like query.
        value: ``[B, H, T, E]``.
        alpha: A number, or broadcasts to ``[B, H, n, 1, 1]``.
        offset: g, likewise.
        slots: L - βμ, C and μ for every block: broadcast to ``[B, H, n, D]``, ``[B, H, n, D, E]``
            and ``[B, H, n, D]``.
        groups: Where the tokens lie, and what a group may see.
        scale: Factor of the scores; None = 1/√D.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    alpha: float | Tensor
    offset: float | Tensor
    slots: Slots
    groups: Groups
    scale: float | None = None

    @property
    def factor(self) -> float:
        """Factor of the scores."""
        return 1.0 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale
