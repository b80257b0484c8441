"""Softmax attention for the layers of a converted model that keep it.

Such layers get the same 2-D masks as their LLN neighbours, so the N×N mask is made here.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.integrations.masks import is_packed


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    window: int | None = None,
    scaling: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Eq. (1) over the pairs that the model attends to: ``[B, H, T, E]``.

    Args:
        query: ``[B, H, T, D]``; the last T of the S positions.
        key: ``[B, Hk, S, D]``.
        value: ``[B, Hk, S, E]``.
        mask: As `lln.integrations.masks.slicing_mask` returns it.
        is_causal: Whether a query sees only its own and earlier positions.
        window: Pairs further apart than ``window − 1`` are masked.
        scaling: Factor of the scores; None = 1/√D.
        dropout_p: Of the attention weights.
    """
    tokens, keys = query.shape[2], key.shape[2]
    keep = None
    if mask is not None and not is_packed(mask):
        keep = mask[:, None, None, :]
    if is_causal or window is not None:
        place = torch.arange(keys, device=query.device)
        distance = place[keys - tokens :, None] - place
        near = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            near = near & (distance.abs() < window)
        keep = near if keep is None else keep & near
    if mask is not None and is_packed(mask):
        same = (mask[:, None, :, None] == mask[:, None, None, :])[:, :, keys - tokens :]
        keep = same if keep is None else keep & same
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=keep,
        dropout_p=dropout_p,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
