"""Which keys a group of queries attends to exactly, outside its own block.

Every key is scored with the mean query of the group. No choice carries a gradient. Equal scores are
taken in the order of positions, so results repeat.

Dimension legend: B batch, H query heads, Hk key heads, T tokens, D head width, n blocks, W tokens
in a block, G groups, g queries in a group, K keys per group.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.eager.key_blocks import Groups, KeyBlocks
from lln.eager.products import row_by_row
from lln.eager.whole_division import divided
from lln.precision import accumulation_dtype
from lln.tracing import is_compiling, values_are_readable

# Most scores to hold at once; longer sequences are scored in stretches of groups.
MOST_SCORES = 1 << 26


@torch.no_grad()
def choose(query: Tensor, key: Tensor, keys: int, groups: Groups, *, flip: bool = False) -> Tensor:
    """Indices of the chosen keys, int64 ``[B, H, G, K]``, ascending; -1 where there are fewer.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, Hk, T, D]``.
        keys: K.
        groups: Who chooses.
        flip: Whether the softmax scores have a negative factor.
    """
    query, key = (-query if flip else query).detach(), key.detach()
    count, size = groups.blocks.place.shape[1:]
    heads, tokens = query.shape[1:3]
    # A trace must hold for every length: then a group has empty places instead.
    if not is_compiling():
        keys = min(keys, tokens)
    shape = (query.shape[0], heads, count * (size // groups.size), keys)
    if keys == 0 or 0 in query.shape[:3]:
        return torch.full(shape, -1, dtype=torch.int64, device=query.device)
    return _by_mean(query, key, keys, groups)


def drop_repeats(indices: Tensor) -> Tensor:
    """Sort the keys of every group, ``[..., K]``, and put -1, at the end, for repeated ones."""
    # No sequence is as long, and short numbers are sorted sooner.
    last = torch.iinfo(torch.int32).max
    ordered = torch.where(indices < 0, last, indices).to(torch.int32).sort(-1).values
    kept = ordered != last
    kept[..., 1:] &= ordered[..., 1:] != ordered[..., :-1]
    # Those that stay move up; what they leave goes to one place more, which is cut off.
    size = indices.shape[-1]
    place = torch.where(kept, kept.cumsum(-1, dtype=torch.int32) - 1, size).long()
    found = indices.new_full((*indices.shape[:-1], size + 1), -1)
    return found.scatter(-1, place, ordered.to(indices.dtype))[..., :size]


def seen_keys(indices: Tensor, groups: Groups) -> Tensor:
    """Which chosen keys a group may attend to: bool ``[B, H, G, K]``.

    Not missing, not masked, of the same sequence and outside the block.
    """
    blocks, group_size, key_mask = groups
    tokens = blocks.home.shape[1]
    known = indices.clamp(0, max(tokens - 1, 0))

    def of_keys(side: Tensor) -> Tensor:
        return side.expand(indices.shape[0], -1).gather(1, known.flatten(1)).view(known.shape)

    home = of_keys(blocks.home)
    rows = blocks.place.shape[2] // group_size
    block = divided(torch.arange(indices.shape[2], device=indices.device), rows)
    first, last = blocks.first[block][:, None], blocks.last[block][:, None]
    block = block[:, None]
    seen = (indices >= 0) & (indices < tokens) & (home >= first) & (home <= last) & (home != block)
    return seen if key_mask is None else seen & of_keys(key_mask)


def _by_mean(query: Tensor, key: Tensor, keys: int, groups: Groups) -> Tensor:
    """The keys with the largest products with the mean query of every group."""
    blocks, group_size, key_mask = groups
    dtype = accumulation_dtype(query.dtype)
    mean = group_means(query, blocks, group_size, blocks.valid(key_mask)).to(dtype)
    batch, heads, count, width = mean.shape
    key = key.to(dtype)
    if key_mask is not None:
        key = torch.where(key_mask[:, None, :, None], key, 0.0)
    across = row_by_row(key.mT) if key.device.type == "cpu" else key.mT
    home = blocks.home[:, None]
    group = torch.arange(count, device=query.device)
    block = divided(group * group_size, blocks.place.shape[2])

    def best(mean: Tensor, block: Tensor) -> Tensor:
        first, last = blocks.first[block], blocks.last[block]
        allowed = (home >= first) & (home <= last) & (home != block)
        if key_mask is not None:
            allowed = allowed & key_mask[:, None]
        scores = mean.reshape(batch, key.shape[1], -1, width) @ across
        scores = scores.view(batch, heads, -1, key.shape[2])
        scores = torch.where(allowed[:, None], scores, -torch.inf)
        if is_compiling():
            # In a trace there may be fewer tokens than keys; what is added is never chosen.
            scores = F.pad(scores, (0, keys), value=-torch.inf)
        return largest(scores, keys)

    block = block.unsqueeze(-1)
    if is_compiling():
        # Nor can it count stretches.
        return best(mean, block)
    stretch = max(MOST_SCORES // max(batch * heads * key.shape[2], 1), 1)
    pairs = zip(mean.split(stretch, 2), block.split(stretch), strict=True)
    return torch.cat([best(*pair) for pair in pairs], 2)


def group_means(query: Tensor, blocks: KeyBlocks, group_size: int, valid: Tensor) -> Tensor:
    """The mean query of every group, ``[B, H, G, D]``; zero if nobody counts.

    Args:
        query: ``[B, H, T, D]``.
        blocks: Where the tokens lie.
        group_size: g.
        valid: bool ``[B, n, W]``, which queries count.
    """
    dtype = accumulation_dtype(query.dtype)
    counted = valid[:, None, ..., None]
    rows = torch.where(counted, blocks.gather(query.to(dtype)), 0.0)
    rows = rows.flatten(2, 3).unflatten(2, (-1, group_size))
    number = counted.flatten(2, 3).unflatten(2, (-1, group_size)).sum(-2).clamp_min(1)
    # Rounded to the precision of the queries, as in the kernel, so that both choose the same keys.
    return (rows.sum(-2) / number).to(query.dtype)


def largest(scores: Tensor, keys: int) -> Tensor:
    """Positions of the largest scores of every row, ascending; -1 for those of -inf.

    Where several scores equal the smallest one taken, the first positions win: ``topk`` alone does
    not say which.
    """
    if keys == 0:
        return torch.zeros_like(scores[..., :0], dtype=torch.int64)
    best, places = scores.topk(keys, -1, sorted=False)
    least = best.amin(-1, keepdim=True)
    if values_are_readable(scores) and _is_clear(scores, best, least):
        return places.sort(-1).values
    above, equal = scores > least, scores == least
    wanted = keys - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= wanted))
    taken = taken & (scores > -torch.inf)
    nowhere = scores.shape[-1]
    position = torch.arange(nowhere, device=scores.device, dtype=torch.int32)
    found = torch.where(taken, position, nowhere).topk(keys, -1, largest=False, sorted=True).values
    return torch.where(found == nowhere, -1, found).long()


def _is_clear(scores: Tensor, best: Tensor, least: Tensor) -> bool:
    """Whether no other score equals the smallest one taken, and that is not -inf."""
    return bool((least > -torch.inf).all()) and int((scores >= least).sum()) == best.numel()
