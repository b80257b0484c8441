"""Block-diagonal softmax attention: the short-range half of Figure 3's layer.

Dimension legend: B batch, H heads, T tokens, D head width, E value width, n blocks, b block size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lln.eager.products import multiply
from lln.eager.scan import whole_parts
from lln.eager.summary import LOG_ZERO
from lln.eager.whole_division import divided
from lln.tracing import always_holds, is_compiling, values_are_readable


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
        scores = scores.masked_fill(~token_mask.unsqueeze(-2), LOG_ZERO)
    if is_causal:
        tokens = query.shape[-2]
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
        # Below masked keys: a row whose visible keys are all masked must weigh those.
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
    first: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Softmax attention within consecutive blocks of a sequence; the last one may be short.

    Blocks are counted from the first token that is not masked, so that a sequence is cut in the
    same places with padding before it and without.

    Args:
        query: ``[B, H, T, D]`` in the accumulation dtype.
        key: Like query.
        value: ``[B, H, T, E]``.
        block_size: Tokens in a block.
        scale: Factor of the scores; None = 1/√D.
        key_mask: bool ``[B, T]``, True = attend.
        first: int ``[B]``, with a mask: a position where a block begins; None = `first_tokens`.
        is_causal: Whether a token sees only itself and earlier tokens of its block.
    """
    options = {"scale": scale, "is_causal": is_causal}
    gap = None
    if key_mask is not None and query.shape[-2] > 0:
        gap = -(first_tokens(key_mask) if first is None else first) % block_size
        if values_are_readable(gap) and not bool(gap.any()):
            gap = None
    # A trace for every length knows nothing of the length; one for a single length does.
    is_whole = not is_compiling() or always_holds(query.shape[-2] % block_size == 0)
    if gap is None and is_whole:
        return _cut_from_zero(query, key, value, block_size, key_mask, options)
    return _cut_behind_gaps(query, key, value, block_size, key_mask, gap, options)


def first_tokens(key_mask: Tensor) -> Tensor:
    """Position of the first unmasked token of every row ``[B, T]``: int64 ``[B]``; 0 if none."""
    return key_mask.to(torch.uint8).argmax(-1)


def _cut_from_zero(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_size: int,
    key_mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
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
        return attend_blocks(*blocks, token_mask=mask, **options).flatten(-3, -2)

    if whole == tokens:
        return attend(0, tokens, block_size)
    rest = attend(whole, tokens, tokens - whole)
    return rest if whole == 0 else torch.cat([attend(0, whole, block_size), rest], dim=-2)


def _cut_behind_gaps(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_size: int,
    key_mask: Tensor | None,
    gap: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """The same, with a gap of ``[B]`` empty places before every row; None = no gap.

    Tokens are gathered into blocks instead of reshaped: a trace then puts no condition on the
    length, and holds for every length.
    """
    batch, _, tokens, _ = query.shape
    device = query.device
    count = whole_parts(tokens + block_size - 1, block_size)
    within = torch.arange(block_size, device=device)
    place = torch.arange(count, device=device).unsqueeze(-1) * block_size + within
    goal = torch.arange(tokens, device=device).expand(batch, -1)
    if gap is not None:
        place, goal = place - gap[:, None, None], goal + gap[:, None]
    place = place.expand(batch, -1, -1)
    there = (place >= 0) & (place < tokens)
    place = place.clamp(0, tokens - 1)
    sample = torch.arange(batch, device=device)[:, None, None]
    sides = [side.transpose(1, 2)[sample, place].movedim(3, 1) for side in (query, key, value)]
    # The placeholder of a missing query must not reach a gradient.
    sides[0] = torch.where(there[:, None, ..., None], sides[0], 0.0)
    token_mask = there if key_mask is None else there & key_mask[sample, place]
    out = attend_blocks(*sides, token_mask=token_mask[:, None], **options)
    place = (sample[..., 0], divided(goal, block_size), goal % block_size)
    return out.movedim(1, 3)[place].transpose(1, 2)
