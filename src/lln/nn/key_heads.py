"""The attention core with exact keys: heads in, heads out, with its own α, β and offset.

Dimension legend: B batch, H heads, T tokens, D head width, E value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln import checks
from lln.checks.call import Call
from lln.checks.key_options import KEYS_MATCHING, check_group_size, check_not_causal
from lln.checks.names import check_choice
from lln.checks.signatures import check_options, explain_misfits
from lln.errors import InvalidInputError
from lln.functional.run import attend
from lln.matching.curves import matched_spread
from lln.matching.mass import REST_FACTOR
from lln.nn.heads import LLNCore
from lln.nn.offsets import make_offset, numbers_of_call


class LLNKeysCore(LLNCore):
    """One softmax over the own block, chosen keys and the slots of the LLN summary.

    The module of `lln.lln_keys_attention`, over heads that are already projected.

    Args:
        num_heads: H.
        head_dim: D.
        keys: How many keys outside its block every group of queries sees one by one.
        block_size: Tokens in a block.
        group_size: Queries that share their keys (see `lln.choose_keys`); None = a block.
        offset: What puts the mass of the slots on the scale of softmax scores: a number or H
            values; None = the closed form of `lln.matching.mass` in every call.
            `lln.calibrate_keys` finds it on real activations.
        learn_offset: Whether the offset is a parameter: it starts at ``offset``, or at the closed
            form of the first batch.
        matching: ``"rest"``, half of what ``"entropy"`` gives, or a criterion of
            `lln.match_moments`.
        statistics: As in `LLNCore`.
        alpha: As in `LLNCore`.
        beta: As in `LLNCore`.
        dropout: Must be 0: exact keys have no dropout.
        device: Where buffers and parameters live.
        **options: As in `LLNCore`: ``momentum``, ``impl``.

    Example:
        >>> core = LLNKeysCore(2, 16, keys=8, block_size=32)
        >>> query, key, value = torch.randn(3, 1, 2, 100, 16)
        >>> core(query, key, value).shape
        torch.Size([1, 2, 100, 16])
    """

    @explain_misfits
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        keys: int = 64,
        block_size: int = 64,
        group_size: int | None = None,
        offset: float | Tensor | None = None,
        learn_offset: bool = False,
        matching: str = "rest",
        statistics: str = "sample",
        alpha: float | Tensor | None = None,
        beta: float | Tensor | None = None,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        """Build the sources of α, β and of the offset."""
        check_options(self, options, type(self))
        check_choice("matching", matching, KEYS_MATCHING)
        checks.check_dropout(dropout)
        if dropout:
            raise InvalidInputError(
                f"{type(self).__name__} has no dropout, because a dropped key would have to leave "
                f"blocks, chosen keys and slots alike; leave it at 0, got {dropout}."
            )
        checks.check_count("head_dim", head_dim)
        if matching == "rest" and statistics in ("fixed", "learned"):
            alpha = rest_spread(head_dim) if alpha is None else alpha
            beta = rest_spread(head_dim) if beta is None else beta
        criterion = "entropy" if matching == "rest" else matching
        options |= {"statistics": statistics, "alpha": alpha, "beta": beta, "device": device}
        super().__init__(num_heads, head_dim, matching=criterion, **options)
        checks.check_count("keys", keys, 0)
        checks.check_block_size(block_size)
        check_group_size(group_size, block_size)
        self.matching, self.keys, self.block_size = matching, keys, block_size
        self.group_size = group_size
        self.offset = make_offset(offset, learn_offset, num_heads, device)

    def _attend(self, call: Call) -> Tensor:
        check_not_causal(call.is_causal)
        checks.check_self_attention(call.query, call.key, type(self).__name__)
        group = check_group_size(self.group_size, self.block_size)
        sources = (self.statistics, self.offset)
        sides = (call.query, call.key, call.key_mask, self.matching, self.impl)
        alpha, beta, offset = numbers_of_call(*sources, *sides)
        numbers = {"alpha": alpha, "beta": beta, "offset": offset, "matching": self.matching}
        form = {"block_size": self.block_size, "keys": self.keys, "group_size": group}
        return attend(call.replace(kind="lln_keys", **numbers, **form), self.impl)

    def extra_repr(self) -> str:
        """The settings, for ``print(module)``."""
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, keys={self.keys}, "
            f"block_size={self.block_size}, matching={self.matching!r}"
        )


def rest_spread(head_dim: int) -> float:
    """α = β of ``"rest"`` for unit variances: where learned temperatures start."""
    with torch.device("cpu"):
        return REST_FACTOR * matched_spread(torch.ones(()), head_dim, 1024.0, "entropy").item()
