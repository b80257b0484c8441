"""Diagonal blocks that fit no tile of the kernels, by PyTorch's fused softmax attention.

Every block is a head of its own to it. Plain PyTorch would write the matrix of every block to
memory in float32.

Dimension legend: B batch, H query heads, Hk key heads, T tokens, D head width, E value width, b
tokens in a block.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lln.eager.run import repeat_heads
from lln.kernels import limits
from lln.tracing import is_watched

_TYPES = (torch.bfloat16, torch.float16)


def suits(query: Tensor, key_mask: Tensor | None) -> bool:
    """Whether the blocks of a call whose LLN part runs in the kernels are computed this way.

    Half types only, whose error budget it keeps. A compiler would put a condition on the length.
    """
    plain = query.dtype in _TYPES and not is_watched(query)
    return plain and key_mask is None and query.numel() > 0


def attend_large_blocks(
    query: Tensor, key: Tensor, value: Tensor, block_size: int, scale: float, is_causal: bool
) -> Tensor:
    """Softmax attention inside consecutive blocks; the last one may be short: ``[B, H, T, E]``.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, T, D]``.
        value: ``[B, Hk, T, E]``.
        block_size: b.
        scale: Factor of the scores.
        is_causal: Whether a token sees only itself and earlier tokens of its block.
    """
    heads, tokens = query.shape[1:3]
    sides = (query, repeat_heads(key, heads), repeat_heads(value, heads))
    whole = tokens - tokens % block_size
    # A launch has only so many heads, and every block is one.
    most = max(limits.MAX_GRID // heads, 1) * block_size

    def attend(start: int, end: int, size: int) -> Tensor:
        q, k, v = (side[:, :, start:end].unflatten(2, (-1, size)).flatten(1, 2) for side in sides)
        out = scaled_dot_product_attention(q, k, v, scale=scale, is_causal=is_causal)
        return out.unflatten(1, (heads, -1)).flatten(2, 3)

    parts = [attend(at, min(at + most, whole), block_size) for at in range(0, whole, most)]
    if whole < tokens:
        parts.append(attend(whole, tokens, tokens - whole))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
