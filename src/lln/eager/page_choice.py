"""Which pages a query reads beside its window and the sinks.

A page is p tokens in a row, counted from the first token that is not masked. The query heads of a
key head read the same pages:

    a_hij = scale · q_hi·k_j               over the heads h of a key head
    m_hi = max_j a_hij                     over the tokens that are near or sinks
    score_i(page) = max_hj (a_hij - m_hi)  over its tokens that are neither, and visible

The best token counts, not the mean: the mean loses what a text has to be searched for. m makes the
heads comparable, as their normalisers would, without an exponential per pair.

Dimension legend: B batch, H query heads, Hk key heads, R = H / Hk, T queries, S keys, r width of
what is compared, P pages per query, p tokens in a page, c rows in a chunk; b is 1 or B.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.checks.call import Call
from lln.eager.diagonal import first_tokens
from lln.eager.selection import largest
from lln.tracing import is_compiling

# Scores that are in memory at a time.
_MOST_SCORES = 1 << 24


class Sight(NamedTuple):
    """What a query sees beside its pages, and where pages lie.

    Attributes:
        window: Tokens to each side of its own, or before its own if causal.
        sinks: How many first tokens of the sequence.
        page_size: p.
        key_mask: bool ``[B, S]``, True = attend.
        is_causal: Whether a query sees only its own and earlier tokens; queries are the last of the
            keys' positions.
    """

    window: int
    sinks: int
    page_size: int
    key_mask: Tensor | None
    is_causal: bool

    @classmethod
    def of(cls, call: Call) -> Sight:
        """What a query of a dense call sees."""
        return cls(**call.sight)

    def first(self, device: torch.device) -> Tensor:
        """Where sequences begin: int ``[b]``."""
        if self.key_mask is None:
            return torch.zeros(1, dtype=torch.int64, device=device)
        return first_tokens(self.key_mask)

    def is_near(self, distance: Tensor) -> Tensor:
        """Whether a query sees a key in its window, from its place minus the key's."""
        return (distance if self.is_causal else distance.abs()) <= self.window

    def is_visible(self, distance: Tensor, at: Tensor, keys: int) -> Tensor:
        """Whether a query may see a key at all.

        Args:
            distance: int ``[b or B, …]``, the query's place minus the key's.
            at: int ``[b or B, …]``, the key's place, which may lie outside the sequence.
            keys: S.
        """
        seen = (at >= 0) & (at < keys)
        if self.is_causal:
            seen = seen & (distance >= 0)
        if self.key_mask is None:
            return seen
        known = at.clamp(0, keys - 1).expand(len(self.key_mask), *at.shape[1:])
        return seen & self.key_mask.gather(1, known.flatten(1)).view(known.shape)


@torch.no_grad()
def choose_pages(query: Tensor, key: Tensor, pages: int, sight: Sight, scale: float) -> Tensor:
    """The pages of every query and key head: int64 ``[B, Hk, T, P]``, ascending, -1 = none.

    Args:
        query: ``[B, H, T, r]``.
        key: ``[B, Hk, S, r]``; masked ones are zero.
        pages: P.
        sight: What is seen without being chosen.
        scale: Factor of the scores.
    """
    batch, heads, tokens, _ = query.shape
    keys, page_size, device = key.shape[2], sight.page_size, query.device
    shared = heads // max(key.shape[1], 1)
    if pages == 0 or not query.numel() or not keys:
        shape = (batch, key.shape[1], tokens, pages)
        return torch.full(shape, -1, dtype=torch.int64, device=device)
    length = -(-keys // page_size) * page_size
    within = torch.arange(length, device=device)
    at = sight.first(device)[:, None] + within
    place = torch.arange(keys - tokens, keys, device=device)
    # From the first token on, so that pages are stretches of equal length.
    known = at.clamp(max=keys - 1)[:, None, :, None]
    key = key.gather(2, known.expand(*key.shape[:2], -1, key.shape[3]))
    grouped = (query * scale).unflatten(1, (-1, shared))
    rows = tokens
    if not is_compiling():
        rows = max(1, _MOST_SCORES // (batch * heads * length))
    found = []
    for start in range(0, tokens, rows) if rows < tokens else (0,):
        part = slice(start, start + rows) if rows < tokens else slice(None)
        distance = place[part, None] - at[:, None]
        visible = sight.is_visible(distance, at[:, None].expand_as(distance), keys)
        exact = (visible & (sight.is_near(distance) | (within < sight.sinks)))[:, None]
        scores = _scores(grouped[:, :, :, part], key, exact)
        scores = scores.masked_fill(~visible[:, None] | exact, -torch.inf)
        best = scores.unflatten(-1, (-1, page_size)).amax(-1)
        # A trace must hold where there are fewer pages than asked for, too.
        missing = pages if is_compiling() else max(pages - best.shape[-1], 0)
        found.append(largest(F.pad(best, (0, missing), value=-torch.inf), pages))
    return torch.cat(found, 2)


def _scores(query: Tensor, key: Tensor, exact: Tensor) -> Tensor:
    """Every token's best score among the heads of a key head: ``[B, Hk, c, S]``.

    Args:
        query: ``[B, Hk, R, c, r]``, scaled.
        key: ``[B, Hk, S, r]``.
        exact: bool ``[b, 1, c, S]``, which tokens are near or sinks.
    """
    if query.shape[2] == 1:
        return query[:, :, 0] @ key.mT
    scores = (query.flatten(2, 3) @ key.mT).unflatten(2, (query.shape[2], -1))
    level = scores.masked_fill(~exact.unsqueeze(2), -torch.inf).amax(-1, keepdim=True)
    return (scores - torch.where(level > -torch.inf, level, 0.0)).amax(2)
