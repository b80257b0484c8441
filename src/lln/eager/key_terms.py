"""What attention with exact keys is computed from, whichever way its chosen keys are read.

Dimension legend: see `lln.eager.key_attention`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from lln.eager.key_blocks import KeyBlocks

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
        blocks: Where the tokens lie.
        group_size: g, a divisor of W.
        key_mask: bool ``[B, T]``, True = attend.
        is_causal: Whether row i sees keys 0 … i only.
        scale: Factor of the scores; None = 1/√D.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    alpha: float | Tensor
    offset: float | Tensor
    slots: Slots
    blocks: KeyBlocks
    group_size: int
    key_mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None

    @property
    def factor(self) -> float:
        """Factor of the scores."""
        return 1.0 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale
