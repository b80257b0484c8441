"""How much of a model's output a conversion kept, as a mean cosine with the original's.

Dimension legend: B batch, T tokens, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.integrations.recovery_loss import mask_of, mean_hidden

HIDDEN = "mean hidden state"
LOGITS = "logits"


def compared(outputs: Any) -> str:
    """What `quality` compares of a model's outputs, in words."""
    return LOGITS if "logits" in outputs else HIDDEN


def quality(found: Any, expected: Any, inputs: dict[str, Tensor]) -> float:
    """The mean cosine of a model's output with the original's.

    Of logits ``[B, T, C]``: over the valid tokens; ``[B, C]``: over the samples; a single channel:
    of all samples as one vector. Of a model without a head: the mean hidden state of every sample,
    over its valid tokens, averaged over the samples.

    Args:
        found: The converted model's outputs.
        expected: The original's.
        inputs: What both ran on.
    """
    sides = []
    for outputs in (found, expected):
        side = outputs[compared(expected)] if compared(expected) == LOGITS else outputs[0]
        mask = mask_of(inputs, side) if side.dim() > 2 else None
        side = side.double()
        if compared(expected) == HIDDEN and side.dim() > 2:
            side = mean_hidden(side.flatten(2), mask)
        elif mask is not None:
            side = side[mask]
        # One number per sample has no direction, all of them together have.
        sides.append(side.flatten() if side.shape[-1] == 1 else side)
    return torch.as_tensor(F.cosine_similarity(*sides, dim=-1)).mean().item()
