"""Attention dropout where the N×N weights are never formed: whole keys are dropped."""

from __future__ import annotations

import torch
from torch import Tensor


def drop_keys(value: Tensor, dropout_p: float) -> Tensor:
    """Drop whole columns of the attention matrix and rescale the others.

    Softmax attention drops single entries of P. P is never formed here, so a key is dropped for
    all queries of its head at once: ``out = P · diag(kept / (1 − p)) · v``. The normaliser is left
    alone, so the expectation over masks is the output without dropout, as with entry dropout; the
    noise of different rows is correlated.

    Args:
        value: ``[..., S, E]``.
        dropout_p: Probability that a key is dropped.
    """
    if dropout_p == 0.0:
        return value
    keep = torch.empty(value.shape[:-1], dtype=torch.float32, device=value.device)
    keep = keep.bernoulli_(1.0 - dropout_p).unsqueeze(-1).bool()
    return torch.where(keep, value / (1.0 - dropout_p), 0.0)
