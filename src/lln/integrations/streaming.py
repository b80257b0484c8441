"""Causal attention that continues after earlier tokens: decoding, and prompts in pieces.

The long-range part needs nothing of the past but its `KeySummary`; the short-range part needs the
keys of the unfinished diagonal block. Both have a fixed size.

Dimension legend: B batch, H query heads, Hk key heads, T new tokens, D head width, E value width,
b block size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.checks.call import fit_blocks
from lln.checks.printing import brief
from lln.eager.diagonal import block_diagonal, first_tokens
from lln.eager.run import repeat_heads
from lln.eager.summary import LOG_ZERO, KeySummary
from lln.functional.dense import block_diagonal_attention, lln_attention
from lln.precision import accumulation_dtype


@dataclass
class Past:
    """What is kept of the tokens seen so far.

    Attributes:
        log_mass: ``[B, H, D]``, of the summary of all keys.
        centroid: ``[B, H, D, E]``.
        block_key: ``[B, Hk, n, D]`` with n < b, the last keys; None without a diagonal part.
        block_value: ``[B, Hk, n, E]``.
        block_mask: bool ``[B, n]``, which of them are in the unfinished diagonal block and count.
        length: int ``[B]``, positions since the first token that was not masked.
    """

    log_mass: Tensor | None = None
    centroid: Tensor | None = None
    block_key: Tensor | None = None
    block_value: Tensor | None = None
    block_mask: Tensor | None = None
    length: Tensor | None = None

    def __repr__(self) -> str:
        """By shapes."""
        return brief(self, vars(self))

    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by name."""
        found = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: tensor for name, tensor in found if tensor is not None}


def long_range(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: Past,
    alpha: float | Tensor,
    beta: float | Tensor,
    key_mask: Tensor | None,
    impl: str,
) -> Tensor:
    """Causal LLN attention, Eq. (8), of new tokens over the past and themselves; updates the past.

    Rows of a piece of several tokens merge two attentions by their log-masses: over the past's
    slots, and causally over the piece itself.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, T, D]``.
        value: ``[B, Hk, T, E]``.
        past: Of the earlier tokens.
        alpha: Broadcasts to ``[B, H, 1, 1]``.
        beta: Likewise.
        key_mask: bool ``[B, T]``.
        impl: As in `lln.lln_attention`.
    """
    options: dict[str, Any] = {"alpha": alpha, "beta": beta, "key_mask": key_mask, "impl": impl}
    within = partial(lln_attention, query, key, value, is_causal=True, enable_gqa=True, **options)
    summary = KeySummary.of(key, value, beta, key_mask)
    if past.log_mass is None or past.centroid is None:
        past.log_mass, past.centroid = summary.log_mass, summary.centroid
        return within()
    before = KeySummary(past.log_mass, past.centroid, beta)
    after = before.merge(summary)
    past.log_mass, past.centroid = after.log_mass, after.centroid
    if query.shape[2] == 1:
        return after.read(query, alpha)
    inside, outside = within(), before.read(query, alpha)
    log_mass = repeat_heads(before.log_mass, query.shape[1])
    past_mass = (query.to(log_mass.dtype) * alpha + log_mass.unsqueeze(-2)).logsumexp(-1)
    weight = torch.sigmoid(past_mass - _own_mass(query, key, alpha, beta, key_mask))
    return (inside + weight.unsqueeze(-1) * (outside - inside)).to(query.dtype)


def short_range(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: Past,
    block_size: int,
    key_mask: Tensor | None,
) -> Tensor:
    """Causal block-diagonal attention of new tokens; keeps the unfinished block in the past.

    Blocks of b tokens are counted from the first token that was not masked, as they are without a
    cache. The other arguments are as in `long_range`.
    """
    tokens, begun = query.shape[2], past.length
    kept = keep_block(key, value, past, block_size, key_mask)
    if begun is None:
        options: dict[str, Any] = {"block_size": block_size, "key_mask": key_mask}
        sides = (query, key, value)
        return block_diagonal_attention(*sides, is_causal=True, enable_gqa=True, **options)
    key, value, key_mask = kept
    if tokens == 1:
        # All that is kept and counts lies in the token's own block.
        keep = key_mask[:, None, :, None]
        return F.scaled_dot_product_attention(
            query,
            torch.where(keep, key, 0.0),
            torch.where(keep, value, 0.0),
            attn_mask=key_mask[:, None, None, :],
            enable_gqa=query.shape[1] != key.shape[1],
        )
    earlier = key.shape[2] - tokens
    # A row that has begun goes on with its block; another begins with its first token.
    first = torch.where(begun > 0, earlier - begun, first_tokens(key_mask))
    dtype = accumulation_dtype(query.dtype)
    out = block_diagonal(
        F.pad(query, (0, 0, earlier, 0)).to(dtype),
        repeat_heads(key, query.shape[1]).to(dtype),
        repeat_heads(value, query.shape[1]).to(dtype),
        fit_blocks(block_size, 1, key.shape[2])[0],
        key_mask=key_mask,
        first=first,
        is_causal=True,
    )
    return out[:, :, earlier:].to(query.dtype)


def keep_block(
    key: Tensor, value: Tensor, past: Past, block_size: int, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep of the keys so far those of the unfinished block; returns all that may matter now.

    Rows of a batch may have begun at different tokens, so their unfinished blocks differ in length:
    as many keys are kept as the longest can have, and the mask says which of them belong to it.

    Returns:
        Keys, values and mask of what was kept and of the new tokens, one behind the other.
    """
    batch, _, tokens, _ = key.shape
    if key_mask is None:
        key_mask = torch.ones(batch, tokens, dtype=torch.bool, device=key.device)
    # A row begins with its first token; masked ones before it are no part of it.
    length = torch.where(key_mask.any(-1), tokens - first_tokens(key_mask), 0)
    if past.length is not None:
        length = torch.where(past.length > 0, past.length + tokens, length)
    past.length = length
    if past.block_key is not None and past.block_value is not None and past.block_mask is not None:
        key = torch.cat([past.block_key, key], dim=2)
        value = torch.cat([past.block_value, value], dim=2)
        key_mask = torch.cat([past.block_mask, key_mask], dim=1)
    kept = min(key.shape[2], block_size - 1)
    # How far from the end each of them is, the last one 1.
    back = torch.arange(kept, 0, -1, device=key.device)
    # Copies: views would keep the whole prompt alive.
    past.block_key = key[:, :, key.shape[2] - kept :].clone()
    past.block_value = value[:, :, key.shape[2] - kept :].clone()
    unfinished = back <= (length % block_size).unsqueeze(-1)
    past.block_mask = key_mask[:, key.shape[2] - kept :] & unfinished
    return key, value, key_mask


def _own_mass(
    query: Tensor,
    key: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    key_mask: Tensor | None,
) -> Tensor:
    """Log of every row's normaliser over the new tokens up to itself, ``[B, H, T]``."""
    dtype = accumulation_dtype(query.dtype)
    exponent = repeat_heads(key, query.shape[1]).to(dtype) * beta
    if key_mask is not None:
        exponent = torch.where(key_mask[:, None, :, None], exponent, LOG_ZERO)
    return (query.to(dtype) * alpha + exponent.logcumsumexp(-2)).logsumexp(-1)
