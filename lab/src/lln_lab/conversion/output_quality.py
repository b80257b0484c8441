"""How much of a model's output a conversion kept, as a mean cosine with the original's.

Dimension legend: B batch, T tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

_HIDDEN = "last_hidden_state"


def compared(outputs: Any) -> str:
    """What `quality` compares of a model's outputs, in words."""
    name = _main(outputs)
    return "mean hidden state" if name == _HIDDEN else name.replace("_", " ")


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
    name = _main(expected)
    sides: list[Tensor] = []
    for outputs in (found, expected):
        side = (outputs[name] if name in outputs else outputs[0]).double()
        mask = mask_of(inputs, side)
        if name == _HIDDEN and side.dim() > 2:
            side = mean_hidden(side.flatten(2), mask)
        elif side.dim() > 2 and mask is not None:
            side = side[mask]
        elif name != "logits" and mask is not None:
            # One number per token, as where an answer starts.
            side = side.masked_fill(~mask, 0.0)
        # One number per sample has no direction, all of them together have.
        sides.append(side.flatten() if side.shape[-1] == 1 else side)
    return F.cosine_similarity(sides[0], sides[1], dim=-1).mean().item()


def _main(outputs: Any) -> str:
    """The name of what a model is for: its logits, else what it returns first."""
    names = list(outputs) if isinstance(outputs, Mapping) else [_HIDDEN]
    return next((name for name in ("logits", _HIDDEN) if name in names), names[0])


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
