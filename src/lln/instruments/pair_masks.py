"""A mask over pairs of tokens as what an instrument takes: keys to leave out, and causality.

Dimension legend: B batch, H heads, T queries, S keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# e to this power is zero compared with any score: libraries write "masked" as −1e4 or lower.
_MASKED = -1e4


class ReducedMask(NamedTuple):
    """A mask taken apart.

    Attributes:
        key_mask: bool ``[B, S]``, True = attend; None = all keys.
        is_causal: Whether row i sees keys 0 … i only.
        pair_mask: The mask itself, ``[b, h, T, S]``, where the other two cannot express it.
    """

    key_mask: Tensor | None
    is_causal: bool
    pair_mask: Tensor | None


def reduce_mask(mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor) -> ReducedMask:
    """Find the key mask and the causality that a mask over pairs stands for.

    Rows of padded queries are not looked at: libraries fill them as they please.

    Args:
        mask: bool (True = attend) or additive, broadcasts to ``[B, H, T, S]``.
        is_causal: What the call says in addition to the mask.
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, S, D]``.
    """
    if mask is None:
        return ReducedMask(None, is_causal and query.shape[2] > 1, None)
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if mask.dtype == torch.bool:
        keep = mask
    else:
        keep = mask == 0
        if not bool((keep | (mask <= _MASKED)).all()):
            return ReducedMask(None, is_causal, mask)
    tokens, keys = query.shape[2], key.shape[2]
    if keep.shape[1] > 1:
        if not bool((keep == keep[:, :1]).all()):
            return ReducedMask(None, is_causal, mask)
        keep = keep[:, :1]
    keep = keep[:, 0].expand(-1, tokens, keys)
    # The last row sees every valid key, whether or not the mask is causal.
    valid = keep[:, -1:]
    counted = valid.mT if tokens == keys else torch.ones_like(keep[:, :, :1])
    earlier = torch.ones(tokens, keys, dtype=torch.bool, device=mask.device).tril()
    full, causal = (bool(((keep == rows) | ~counted).all()) for rows in (valid, valid & earlier))
    if (full and not is_causal) or causal:
        key_mask = valid[:, 0].expand(query.shape[0], keys)
        return ReducedMask(None if bool(key_mask.all()) else key_mask, not full or is_causal, None)
    return ReducedMask(None, is_causal, mask)


def shown(mask: Tensor) -> Tensor:
    """Which pairs a mask lets through at all: bool, shaped like it."""
    return mask if mask.dtype == torch.bool else mask > _MASKED
