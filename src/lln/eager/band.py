"""Softmax inside a sliding window: every row sees the tokens at most ``window`` away from its own.

Rows are cut into chunks, and each chunk meets the keys that its rows can see: nothing is N × N.

Dimension legend: B batch, H heads, T tokens, D head width, E value width, n chunks, c rows in a
chunk, K keys that a chunk meets.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.eager.products import multiply
from lln.eager.scan import whole_parts
from lln.eager.summary import LOG_ZERO
from lln.tracing import is_compiling

# Rows in a chunk: fewer see less that is hidden from them, more make larger products.
LEAST_CHUNK, MOST_CHUNK = 16, 128
# Further away from every token than any window reaches.
NOWHERE = -(2**40)


def attend_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    *,
    scale: float,
    key_mask: Tensor | None = None,
    places: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Softmax attention, Eq. (1), over the keys of every row's window: ``[B, H, T, E]``.

    Args:
        query: ``[B, H, T, D]`` in the accumulation dtype.
        key: Like query.
        value: ``[B, H, T, E]``.
        window: How many tokens a row sees before its own, and behind it unless ``is_causal``.
        scale: Factor of the scores.
        key_mask: bool ``[B, T]``, True = attend; a row that sees no key gives zeros.
        places: int ``[T]``, where the tokens stand (`places_of`); None = one behind the other.
        is_causal: Whether a row sees only its own and earlier tokens.
    """
    tokens, device = query.shape[-2], query.device
    size = min(max(LEAST_CHUNK, 1 << (window - 1).bit_length()), MOST_CHUNK)
    reach = size + window + (0 if is_causal else window)

    def rows(side: Tensor, nothing: int = 0) -> Tensor:
        return _cut(side, size, 0, size, nothing)

    def met(side: Tensor, nothing: int = 0) -> Tensor:
        return _cut(side, size, -window, reach, nothing)

    if places is None:
        places = torch.arange(tokens, device=device)
    place = places.unsqueeze(-1)
    distance = rows(place) - met(place, NOWHERE).mT
    outside = (distance < 0) if is_causal else (distance < -window)
    outside = outside | (distance > window)
    if key_mask is not None:
        keep = key_mask[:, None, :, None]
        key, value = torch.where(keep, key, 0.0), torch.where(keep, value, 0.0)
    scores = multiply(rows(query * scale), met(key).mT)
    if key_mask is not None:
        hidden = met(~key_mask.unsqueeze(-1)).mT
        scores = scores.masked_fill(hidden[:, None], LOG_ZERO)
    # Below masked keys: a row whose visible keys are all masked must weigh those.
    scores = scores.masked_fill(outside, 10 * LOG_ZERO)
    out = multiply(scores.softmax(-1), met(value)).flatten(-3, -2)
    return out[..., torch.arange(tokens, device=device) if is_compiling() else slice(tokens), :]


def _cut(side: Tensor, step: int, first: int, length: int, nothing: int) -> Tensor:
    """``[…, T, channels]`` → ``[…, n, length, channels]``, what each chunk of tokens meets.

    Args:
        side: What is cut.
        step: From the beginning of a chunk to that of the next.
        first: Where a chunk begins to meet tokens, counted from its own first.
        length: How many it meets.
        nothing: What stands where there are no tokens.
    """
    tokens = side.shape[-2]
    if not is_compiling():
        count = max(whole_parts(tokens, step), 1)
        around = (-first, (count - 1) * step + length + first - tokens)
        return F.pad(side, (0, 0, *around), value=nothing).unfold(-2, length, step).mT
    # Gathered: a trace then puts no condition on the length, and holds for every length.
    start = torch.arange(whole_parts(tokens + step - 1, step), device=side.device) * step + first
    place = start.unsqueeze(-1) + torch.arange(length, device=side.device)
    there = (place >= 0) & (place < tokens)
    found = side[..., place.clamp(0, tokens - 1), :]
    return found.masked_fill(~there.unsqueeze(-1), nothing)


def places_of(bounds: Tensor, tokens: int, window: int) -> Tensor:
    """Places of packed tokens, int64 ``[T]``: sequences stand too far apart to see each other."""
    place = torch.arange(tokens, device=bounds.device)
    sequence = torch.searchsorted(bounds.long(), place, right=True)
    return place + sequence * (window + 1)
