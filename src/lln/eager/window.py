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
    count = whole_parts(tokens, size)
    behind = 0 if is_causal else window
    # As many keys more as the last chunk has rows that are no tokens.
    around = (window, count * size - tokens + behind)
    reach = size + window + behind

    def met(side: Tensor) -> Tensor:
        """``[…, T, channels]`` → ``[…, n, K, channels]``."""
        return F.pad(side, (0, 0, *around)).unfold(-2, reach, size).mT

    if places is None:
        places = torch.arange(tokens, device=device)
    rows = F.pad(places, (0, count * size - tokens)).unflatten(0, (count, size))
    keys = F.pad(places, around, value=NOWHERE).unfold(0, reach, size)
    distance = rows.unsqueeze(-1) - keys.unsqueeze(-2)
    outside = (distance < 0) if is_causal else (distance < -window)
    outside = outside | (distance > window)
    if key_mask is not None:
        keep = key_mask[:, None, :, None]
        key, value = torch.where(keep, key, 0.0), torch.where(keep, value, 0.0)
    chunks = F.pad(query * scale, (0, 0, 0, count * size - tokens)).unflatten(-2, (count, size))
    scores = multiply(chunks, met(key).mT)
    if key_mask is not None:
        hidden = F.pad(~key_mask, around).unfold(-1, reach, size)
        scores = scores.masked_fill(hidden[:, None, :, None], LOG_ZERO)
    # Below masked keys: a row whose visible keys are all masked must weigh those.
    scores = scores.masked_fill(outside, 10 * LOG_ZERO)
    return multiply(scores.softmax(-1), met(value)).flatten(-3, -2)[..., :tokens, :]


def places_of(bounds: Tensor, tokens: int, window: int) -> Tensor:
    """Places of packed tokens, int64 ``[T]``: sequences stand too far apart to see each other.

    Args:
        bounds: ``cu_seqlens`` ``[n + 1]``.
        tokens: T.
        window: See `attend_window`.
    """
    place = torch.arange(tokens, device=bounds.device)
    sequence = torch.searchsorted(bounds.long(), place, right=True)
    return place + sequence * (window + 1)
