"""The exact keys of ``"lln_keys"`` as instruments take them: places among the tokens that count.

Dimension legend: G heads, T tokens, n groups of queries, K keys per group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lln.eager.selection import drop_repeats


@dataclass(frozen=True)
class ChosenKeys:
    """The keys that every group of queries sees one by one, outside its own block.

    Attributes:
        offset: ``[G, 1, 1]``, what is added to the logits of the slots.
        indices: int ``[G, n, K]``, places of the keys, each once and none that the group may not
            see; -1 = none.
        group: int ``[T]``, never decreasing: the group of every query.
    """

    offset: Tensor
    indices: Tensor
    group: Tensor

    def part(self, start: int, end: int) -> ChosenKeys:
        """Those of the heads from ``start`` up to ``end``."""
        return ChosenKeys(self.offset[start:end], self.indices[start:end], self.group)


def place_choices(
    indices: Tensor,
    offset: Tensor,
    positions: Tensor,
    *,
    first_group: int,
    group_size: int,
    block_size: int,
) -> ChosenKeys:
    """Chosen keys, counted among the tokens at ``positions`` only.

    Args:
        indices: int ``[G, n, K]``, as `lln.choose_keys` counts tokens.
        offset: ``[G, 1, 1]``.
        positions: int ``[T]``, ascending: the tokens that count. The first begins a block.
        first_group: The group of the first of them.
        group_size: Queries in a group.
        block_size: Tokens in a block.
    """
    place = positions - positions[:1]
    group = place // group_size
    groups = int(group[-1]) + 1 if group.shape[0] else 0
    indices = indices[:, first_group : first_group + groups].contiguous()
    if groups == 0:
        return ChosenKeys(offset, indices, group)
    found = torch.searchsorted(positions, indices).clamp_max(positions.shape[0] - 1)
    home = (place // block_size)[found]
    own = (torch.arange(groups, device=group.device) * group_size // block_size)[:, None]
    seen = (positions[found] == indices) & (home != own)
    return ChosenKeys(offset, drop_repeats(torch.where(seen, found, -1)), group)
