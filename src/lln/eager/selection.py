"""Which keys a group of queries attends to exactly, outside its own block.

``"block"`` scores every key with the mean query of the group; ``"query"`` gives every query the
keys that are largest in its two strongest features; ``"half"`` takes half of each. No choice
carries a gradient. Equal scores are taken in the order of positions, so results repeat.

Dimension legend: B batch, H query heads, Hk key heads, T tokens, D head width, n blocks, W tokens
in a block, G groups, g queries in a group, K keys per group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.eager.key_blocks import KeyBlocks
from lln.precision import accumulation_dtype

# Most scores to hold at once; longer sequences are scored in stretches of groups.
MOST_SCORES = 1 << 26


@torch.no_grad()
def choose(
    query: Tensor,
    key: Tensor,
    keys: int,
    blocks: KeyBlocks,
    *,
    select: str,
    group_size: int,
    key_mask: Tensor | None,
    is_causal: bool,
    flip: bool = False,
) -> Tensor:
    """Indices of the chosen keys, int64 ``[B, H, G, K]``, ascending; -1 where there are fewer.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, T, D]``.
        keys: K.
        blocks: Where the tokens lie.
        select: ``"block"``, ``"query"`` or ``"half"``.
        group_size: g, a divisor of W; 1 for ``"query"`` and ``"half"``.
        key_mask: bool ``[B, T]``; masked keys are never chosen, masked queries do not count.
        is_causal: Whether only keys of earlier blocks may be chosen.
        flip: Whether the softmax scores have a negative factor.
    """
    keys = min(keys, query.shape[2])
    query, key = (-query if flip else query).detach(), key.detach()
    count, size = blocks.place.shape[1:]
    heads = query.shape[1]
    shape = (query.shape[0], heads, count * (size // group_size), keys)
    if keys == 0 or 0 in query.shape[:3]:
        return torch.full(shape, -1, dtype=torch.int64, device=query.device)
    if select == "block":
        return _by_mean(query, key, keys, blocks, group_size, key_mask, is_causal)
    if select == "query":
        return _by_features(query, key, keys, blocks, key_mask, is_causal)
    by_mean = _by_mean(query, key, keys - keys // 2, blocks, size, key_mask, is_causal)
    by_mean = by_mean.repeat_interleave(size, 2)
    if keys < 2:
        return by_mean
    own = _by_features(query, key, keys // 2, blocks, key_mask, is_causal)
    return drop_repeats(torch.cat([by_mean, own], -1))


def drop_repeats(indices: Tensor) -> Tensor:
    """Sort the keys of every group, ``[..., K]``, and put -1, at the end, for repeated ones."""
    last = torch.iinfo(indices.dtype).max
    ordered = torch.where(indices < 0, last, indices).sort(-1).values
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    ordered = torch.where(repeated, last, ordered).sort(-1).values
    return torch.where(ordered == last, -1, ordered)


def seen_keys(
    indices: Tensor, blocks: KeyBlocks, group_size: int, key_mask: Tensor | None, is_causal: bool
) -> Tensor:
    """Which chosen keys a group may attend to: bool ``[B, H, G, K]``.

    Not missing, not masked, of the same sequence, outside the block, and earlier if causal.
    """
    batch, tokens = blocks.home.shape
    sample = torch.arange(batch, device=indices.device)[:, None, None, None]
    known = indices.clamp(0, max(tokens - 1, 0))
    home = blocks.home[sample, known]
    rows = blocks.place.shape[2] // group_size
    block = torch.arange(indices.shape[2], device=indices.device) // rows
    first, last = blocks.first[block][:, None], blocks.last[block][:, None]
    block = block[:, None]
    seen = (indices >= 0) & (indices < tokens) & (home >= first) & (home <= last)
    seen = seen & (home < block if is_causal else home != block)
    return seen if key_mask is None else seen & key_mask[sample, known]


def _by_mean(
    query: Tensor,
    key: Tensor,
    keys: int,
    blocks: KeyBlocks,
    group_size: int,
    key_mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """The keys with the largest products with the mean query of every group."""
    dtype = accumulation_dtype(query.dtype)
    counted = blocks.valid(key_mask)[:, None, ..., None]
    rows = torch.where(counted, blocks.gather(query.to(dtype)), 0.0)
    rows = rows.flatten(2, 3).unflatten(2, (-1, group_size))
    number = counted.flatten(2, 3).unflatten(2, (-1, group_size)).sum(-2).clamp_min(1)
    # Rounded to the precision of the queries, as in the kernel, so that both choose the same keys.
    mean = (rows.sum(-2) / number).to(query.dtype).to(dtype)
    batch, heads, groups, width = mean.shape
    key = key.to(dtype)
    if key_mask is not None:
        key = torch.where(key_mask[:, None, :, None], key, 0.0)
    home = blocks.home[:, None]
    block = torch.arange(groups, device=query.device) * group_size // blocks.place.shape[2]
    stretch = max(MOST_SCORES // max(batch * heads * key.shape[2], 1), 1)
    found = []
    for part in range(0, groups, stretch):
        block_part = block[part : part + stretch, None]
        first, last = blocks.first[block_part], blocks.last[block_part]
        allowed = (home >= first) & (home <= last)
        allowed = allowed & (home < block_part if is_causal else home != block_part)
        if key_mask is not None:
            allowed = allowed & key_mask[:, None]
        some = mean[:, :, part : part + stretch].reshape(batch, key.shape[1], -1, width)
        scores = (some @ key.mT).view(batch, heads, -1, key.shape[2])
        scores = torch.where(allowed[:, None], scores, -torch.inf)
        found.append(_largest(scores, keys))
    return torch.cat(found, 2)


def _by_features(
    query: Tensor,
    key: Tensor,
    keys: int,
    blocks: KeyBlocks,
    key_mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """For every query the keys that are largest in its two strongest features of [q, -q]."""
    dtype = accumulation_dtype(query.dtype)
    heads = query.shape[1]
    if key_mask is not None:
        key = torch.where(key_mask[:, None, :, None], key, 0.0)
    lists = _feature_lists(key.to(dtype), -(-keys // 2), key_mask)
    lists = lists.repeat_interleave(heads // lists.shape[1], 1)
    rows = blocks.gather(query).flatten(2, 3).to(dtype)
    strongest = torch.cat([rows, -rows], -1).topk(2, -1).indices
    spread = strongest.flatten(2).unsqueeze(-1).expand(-1, -1, -1, lists.shape[-1])
    chosen = lists.gather(2, spread).unflatten(2, (-1, 2)).flatten(3)[..., :keys]
    seen = seen_keys(chosen, blocks, 1, key_mask, is_causal)
    return drop_repeats(torch.where(seen, chosen, -1))


def _feature_lists(key: Tensor, keys: int, key_mask: Tensor | None) -> Tensor:
    """For each of the 2D features [k, -k] the keys where it is largest: ``[B, Hk, 2D, K]``."""
    kept = key_mask
    if kept is None:
        kept = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    number = kept.sum(-1).clamp_min(1)[:, None, None, None]
    centred = key - key.sum(2, keepdim=True) / number
    both = torch.cat([centred, -centred], -1).mT
    return _largest(torch.where(kept[:, None, None], both, -torch.inf), min(keys, key.shape[2]))


def _largest(scores: Tensor, keys: int) -> Tensor:
    """Positions of the largest scores of every row, ascending; -1 for those of -inf.

    Where several scores equal the smallest one taken, the first positions win: ``topk`` alone does
    not say which.
    """
    least = scores.topk(keys, -1, sorted=True).values[..., -1:]
    above, equal = scores > least, scores == least
    wanted = keys - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= wanted))
    taken = taken & (scores > -torch.inf)
    nowhere = scores.shape[-1]
    position = torch.arange(nowhere, device=scores.device, dtype=torch.int32)
    found = torch.where(taken, position, nowhere).topk(keys, -1, largest=False, sorted=True).values
    return torch.where(found == nowhere, -1, found).long()
