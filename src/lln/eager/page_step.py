"""The last token alone, over the keys of a cache: the step of decoding, with few operations.

The same as `page_choice` and `page_attention`, without tiles and without a pass over all keys and
values: the choice reads what pages are chosen by, and of keys and values only what is seen.

Dimension legend: B batch, H query heads, Hk key heads, R = H / Hk, S keys, D head width,
E value width, r width of what is compared, P pages, p tokens in a page, K tokens seen.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.checks.call import Call
from lln.eager.infinity import as_nan
from lln.eager.page_choice import Sight
from lln.eager.selection import largest
from lln.eager.summary import LOG_ZERO
from lln.precision import accumulation_dtype
from lln.tracing import is_compiling


def is_step(call: Call) -> bool:
    """Whether a dense call with pages asks for the last token alone."""
    known = call.query.shape[2] == 1 < call.key.shape[2] and call.query.numel() > 0
    return known and call.is_causal and call.dropout_p == 0 and not is_compiling()


@torch.no_grad()
def choose_step(query: Tensor, key: Tensor, pages: int, sight: Sight, scale: float) -> Tensor:
    """`lln.eager.page_choice.choose_pages` of the last token: int64 ``[B, Hk, 1, P]``.

    Masked keys may hold anything.
    """
    wide = accumulation_dtype(query.dtype)
    keys, size, mask = key.shape[2], sight.page_size, sight.key_mask
    # Keys are infinite where scores are, which are fewer numbers.
    scores = as_nan(_grouped(query, key, scale, wide) @ key.to(wide).mT)
    near = max(keys - 1 - sight.window, 0)
    if near == 0 or pages == 0:
        return torch.full((*scores.shape[:2], 1, pages), -1, device=key.device)
    if mask is not None:
        first = sight.first(mask.device)[:, None]
        at = first + torch.arange(-(-keys // size) * size, device=mask.device)
        known = at.clamp(max=keys - 1)
        visible = ((at < keys) & mask.gather(1, known))[:, None, None]
        known = known[:, None, None].expand(*scores.shape[:3], -1)
        scores = scores.gather(3, known).masked_fill(~visible, -torch.inf)
        exact = ((at >= near) | (at < first + sight.sinks))[:, None, None]
        level = scores.masked_fill(~exact, -torch.inf).amax(-1, keepdim=True)
        scores = scores.masked_fill(exact, -torch.inf)
    else:
        level = scores[..., near:].amax(-1, keepdim=True)
        if sight.sinks:
            level = torch.maximum(level, scores[..., : sight.sinks].amax(-1, keepdim=True))
            scores[..., : sight.sinks] = -torch.inf
        scores = scores[..., :near]
    best = F.max_pool1d(scores.flatten(1, 2), size, ceil_mode=True).view(*scores.shape[:3], -1)
    if best.shape[2] > 1:
        best = best - torch.where(level > -torch.inf, level, 0.0)
    best = F.pad(best.amax(2), (0, max(pages - best.shape[-1], 0)), value=-torch.inf)
    return largest(best.unsqueeze(2), pages)


def attend_step(
    query: Tensor, key: Tensor, value: Tensor, pages: Tensor, sight: Sight, scale: float
) -> Tensor:
    """`lln.eager.page_attention.attend_pages` of the last token, of any dtype: ``[B, H, 1, E]``."""
    wide, device = accumulation_dtype(query.dtype), key.device
    (batch, heads, keys, _), mask = key.shape, sight.key_mask
    near, first = keys - 1 - sight.window, sight.first(device)[:, None, None]
    after = first + sight.sinks
    start = (first + pages[:, :, 0] * sight.page_size).unsqueeze(-1)
    paged = (start + torch.arange(sight.page_size, device=device)).flatten(2)
    there = (start >= first[..., None]).expand(-1, -1, -1, sight.page_size).flatten(2)
    there = there & (paged >= after) & (paged < near)
    sinks = (first + torch.arange(sight.sinks, device=device)).expand(batch, heads, -1)
    window = torch.arange(max(near, 0), keys, device=device).expand(batch, heads, -1)
    at = torch.cat([sinks, window, paged], 2)
    seen = torch.cat([(sinks < near), torch.ones_like(window, dtype=torch.bool), there], 2)
    # What is not there is read at the last token, which is, so that nothing else shows.
    at = torch.where(seen, at, keys - 1)
    if mask is not None:
        seen = seen & mask.gather(1, at.flatten(1)).view(at.shape)
    key, value = as_nan(_rows_at(key, at).to(wide)), _rows_at(value, at).to(wide)
    if mask is not None:
        key, value = (torch.where(seen.unsqueeze(-1), side, 0.0) for side in (key, value))
    scores = _grouped(query, key, scale, wide) @ key.mT
    weights = torch.where(seen.unsqueeze(2), scores, LOG_ZERO).softmax(-1)
    return (weights @ value).flatten(1, 2).unsqueeze(2).to(query.dtype)


def _rows_at(side: Tensor, at: Tensor) -> Tensor:
    """The rows of ``[B, Hk, S, D]`` at ``[B, Hk, K]``."""
    batch, heads, keys, width = side.shape
    which = torch.arange(batch * heads, device=at.device).view(batch, heads, 1)
    step = side.stride(1) // width
    strides = (heads * step * width, step * width, width, 1)
    is_apart = side.stride()[1:] != strides[1:] or (batch > 1 and side.stride(0) != strides[0])
    if side.requires_grad or is_apart:
        return side[which // heads, which % heads, at]
    # Rows behind one another are copied in a sixth of the time.
    rows = side.as_strided((step * (batch * heads - 1) + keys, width), (width, 1))
    return rows.index_select(0, (at + step * which).flatten()).view(*at.shape, width)


def _grouped(query: Tensor, key: Tensor, scale: float, wide: torch.dtype) -> Tensor:
    """``[B, H, 1, D]`` → ``[B, Hk, R, D]``, scaled."""
    return (as_nan(query.to(wide)) * scale).squeeze(2).unflatten(1, (key.shape[1], -1))
