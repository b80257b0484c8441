"""One softmax over a query's window, the first tokens of its sequence and the pages it chose.

    out_i = softmax(scale · q_i·k_j) · v_j    over |i − j| ≤ w, the first s tokens, and the tokens
                                              of the pages that the query chose (`page_choice`)

A token that lies in two of them counts once. Nothing is N × N: rows are cut into tiles, a tile
meets the keys of its windows, and pages are copied for every query.

Dimension legend: B batch, H query heads, Hk key heads, R = H / Hk, T queries, S keys, D head width,
E value width, P pages per query, p tokens in a page, n tiles, c rows in a tile, K keys that a tile
meets in its windows, s sinks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.eager.page_choice import Sight
from lln.eager.products import multiply
from lln.eager.scan import whole_parts
from lln.eager.summary import LOG_ZERO
from lln.tracing import is_compiling

# Rows in a tile: fewer see less that is hidden from them, more make larger products.
_LEAST_TILE, _MOST_TILE = 16, 128
# Numbers of copied pages that are in memory at a time.
_MOST_COPIED = 1 << 24
# Below masked keys: a row whose visible keys are all masked must weigh those, which add nothing.
_UNSEEN = 10 * LOG_ZERO


def attend_pages(
    query: Tensor, key: Tensor, value: Tensor, pages: Tensor, sight: Sight, scale: float
) -> Tensor:
    """The attention above: ``[B, H, T, E]``; a row that sees no valid key gives zeros.

    Args:
        query: ``[B, H, T, D]`` in the accumulation dtype.
        key: ``[B, Hk, S, D]``.
        value: ``[B, Hk, S, E]``.
        pages: int ``[B, Hk, T, P]``, each page once; -1 = none.
        sight: What else a query sees, and how pages lie.
        scale: Factor of the scores.
    """
    batch, heads, tokens, _ = query.shape
    keys, key_heads = key.shape[2], key.shape[1]
    if not query.numel() or not keys:
        nothing = (key.sum() + value.sum()) * 0
        return query[..., :1].expand(-1, -1, -1, value.shape[-1]) * nothing
    if sight.key_mask is not None:
        keep = sight.key_mask[:, None, :, None]
        key, value = torch.where(keep, key, 0.0), torch.where(keep, value, 0.0)
    size = min(max(_LEAST_TILE, 1 << max(sight.window - 1, 0).bit_length()), _MOST_TILE)
    if not is_compiling():
        size = min(size, tokens)
    tiles = whole_parts(tokens + size - 1, size)
    row = torch.arange(tiles * size, device=query.device).clamp(max=tokens - 1).view(tiles, size)
    grouped = (query * scale).unflatten(1, (key_heads, -1)).movedim(2, 3)
    step = tiles
    if not is_compiling():
        copied = size * batch * key_heads * pages.shape[3] * sight.page_size
        step = max(1, _MOST_COPIED // max(copied * (key.shape[3] + value.shape[3]), 1))
    parts = [
        _attend_tiles(grouped, key, value, pages, row[first : first + step], sight)
        for first in (range(0, tiles, step) if step < tiles else (0,))
    ]
    out = torch.cat(parts, 2)
    return out[:, :, :tokens].movedim(3, 2).reshape(batch, heads, tokens, -1)


def _attend_tiles(
    query: Tensor, key: Tensor, value: Tensor, pages: Tensor, row: Tensor, sight: Sight
) -> Tensor:
    """The rows ``[n, c]`` of some tiles, one behind the other: ``[B, Hk, n · c, R, E]``.

    Queries are scaled, and grouped by the key head they read, ``[B, Hk, T, R, D]``.
    """
    tokens, keys, size = query.shape[2], key.shape[2], row.shape[1]
    rows, device = _taken(query, row), query.device
    place = row + (keys - tokens)
    reach = size + sight.window * (1 if sight.is_causal else 2)
    met = place[:, :1] - sight.window + torch.arange(reach, device=device)
    there = met.clamp(0, keys - 1)
    near_keys, near_values = _taken(key, there), _taken(value, there)
    near = multiply(rows.flatten(3, 4), near_keys.mT).unflatten(3, (size, -1))
    distance = (place.unsqueeze(-1) - met.unsqueeze(-2))[None]
    at = met[None, :, None].expand_as(distance)
    inside = (at >= 0) & (at < keys) & sight.is_near(distance)
    if sight.is_causal:
        inside = inside & (distance >= 0)
    hidden = torch.where(inside, LOG_ZERO, _UNSEEN).to(near.dtype)[:, None, :, :, None]
    near = torch.where(_lifted(sight.is_visible(distance, at, keys) & inside), near, hidden)

    first = sight.first(device)
    sink = first[:, None] + torch.arange(sight.sinks, device=device)
    sink_keys, sink_values = (_rows_at(side, sink[:, None]) for side in (key, value))
    far = multiply(rows.flatten(2, 4), sink_keys.mT).unflatten(2, rows.shape[2:5])
    at = sink[:, None, None].expand(-1, *row.shape, -1)
    distance = place[None, ..., None] - at
    seen = sight.is_visible(distance, at, keys) & ~sight.is_near(distance)
    far = torch.where(_lifted(seen), far, _UNSEEN)

    chosen = _taken(pages, row)
    within = torch.arange(sight.page_size, device=device)
    at = (first[:, None, None, None, None] + chosen * sight.page_size).unsqueeze(-1) + within
    at = torch.where(chosen.unsqueeze(-1) < 0, -1, at).flatten(4)
    page_keys, page_values = (_rows_at(side, at) for side in (key, value))
    distance = place[None, None, ..., None] - at
    seen = sight.is_visible(distance, at, keys) & ~sight.is_near(distance)
    seen = seen & (at >= first[:, None, None, None, None] + sight.sinks)
    paged = torch.where(seen.unsqueeze(-2), rows @ page_keys.mT, _UNSEEN)

    sizes = [near.shape[-1], far.shape[-1], paged.shape[-1]]
    near, far, paged = torch.cat([near, far, paged], -1).softmax(-1).split(sizes, -1)
    out = multiply(near.flatten(3, 4), near_values).unflatten(3, (size, -1)) + paged @ page_values
    out = out + multiply(far.flatten(2, 4), sink_values).unflatten(2, rows.shape[2:5])
    return out.flatten(2, 3)


def _taken(side: Tensor, rows: Tensor) -> Tensor:
    """Rows ``[n, c]`` of ``[B, Hk, T, …]``, by a selection whose gradient is added in order."""
    return side.index_select(2, rows.flatten()).unflatten(2, rows.shape)


def _lifted(seen: Tensor) -> Tensor:
    """``[b, n, c, K]``, the same for all heads: ``[b, 1, n, c, 1, K]``."""
    return seen[:, None, :, :, None]


def _rows_at(side: Tensor, at: Tensor) -> Tensor:
    """The rows of ``[B, Hk, S, D]`` at ``[b, 1 or Hk, …]``: ``[B, Hk, …, D]``."""
    known = at.clamp(0, side.shape[2] - 1).expand(*side.shape[:2], *at.shape[2:])
    picked = known.flatten(2).unsqueeze(-1).expand(-1, -1, -1, side.shape[3])
    return side.gather(2, picked).unflatten(2, at.shape[2:])
