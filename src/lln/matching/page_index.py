"""Projections that pages are chosen by: half as many numbers per token, nearly the same choice.

For C_q the second moments of the queries of a key head, averaged over its query heads, and C_k
those of its centred keys, without the first tokens, which are outliers,

    U S Vᵀ = svd(C_q^{1/2} C_k^{1/2})      A = C_q^{-1/2} U_r S_r      B = C_k^{-1/2} V_r

make (q A)·(k B) of rank r what comes nearest to q·k in the mean square, up to a shift per query.

Dimension legend: B batch, H query heads, Hk key heads, T queries, S keys, D head width, r rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lln import checks
from lln.eager.diagonal import first_tokens
from lln.errors import InvalidInputError
from lln.precision import accumulation_dtype, without_autocast

# Directions with less variance than this, relative to the largest, hold rounding and little else.
_LEAST_VARIANCE = 1e-6
# Tokens per direction to find: with fewer, what is found is as much the text's as the model's.
_FEW = 16


class PageIndex(NamedTuple):
    """What `lln.page_attention` may choose pages by: fewer numbers per token than a key has.

    Example:
        >>> import lln, torch
        >>> query, key, value = torch.randn(3, 1, 2, 200, 16)
        >>> choice = lln.PageIndex.of(query, key)(query, key)
        >>> choice[1].shape
        torch.Size([1, 2, 200, 8])
        >>> lln.page_attention(query, key, value, pages=2, choice=choice).shape
        torch.Size([1, 2, 200, 16])

    Attributes:
        query: A, ``[Hk, D, r]``.
        key: B, ``[Hk, D, r]``.
    """

    query: Tensor
    key: Tensor

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        rank: int | None = None,
        *,
        sinks: int = 16,
        key_mask: Tensor | None = None,
    ) -> PageIndex:
        """Find the projections on activations of a real model.

        Args:
            query: ``[B, H, T, D]``.
            key: ``[B, Hk, T, D]``; H a multiple of Hk.
            rank: r, at most D; None = half of it.
            sinks: How many first tokens of every sequence are left out of the keys.
            key_mask: bool ``[B, T]``, True = attend; it also says which queries count.
        """
        checks.check_qkv(query, key, key, layout="dense", enable_gqa=True)
        checks.check_self_attention(query, key, "PageIndex.of")
        checks.check_key_mask(key_mask, key)
        checks.check_count("sinks", sinks, 0)
        if rank is not None:
            checks.check_count("rank", rank)
        with torch.no_grad(), without_autocast(query):
            return cls(*_fit(query, key, rank or max(key.shape[-1] // 2, 1), key_mask, sinks))

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The argument ``choice``, ``[B, H, T, r]`` and ``[B, Hk, S, r]``, without gradient."""
        return self.of_queries(query), self.of_keys(key)

    def of_queries(self, query: Tensor) -> Tensor:
        """``[B, H, T, D]`` → ``[B, H, T, r]`` in the same dtype."""
        grouped = query.unflatten(1, (len(self.query), -1))
        return _projected(grouped, self.query[:, None]).flatten(1, 2)

    def of_keys(self, key: Tensor) -> Tensor:
        """``[B, Hk, S, D]`` → ``[B, Hk, S, r]`` in the same dtype."""
        return _projected(key, self.key)


@torch.no_grad()
def _projected(side: Tensor, projection: Tensor) -> Tensor:
    """Not in half precision, where what the projection takes away would drown what it keeps."""
    with without_autocast(side):
        wide = accumulation_dtype(side.dtype)
        return (side.to(wide) @ projection.to(wide)).to(side.dtype)


def doubts_of_projections(tokens: int, rank: int) -> list[str]:
    """A sentence that warns of projections found on few tokens."""
    if tokens >= _FEW * rank:
        return []
    return [
        f"{tokens} tokens are few for projections of rank {rank}: the pages they choose may be the "
        f"wrong ones; calibrate on {_FEW * rank} tokens or more."
    ]


def _fit(
    query: Tensor, key: Tensor, rank: int, key_mask: Tensor | None, sinks: int
) -> tuple[Tensor, Tensor]:
    """A and B, float32 ``[Hk, D, r]`` each, where r is at most D."""
    batch, key_heads, tokens, _ = key.shape
    keep = key_mask
    if keep is None:
        keep = torch.ones(batch, tokens, dtype=torch.bool, device=key.device)
    after = torch.arange(tokens, device=key.device) >= first_tokens(keep)[:, None] + sinks
    # A text of sinks alone has no other keys to go by.
    after = torch.where((keep & after).any(), keep & after, keep)
    # Sample by sample, so that few of the copies in float64 are in memory at a time.
    of_queries = of_keys = torch.zeros((), dtype=torch.float64, device=key.device)
    for own_query, own_key, valid, counted in zip(query, key, keep, after, strict=True):
        grouped = own_query[:, valid].double().unflatten(0, (key_heads, -1)).flatten(1, 2)
        of_queries = of_queries + grouped.mT @ grouped
        own = own_key[:, counted].double()
        centred = own - own.mean(1, keepdim=True) if own.shape[1] else own
        of_keys = of_keys + centred.mT @ centred
    if not bool((of_queries.isfinite() & of_keys.isfinite()).all()):
        raise InvalidInputError("queries and keys must be finite to find projections on.")
    query_root, query_inverse = _roots(of_queries)
    key_root, key_inverse = _roots(of_keys)
    left, size, right = torch.linalg.svd(query_root @ key_root)
    first = query_inverse @ left[..., :rank] * size[..., None, :rank]
    return first.float(), (key_inverse @ right.mT[..., :rank]).float()


def _roots(moments: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric root of ``[Hk, D, D]`` and its inverse; the unit where there is no variance."""
    values, vectors = torch.linalg.eigh(moments)
    largest = values.amax(-1, keepdim=True)
    values = torch.where(largest > 0, values.clamp_min(_LEAST_VARIANCE * largest), 1.0).sqrt()
    scaled = vectors * values[..., None, :]
    return scaled @ vectors.mT, (vectors / values[..., None, :]) @ vectors.mT
