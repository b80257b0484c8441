"""Entropy of the rows of P: how many keys a query spreads over, Eq. (7)."""

from __future__ import annotations

import math

from torch import Tensor

from lln.instruments.attention_inputs import AttentionInputs
from lln.instruments.head_groups import measure
from lln.instruments.instrument import instrument
from lln.instruments.rows import AttentionRows, Rows, RowTile, sum_over_rows

# e^x is zero in float64 far above this; a product with it is therefore zero, and not NaN as with
# the logarithm of an exact zero.
LOWEST_LOG = -1e4


@instrument(AttentionInputs)
def entropy(inputs: AttentionInputs) -> Tensor:
    """Mean entropy of the rows of P in bits, Eq. (7), exact in O(N) memory.

        H(P) = −(1/N) Σ_ij P_ij log₂ P_ij

    From 0 (every query reads one key) to log₂ S (every query reads all keys alike).

    Returns:
        ``[B, H]``, float64, on the device of query. NaN for a sample without any valid token, and
        for a head with a NaN or infinity in a valid token; other heads are not touched by it.

    Example:
        >>> import torch
        >>> query = torch.zeros(1, 2, 256, 8)
        >>> entropy(query, query).round(decimals=9).tolist()
        [[8.0, 8.0]]
    """
    return measure(inputs, lambda heads: mean_row_entropy(AttentionRows(heads)))


def mean_row_entropy(rows: Rows) -> Tensor:
    """Eq. (7) of every head: ``[G]``."""

    def in_bits(tile: RowTile) -> Tensor:
        return -(tile.p * tile.log_p.clamp_min(LOWEST_LOG)).sum((-2, -1)) / math.log(2)

    return sum_over_rows(rows, in_bits) / rows.shape[1]
