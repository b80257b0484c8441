"""Which tokens of a model's output count, and their mean. Imports no model library."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def mask_of(inputs: dict[str, Any], like: Tensor) -> Tensor | None:
    """The valid tokens, if the tensor has as many."""
    mask = inputs.get("attention_mask")
    return mask.bool() if mask is not None and mask.shape == like.shape[:2] else None


def mean_hidden(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the valid tokens, ``[B, width]``."""
    if mask is None:
        return hidden.mean(1)
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1).clamp_min(1)
