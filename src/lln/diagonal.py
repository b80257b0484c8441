"""Block-diagonal softmax attention: the short-range half of Figure 3's layer.

Dimension legend: B batch, H heads, T tokens, D head width, E value width, n blocks, b block size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.products import multiply
from lln.scan import whole_parts
from lln.summary import LOG_ZERO


def attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    token_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Softmax attention, Eq. (1), inside every block: ``[..., n, b, E]``.

    Args:
        query: ``[..., n, b, D]`` in the accumulation dtype.
        key: Like query.
        value: ``[..., n, b, E]``.
        scale: Factor of the scores; None = 1/√D.
        token_mask: bool, broadcasts to ``[..., n, b]``; a block without a valid key gives zeros.
        is_causal: Whether a token sees only itself and earlier tokens of its block.
    """
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if token_mask is not None:
        keep = token_mask.unsqueeze(-1)
        key, value = torch.where(keep, key, 0.0), torch.where(keep, value, 0.0)
    scores = multiply(query * scale, key.mT)
    if token_mask is not None:
        scores = torch.where(token_mask.unsqueeze(-2), scores, LOG_ZERO)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        # Below LOG_ZERO, so that a row whose visible keys are all masked stays on those zeros.
        scores = scores.masked_fill(later, 10 * LOG_ZERO)
    return multiply(scores.softmax(-1), value)


def block_diagonal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_size: int,
    *,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Softmax attention within consecutive blocks of a sequence; the last one may be short.

    Args:
        query: ``[B, H, T, D]`` in the accumulation dtype.
        key: Like query.
        value: ``[B, H, T, E]``.
        block_size: Tokens in a block.
        scale: Factor of the scores; None = 1/√D.
        key_mask: bool ``[B, T]``, True = attend.
        is_causal: Whether a token sees only itself and earlier tokens of its block.
    """
    tokens = query.shape[-2]
    token_mask = None if key_mask is None else key_mask[:, None, :]
    whole = tokens - tokens % block_size

    def attend(start: int, end: int, size: int) -> Tensor:
        blocks = (
            tensor[..., start:end, :].unflatten(-2, (-1, size)) for tensor in (query, key, value)
        )
        mask = None
        if token_mask is not None:
            mask = token_mask[..., start:end].unflatten(-1, (-1, size))
        out = attend_blocks(*blocks, scale=scale, token_mask=mask, is_causal=is_causal)
        return out.flatten(-3, -2)

    if torch.compiler.is_compiling():
        # A trace must hold for every length: pad instead of asking whether a short block is left.
        padding = whole_parts(tokens, block_size) * block_size - tokens
        query, key, value = (F.pad(side, (0, 0, 0, padding)) for side in (query, key, value))
        if token_mask is None:
            token_mask = torch.ones(1, 1, tokens, dtype=torch.bool, device=query.device)
        token_mask = F.pad(token_mask, (0, padding))
        return attend(0, tokens + padding, block_size)[..., :tokens, :]
    if whole == tokens:
        return attend(0, tokens, block_size)
    rest = attend(whole, tokens, tokens - whole)
    return rest if whole == 0 else torch.cat([attend(0, whole, block_size), rest], dim=-2)


def asks_gradient(mix: float | Tensor) -> bool:
    """Whether a weight is one that learns; the same in a checkpoint's first pass and its second."""
    return isinstance(mix, Tensor) and mix.requires_grad


def has_channels(mix: float | Tensor) -> bool:
    """Whether a weight differs from channel to channel."""
    return isinstance(mix, Tensor) and mix.dim() > 0 and mix.shape[-1] != 1
