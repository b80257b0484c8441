"""How Gaussian queries and keys are: what every closed formula of the paper assumes of them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lln.instruments.attention_inputs import AttentionInputs
from lln.instruments.head_groups import measure_all
from lln.instruments.unmasked_heads import UnmaskedHeads


class Gaussianity(NamedTuple):
    """Shape of the entries of queries and keys, ``[B, H]`` each.

    The keys' mean over tokens is taken out first, because softmax attention does not see it.

    Attributes:
        query_skew: Third standardised moment of all entries; 0 for Gaussian ones.
        query_kurtosis: Fourth standardised moment less 3; 0 for Gaussian entries.
        query_norms: Relative variance of |q|² over tokens, times D/2; 1 for Gaussian entries,
            large where some tokens have much larger queries than others.
        key_skew: Likewise of the keys.
        key_kurtosis: Likewise.
        key_norms: Likewise.
    """

    query_skew: Tensor
    query_kurtosis: Tensor
    query_norms: Tensor
    key_skew: Tensor
    key_kurtosis: Tensor
    key_norms: Tensor


def gaussianity(
    query: Tensor,
    key: Tensor,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Gaussianity:
    """Skew, kurtosis and spread of norms of queries and keys.

    Moment matching and Propositions 3.1 and 4.1 take entries to be independent and Gaussian. Heavy
    tails and token norms that vary move the entropy by several bits against them
    (docs/method.md); `lln.calibrate` does not assume either.

    Args:
        query: As in `entropy`.
        key: As in `entropy`.
        key_mask: As in `entropy`.
        cu_seqlens: As in `entropy`.

    Returns:
        A `Gaussianity` of ``[B, H]`` tensors, float64; NaN where entries do not vary, and as in
        `entropy`.

    Example:
        >>> import torch
        >>> query, key = torch.randn(2, 1, 1, 4096, 64, generator=torch.Generator().manual_seed(0))
        >>> round(gaussianity(query, key).query_kurtosis.item(), 1)
        0.0
    """
    inputs = AttentionInputs(query, key, key_mask=key_mask, cu_seqlens=cu_seqlens)
    return Gaussianity(*measure_all(inputs, _shapes, ((),) * 6))


def _shapes(heads: UnmaskedHeads) -> tuple[Tensor, ...]:
    key = heads.key - heads.key.mean(-2, keepdim=True)
    return (*_shape(heads.query), *_shape(key))


def _shape(entries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Skew, excess kurtosis and spread of norms of ``[G, T, D]``."""
    centred = entries - entries.mean((-2, -1), keepdim=True)
    variance = centred.square().mean((-2, -1))
    skew = centred.pow(3).mean((-2, -1)) / variance**1.5
    kurtosis = centred.pow(4).mean((-2, -1)) / variance**2 - 3
    norms = entries.square().sum(-1)
    spread = norms.var(-1, correction=0) / norms.mean(-1) ** 2
    return skew, kurtosis, spread * entries.shape[-1] / 2
