"""Softmax attention over whichever keys a pattern lets a query see; a query that sees none gets 0.

Dimension legend: B batch, H heads, Q queries, K keys, D head width.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.precision import accumulation_dtype


def masked_softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Softmax over the last axis among allowed entries; a row without one is zeros.

    Args:
        scores: ``[..., K]``.
        allowed: bool, broadcasts to scores; None = every entry.
    """
    if allowed is None:
        return scores.softmax(-1)
    # Not -inf: a row without an allowed key would have NaN in its gradient.
    lowest = torch.finfo(scores.dtype).min
    return scores.masked_fill(~allowed, lowest).softmax(-1).masked_fill(~allowed, 0.0)


def softmax_matrix(query: Tensor, key: Tensor, allowed: Tensor | None) -> Tensor:
    """softmax(QKᵀ/√D) among allowed keys, ``[B, H, Q, K]`` in the accumulation dtype."""
    wide = accumulation_dtype(query.dtype)
    scores = query.to(wide) @ key.to(wide).mT / math.sqrt(query.shape[-1])
    return masked_softmax(scores, allowed)


def attend(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, *, scale: float | None = None
) -> Tensor:
    """softmax(QKᵀ/√D) V among allowed keys, through torch's fused kernels.

    Args:
        query: ``[B, H, Q, D]``.
        key: ``[B, H, K, D]``.
        value: Like key.
        allowed: bool, broadcasts to ``[B, H, Q, K]``; None = every key.
        scale: Instead of 1/√D.
    """
    if allowed is None:
        return F.scaled_dot_product_attention(query, key, value, scale=scale)
    # Fused kernels disagree on rows that see nothing: let them see all, then blank them.
    blind = ~allowed.any(-1, keepdim=True)
    seen = allowed | blind
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)
    return torch.where(blind, 0.0, out)
