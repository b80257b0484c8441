"""Causal attention that goes on where earlier tokens ended: decoding, and prompts in pieces.

The long-range part needs nothing of the past but its `KeySummary`; the short-range part needs the
keys of the unfinished diagonal block. Both have a fixed size.

Dimension legend: B batch, H query heads, Hk key heads, T new tokens, D head width, E value width,
b block size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.attention import block_diagonal_attention, lln_attention
from lln.precision import accumulation_dtype
from lln.printing import brief
from lln.summary import LOG_ZERO, KeySummary


@dataclass
class Past:
    """What is kept of the tokens seen so far.

    Attributes:
        log_mass: ``[B, H, D]``, of the summary of all keys.
        centroid: ``[B, H, D, E]``.
        block_key: ``[B, Hk, n, D]`` with n < b, the unfinished diagonal block; None without one.
        block_value: ``[B, Hk, n, E]``.
        block_mask: bool ``[B, n]``, True = attend.
    """

    log_mass: Tensor | None = None
    centroid: Tensor | None = None
    block_key: Tensor | None = None
    block_value: Tensor | None = None
    block_mask: Tensor | None = None

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
    summary = KeySummary.of(key, value, beta, key_mask)
    if past.log_mass is None or past.centroid is None:
        past.log_mass, past.centroid = summary.log_mass, summary.centroid
        return _within(query, key, value, alpha, beta, key_mask, impl)
    before = KeySummary(past.log_mass, past.centroid, beta)
    after = before.merge(summary)
    past.log_mass, past.centroid = after.log_mass, after.centroid
    if query.shape[2] == 1:
        return after.read(query, alpha)
    inside = _within(query, key, value, alpha, beta, key_mask, impl)
    outside = before.read(query, alpha)
    weight = torch.sigmoid(
        _past_mass(query, before.log_mass, alpha) - _own_mass(query, key, alpha, beta, key_mask)
    )
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

    Blocks are counted from the first position the model was given, padding included, as they are
    without a cache.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, T, D]``.
        value: ``[B, Hk, T, E]``.
        past: Of the earlier tokens.
        block_size: b.
        key_mask: bool ``[B, T]``.
    """
    tokens = query.shape[2]
    if key_mask is None:
        key_mask = torch.ones(key.shape[0], tokens, dtype=torch.bool, device=key.device)
    if past.block_key is not None and past.block_value is not None and past.block_mask is not None:
        key = torch.cat([past.block_key, key], dim=2)
        value = torch.cat([past.block_value, value], dim=2)
        key_mask = torch.cat([past.block_mask, key_mask], dim=1)
    keys = key.shape[2]
    if tokens == 1:
        # All that is kept lies in the token's own block.
        keep = key_mask[:, None, :, None]
        out = F.scaled_dot_product_attention(
            query,
            torch.where(keep, key, 0.0),
            torch.where(keep, value, 0.0),
            attn_mask=key_mask[:, None, None, :],
            enable_gqa=query.shape[1] != key.shape[1],
        )
    else:
        padded = F.pad(query, (0, 0, keys - tokens, 0))
        out = block_diagonal_attention(
            padded,
            key,
            value,
            block_size=block_size,
            key_mask=key_mask,
            is_causal=True,
            enable_gqa=True,
        )[:, :, keys - tokens :]
    keep_block(key, value, past, block_size, key_mask)
    return out


def keep_block(
    key: Tensor, value: Tensor, past: Past, block_size: int, key_mask: Tensor | None
) -> None:
    """Keep of keys that start a block ``[B, Hk, n, D]`` those of the unfinished one."""
    keys = key.shape[2]
    if key_mask is None:
        key_mask = torch.ones(key.shape[0], keys, dtype=torch.bool, device=key.device)
    finished = keys - keys % block_size
    # A copy: a view would keep the whole prompt alive.
    past.block_key = key[:, :, finished:].clone()
    past.block_value = value[:, :, finished:].clone()
    past.block_mask = key_mask[:, finished:].clone()


def _within(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    key_mask: Tensor | None,
    impl: str,
) -> Tensor:
    return lln_attention(
        query,
        key,
        value,
        alpha=alpha,
        beta=beta,
        key_mask=key_mask,
        is_causal=True,
        enable_gqa=True,
        impl=impl,
    )


def _past_mass(query: Tensor, log_mass: Tensor, alpha: float | Tensor) -> Tensor:
    """Log of every row's normaliser over the past, ``[B, H, T]``."""
    if log_mass.shape[1] != query.shape[1]:
        log_mass = log_mass.repeat_interleave(query.shape[1] // log_mass.shape[1], 1)
    return (query.to(log_mass.dtype) * alpha + log_mass.unsqueeze(-2)).logsumexp(-1)


def _own_mass(
    query: Tensor,
    key: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    key_mask: Tensor | None,
) -> Tensor:
    """Log of every row's normaliser over the new tokens up to itself, ``[B, H, T]``."""
    dtype = accumulation_dtype(query.dtype)
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    exponent = key.to(dtype) * beta
    if key_mask is not None:
        exponent = torch.where(key_mask[:, None, :, None], exponent, LOG_ZERO)
    return (query.to(dtype) * alpha + exponent.logcumsumexp(-2)).logsumexp(-1)
