"""Which keys of all ranks every group of queries attends to one by one.

As in one process (`lln.eager.selection`), by the products of the keys with the mean query of a
group. Three steps, none of which moves the keys themselves:

1. every rank gets the mean queries of all groups;
2. it finds its K best keys for each of them;
3. the rank of a group gets the candidates of all ranks and keeps the K best.

Ranks hold their keys in the order of positions, so equal scores are still taken in that order.

Steps 1 and 2 run in the kernels that choose keys in one process, or in plain PyTorch. Both round
the mean queries to the precision of the queries and add products in the accumulation dtype; the
kernels in an order that does not depend on the other keys, so that a key's score is the same for
every number of ranks. Only keys whose scores differ by rounding alone may be chosen otherwise than
in one process.

Dimension legend: R ranks, B batch, H query heads, Hk key heads, X tokens of a rank and those
borrowed, D head width, n blocks of a rank, g queries in a group, G groups of a rank, A groups of
the whole sequence, K keys per group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lln.checks.call import Call
from lln.eager.key_blocks import blocks_in
from lln.eager.selection import MOST_SCORES, group_means, largest
from lln.kernels.keys.keys_ops import fused_candidates, fused_means
from lln.parallel.collectives import exchange
from lln.parallel.journeys import gather_later
from lln.parallel.whole_blocks import OwnBlocks, WholeBlocks
from lln.precision import accumulation_dtype


class Choice(NamedTuple):
    """The chosen keys of a rank's groups.

    Attributes:
        rank: int ``[B, H, G, K]``, who holds the key.
        place: int ``[B, H, G, K]``, where among that rank's X tokens.
        seen: bool ``[B, H, G, K]``, whether there is one.
    """

    rank: Tensor
    place: Tensor
    seen: Tensor


@torch.no_grad()
def gather_means(query: Tensor, call: Call, here: OwnBlocks) -> Callable[[], Tensor]:
    """Start to gather the mean queries of all groups; what is returned waits for them.

    They are ``[R, B, H, G, D]``, with the largest G of all ranks, of queries ``[B, H, X, D]``.
    """
    query, layout, group_size = query.detach(), here.layout, call.group_size
    flip = call.scale is not None and call.scale < 0
    batch, heads, _, width = query.shape
    ranks = layout.shards.ranks
    groups = _group_counts(layout, group_size)
    own = groups[ranks.own]
    mean = query.new_zeros(batch, heads, max(groups), width)
    if own and here.by_kernels:
        sizes = {"blocks": layout.count(ranks.own), "block_size": layout.size}
        begin = -layout.begin(ranks.own) if layout.is_crossed else None
        mean[:, :, :own] = fused_means(
            query, here.counted, begin, **sizes, group_size=group_size, flip=flip
        )
    elif own:
        signed = -query if flip else query
        mean[:, :, :own] = group_means(
            signed, here.blocks, group_size, here.blocks.valid(here.valid)
        )
    return gather_later(mean, ranks, layout.shards.purpose("exchanging the mean queries"))


@torch.no_grad()
def choose_together(means: Tensor, key: Tensor, call: Call, here: OwnBlocks) -> Choice:
    """Choose for the groups of the blocks that begin on this rank.

    The means of all ranks come from `gather_means`; keys are ``[B, Hk, X, D]``.
    """
    key, layout, group_size = key.detach(), here.layout, call.group_size
    _, batch, heads, _, width = means.shape
    ranks, shards = layout.shards.ranks, layout.shards
    keys = min(call.keys, shards.bounds.tokens)
    rows = layout.size // group_size
    groups = _group_counts(layout, group_size)
    own = groups[ranks.own]
    # The last place is for groups of blocks that a sample does not have on that rank.
    total = blocks_in(shards.bounds.tokens, layout.size, shards.padded) * rows
    places = [_groups_of(rank, layout, rows, total) for rank in range(ranks.size)]
    table = means.new_zeros(batch, heads, total + 1, width)
    for place, mean in zip(places, means.unbind(), strict=True):
        spread = place[:, None, :, None].expand(-1, heads, -1, width)
        table.scatter_(2, spread, mean[:, :, : place.shape[1]])
    if here.by_kernels:
        gaps = layout.number(ranks.own) * layout.size - layout.begin(ranks.own)
        sizes = {"block_size": layout.size, "group_size": group_size}
        table = table[:, :, :total]
        scores, found = fused_candidates(table, key, here.counted, gaps, keys, **sizes)
        scores = pad(scores, (0, 0, 0, 1), value=-math.inf)
        found = pad(found, (0, 0, 0, 1), value=-1)
    else:
        table = table[:, :, :total]
        home = layout.number(ranks.own)[:, None] + here.blocks.home
        scores, found = _candidates(table, key, keys, home, here.valid, rows)
    send = [place[:, None, :, None].expand(-1, heads, -1, keys) for place in places]
    packed = torch.stack([_bits(scores), found.to(_bits(scores).dtype)], -1)
    lines = [packed.gather(2, one.unsqueeze(-1).expand(*one.shape, 2)) for one in send]
    out = torch.cat([line.flatten(0, 2) for line in lines])
    counts = [batch * heads * group for group in groups], [batch * heads * own] * ranks.size
    purpose = shards.purpose("exchanging the candidates for exact keys")
    back = exchange(out, *counts, ranks, purpose)
    back = back.view(ranks.size, batch, heads, own, keys, 2).movedim(0, 3).flatten(3, 4)
    best = largest(back[..., 0].view(scores.dtype), keys)
    known = best.clamp_min(0)
    place = back[..., 1].gather(-1, known).long()
    return Choice(known // max(keys, 1), place, best >= 0)


def _group_counts(layout: WholeBlocks, group_size: int) -> list[int]:
    """G of every rank."""
    ranks = range(layout.shards.ranks.size)
    return [layout.count(rank) * (layout.size // group_size) for rank in ranks]


def _groups_of(rank: int, layout: WholeBlocks, rows: int, total: int) -> Tensor:
    """The numbers of a rank's groups in the whole sequence, ``[B, G]``; ``total`` = no such."""
    block = torch.arange(layout.count(rank), device=layout.phase.device)
    begin = layout.begin(rank)[:, None] + block * layout.size
    number = layout.number(rank)[:, None] + block
    group = number.unsqueeze(-1) * rows + torch.arange(rows, device=block.device)
    exists = (begin < layout.length(rank)).unsqueeze(-1)
    return torch.where(exists, group, total).flatten(1)


def _candidates(
    table: Tensor,
    key: Tensor,
    keys: int,
    home: Tensor,
    valid: Tensor,
    rows: int,
) -> tuple[Tensor, Tensor]:
    """Scores and places of this rank's K best keys for every group ``[B, H, A + 1, K]``.

    The table is the mean query of every group ``[B, H, A, D]``, ``home`` int ``[B, X]`` the number
    of every key's block in the whole sequence; valid keys belong to this rank's blocks, too, and a
    block has ``rows`` groups.
    """
    dtype = accumulation_dtype(key.dtype)
    (batch, heads, groups, width), held = table.shape, key.shape[2]
    scores = torch.full((batch, heads, groups + 1, keys), -torch.inf, dtype=dtype).to(key.device)
    found = torch.full(scores.shape, -1, dtype=torch.int64, device=key.device)
    most = min(keys, held)
    if most == 0 or groups == 0 or batch * heads == 0:
        return scores, found
    key = torch.where(valid[:, None, :, None], key.to(dtype), 0.0)
    block = torch.arange(groups, device=key.device).unsqueeze(-1) // rows
    stretch = max(MOST_SCORES // (batch * heads * held), 1)
    start = 0
    for mean, own in zip(table.split(stretch, 2), block.split(stretch), strict=True):
        allowed = (home[:, None] != own) & valid[:, None]
        score = mean.to(dtype).reshape(batch, key.shape[1], -1, width) @ key.mT
        score = score.view(batch, heads, -1, held)
        score = torch.where(allowed[:, None], score, -torch.inf)
        place = largest(score, most)
        part = slice(start, start + mean.shape[2])
        best = score.gather(-1, place.clamp_min(0))
        scores[:, :, part, :most] = torch.where(place < 0, -torch.inf, best)
        found[:, :, part, :most] = place
        start += mean.shape[2]
    return scores, found


def _bits(scores: Tensor) -> Tensor:
    """Numbers as integers of the same width, to travel with places in one tensor."""
    return scores.view(torch.int64 if scores.dtype == torch.float64 else torch.int32)
