"""The blocks that begin on a rank, as everything that chooses or reads exact keys needs them.

Dimension legend: B batch, X tokens of a rank and those borrowed.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lln.eager.key_blocks import KeyBlocks
from lln.parallel.whole_blocks import WholeBlocks


class OwnBlocks(NamedTuple):
    """The blocks that begin on this rank.

    Attributes:
        layout: How the blocks lie on the ranks.
        blocks: Those of this rank.
        valid: bool ``[B, X]``, which tokens belong to them and are not masked.
        counted: The same; None = all are.
        by_kernels: Whether the kernels compute.
    """

    layout: WholeBlocks
    blocks: KeyBlocks
    valid: Tensor
    counted: Tensor | None
    by_kernels: bool
