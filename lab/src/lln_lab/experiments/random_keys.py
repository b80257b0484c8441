"""A control for exact keys: as many keys of every block, drawn at random in every call.

What they fall short of chosen keys is what choosing brings.

Dimension legend: B batch, H heads, T tokens, G blocks, K keys per block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lln import lln_keys_attention
from lln.eager.whole_division import divided
from lln.errors import InvalidInputError
from lln.nn.key_heads import LLNKeysCore
from lln.nn.offsets import numbers_of_call
from lln_lab.peers.lln import LLNKeys


def random_keys(query: Tensor, keys: int, block_size: int) -> Tensor:
    """``[B, H, G, K]``: different tokens outside of each block; all of them if there are fewer."""
    batch, heads, tokens, _ = query.shape
    home = divided(torch.arange(tokens, device=query.device), block_size)
    blocks = -(-tokens // block_size)
    own = home == torch.arange(blocks, device=query.device)[:, None]
    chance = torch.rand(batch, heads, blocks, tokens, device=query.device)
    # The last block may be short: the others still have that many tokens outside.
    count = min(keys, max(tokens - block_size, 0))
    return chance.masked_fill(own, -math.inf).topk(count, dim=-1).indices


class RandomKeys(nn.Module):
    """`lln.LLNKeysCore` that does not look at what it chooses."""

    def __init__(self, core: LLNKeysCore) -> None:
        """Keep the core for its settings and its sources of α, β and the offset."""
        super().__init__()
        self.core = core

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """``[B, H, T, D]`` three times → ``[B, H, T, D]``."""
        if key_mask is not None or is_causal:
            raise InvalidInputError(
                "+random draws keys for texts without padding that see both ways; take a method "
                "without it, or a task such as mlm."
            )
        core = self.core
        sides = (query, key, None, core.matching, core.impl)
        alpha, beta, offset = numbers_of_call(core.statistics, core.offset, *sides)
        return lln_keys_attention(
            query,
            key,
            value,
            alpha=alpha,
            beta=beta,
            matching=core.matching,
            block_size=core.block_size,
            keys=random_keys(query.detach(), core.keys, core.block_size),
            offset=offset,
            impl=core.impl,
        )


def choose_at_random(model: nn.Module) -> None:
    """Let every layer with exact keys draw them."""
    for module in list(model.modules()):
        if isinstance(module, LLNKeys):
            assert isinstance(module.attention, LLNKeysCore)
            module.attention = RandomKeys(module.attention)
