"""Window, sinks and pages with N×N matrices in float64, in the words of their definition."""

import torch


def places(queries, keys, tokens, key_mask):
    """Distances ``[T, S]``, and per sample how far behind the first valid key a key stands."""
    there = torch.arange(queries)[:, None] + (tokens - queries) - torch.arange(tokens)[None]
    if key_mask is None:
        return there, torch.arange(tokens)[None]
    first = key_mask.to(torch.uint8).argmax(-1)
    return there, torch.arange(tokens)[None] - first.cpu()[:, None]


def parts(queries, tokens, window, sinks, key_mask, is_causal):
    """What is visible, near, a sink: bool ``[B or 1, T, S]``; and the places ``[B or 1, S]``."""
    distance, place = places(queries, tokens, tokens, key_mask)
    seen = torch.ones(1, queries, tokens, dtype=torch.bool)
    if key_mask is not None:
        seen = seen & key_mask.cpu()[:, None, :]
    if is_causal:
        seen = seen & (distance >= 0)
    near = seen & (distance.abs() <= window)
    return seen, near, seen & (place < sinks)[:, None, :], place


def page_scores(query, key, *, window, sinks, page_size, key_mask=None, is_causal=False, scale=1.0):
    """Scores ``[B, Hk, T, pages]`` in float64, -inf where a page has nothing to offer."""
    (batch, heads, queries, _), (key_heads, tokens) = query.shape, key.shape[1:3]
    members = heads // key_heads
    seen, near, sink, place = parts(queries, tokens, window, sinks, key_mask, is_causal)
    wide = key.double().cpu().repeat_interleave(members, 1)
    scores = scale * query.double().cpu() @ wide.mT
    scores = torch.where(seen[:, None], scores, -torch.inf)
    if members > 1:
        peak = scores.masked_fill(~(near | sink)[:, None], -torch.inf).amax(-1, keepdim=True)
        scores = scores - torch.where(peak.isinf(), 0.0, peak)
    scores = scores.masked_fill((near | sink)[:, None], -torch.inf)
    scores = scores.unflatten(1, (key_heads, members)).amax(2)
    pages = -(-tokens // page_size)
    of_page = (place.clamp_min(0) // page_size).expand(batch, -1)
    found = torch.full((batch, key_heads, queries, pages), -torch.inf, dtype=torch.float64)
    index = of_page[:, None, None, :].expand(scores.shape)
    return found.scatter_reduce(3, index, scores, "amax")


def best_pages(scores, pages):
    """Ascending indices of the largest scores, ties to the lower page; -1 where there are fewer."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True)
    kept = min(pages, scores.shape[-1])
    index = order.indices[..., :kept].masked_fill(
        order.values[..., :kept].isinf(), scores.shape[-1]
    )
    index = index.sort(-1).values
    index = index.masked_fill(index == scores.shape[-1], -1)
    return torch.nn.functional.pad(index, (0, pages - kept), value=-1).int()


def attend_pages(
    query, key, value, indices, *, window, sinks, page_size, key_mask=None, is_causal=False,
    scale=None,
):  # fmt: skip
    """The attention in the dtype of its inputs."""
    (batch, heads, queries, width), (key_heads, tokens) = query.shape, key.shape[1:3]
    members = heads // key_heads
    seen, near, sink, place = parts(queries, tokens, window, sinks, key_mask, is_causal)
    of_page = (place.clamp_min(0) // page_size).expand(batch, -1)
    chosen = torch.zeros(batch, key_heads, queries, tokens, dtype=torch.bool)
    for slot in range(indices.shape[3]):
        chosen |= indices.cpu()[..., slot, None] == of_page[:, None, None, :]
    shown = near[:, None] | sink[:, None] | (chosen & seen[:, None])
    shown = shown.repeat_interleave(members, 1).to(query.device)
    key, value = (side.repeat_interleave(members, 1) for side in (key, value))
    scores = (width**-0.5 if scale is None else scale) * query @ key.mT
    scores = scores.masked_fill(~shown, -torch.inf)
    blind = ~shown.any(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(~shown, 0.0)
    return weights @ value
