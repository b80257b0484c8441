"""The chosen keys and values, fetched from the ranks that hold them; gradients go back.

A row that several groups of a rank have chosen travels once. How many rows travel depends on the
choice: the ranks tell each other their numbers first, and wait for them.

Dimension legend: B batch, H query heads, Hk key heads, X tokens of a rank and those borrowed,
D head width, E value width, G groups, K keys per group, U different rows, R ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.parallel.agreement import Shards
from lln.parallel.collectives import exchange
from lln.parallel.key_choice import Choice


def fetch_rows(
    key: Tensor, value: Tensor, choice: Choice, longest: int, shards: Shards
) -> tuple[Tensor, Tensor]:
    """Keys ``[B, H, G, K, D]`` and values ``[B, H, G, K, E]``; zero where there is none.

    Args:
        key: ``[B, Hk, X, D]``.
        value: ``[B, Hk, X, E]``.
        choice: What this rank's groups have chosen.
        longest: The largest X of all ranks.
        shards: The group.
    """
    send, receive, wanted, source = _orders(key, choice, longest, shards)
    both = torch.cat([key, value], -1)
    lead, places = both.shape[:3], torch.div(wanted, longest or 1, rounding_mode="floor")
    rows = both.flatten(0, 2).index_select(0, places * lead[2] + wanted % (longest or 1))
    purpose = shards.purpose("fetching the chosen keys")
    found = exchange(rows, send, receive, shards.ranks, purpose)
    # The first row is the one of groups that have chosen less than K keys.
    found = torch.cat([found.new_zeros(1, found.shape[-1]), found])
    picked = found.index_select(0, source.flatten()).view(*source.shape, found.shape[-1])
    far_keys, far_values = picked.split([key.shape[-1], value.shape[-1]], -1)
    return far_keys, far_values


@torch.no_grad()
def _orders(
    key: Tensor, choice: Choice, longest: int, shards: Shards
) -> tuple[list[int], list[int], Tensor, Tensor]:
    """How many rows go to and come from every rank, which ones go, and what came where.

    Returns:
        Two lists of R numbers; int ``[rows]``, the numbers of the rows that other ranks want, as
        (sample · Hk + head) · longest + place; int ``[B, H, G, K]``, the row that every chosen key
        has among those that come, counted from 1, or 0.
    """
    batch, groups = key.shape[:2]
    ranks, heads = shards.ranks, choice.seen.shape[1]
    device = key.device
    head = torch.arange(heads, device=device) // max(heads // max(groups, 1), 1)
    lead = torch.arange(batch, device=device)[:, None] * groups + head
    number = lead[..., None, None] * longest + choice.place
    span = batch * groups * longest
    chosen = (choice.rank * span + number)[choice.seen]
    different, which = torch.unique(chosen, return_inverse=True)
    source = torch.zeros_like(choice.place)
    source[choice.seen] = which + 1
    homes = torch.div(different, max(span, 1), rounding_mode="floor")
    asked = torch.bincount(homes, minlength=ranks.size)
    each = [1] * ranks.size
    purpose = shards.purpose("counting the chosen keys")
    told = exchange(asked, each, each, ranks, purpose).tolist()
    receive = asked.tolist()
    purpose = shards.purpose("asking for the chosen keys")
    wanted = exchange(different % max(span, 1), receive, told, ranks, purpose)
    return told, receive, wanted, source
