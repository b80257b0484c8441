"""What kind of mask a call of attention was given. Imports no model library."""

from __future__ import annotations

import torch
from torch import Tensor

from lln.errors import InvalidInputError


def check_mask(mask: object) -> Tensor | None:
    """Refuse masks that are not ours."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        seen = f"{mask.dim()}-D" if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidInputError(
            f"attention_mask is {seen}: LLN attention never forms the N×N scores that such a mask "
            "belongs to; pass a 2-D [B, S] padding mask."
        )
    return mask


def is_packed(mask: Tensor | None) -> bool:
    """Whether a mask numbers packed sequences."""
    return mask is not None and mask.dtype == torch.int64
