"""The chosen keys and values, fetched from the ranks that hold them; gradients go back.

A row that several groups of a rank have chosen travels once. How many rows travel depends on the
choice: the ranks tell each other their numbers first, and wait for them.

Dimension legend: B batch, H query heads, Hk key heads, X tokens of a rank and those borrowed,
D head width, E value width, G groups, K keys per group, U different rows, R ranks, T tokens, S
rows of a tensor that holds tokens and behind them chosen rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lln.parallel.agreement import Shards
from lln.parallel.collectives import exchange
from lln.parallel.journeys import Lending
from lln.parallel.key_choice import Choice


class FarRows(NamedTuple):
    """The chosen keys and values of a rank's groups, every row once.

    Attributes:
        rows: ``[U, D + E]``.
        source: int ``[B, H, G, K]``, the row of every chosen key, counted from 1; 0 = none.
        head: int ``[U]``, the sample and key head of a row, as sample · Hk + head.
        most: How many rows a key head has at most.
    """

    rows: Tensor
    source: Tensor
    head: Tensor
    most: int

    def spread(self, width: int) -> tuple[Tensor, Tensor]:
        """Keys ``[B, H, G, K, D]`` and values ``[B, H, G, K, E]``; zero where there is none."""
        # The first row is the one of groups that have chosen less than K keys.
        found = torch.cat([self.rows.new_zeros(1, self.rows.shape[-1]), self.rows])
        picked = found.index_select(0, self.source.flatten())
        picked = picked.view(*self.source.shape, found.shape[-1])
        far_keys, far_values = picked.split([width, found.shape[-1] - width], -1)
        return far_keys, far_values

    def behind(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Key and value with the rows of their heads behind the tokens, and where groups find them.

        Args:
            key: ``[B, Hk, T, D]``.
            value: ``[B, Hk, T, E]``.

        Returns:
            ``[B, Hk, S, D]``, ``[B, Hk, S, E]``, and int32 ``[B, H, G, K]``, which of the S rows a
            group chose, or -1.
        """
        (batch, heads, tokens, width), both = key.shape, self.rows.shape[-1]
        slot = _places_of(self.head, batch * heads)
        table = self.rows.new_zeros(batch * heads * self.most, both)
        # Every place gets one row at most, so the order of copies does not matter. Without any row,
        # too: the backward pass of the exchange is one that no rank may leave out.
        table = table.index_copy(0, self.head * self.most + slot, self.rows)
        far = table.view(batch, heads, self.most, both).split([width, value.shape[-1]], -1)
        key, value = (torch.cat(pair, 2) for pair in zip((key, value), far, strict=True))
        places = torch.cat([slot.new_full((1,), -1), tokens + slot])
        return key, value, places.to(torch.int32)[self.source]


def fetch_rows(
    lending: Lending, key: Tensor, choice: Choice, longest: int, shards: Shards
) -> Callable[[torch.dtype], FarRows]:
    """Start to fetch the rows that this rank's groups have chosen.

    What is returned waits for them, and gives them in a dtype. Of the key ``[B, Hk, X, D]`` shape
    and device count; ``longest`` is the largest X of all ranks.
    """
    orders = _orders(key, choice, longest, shards)
    wanted, longest = orders.wanted, max(longest, 1)
    places = torch.div(wanted, longest, rounding_mode="floor") * key.shape[2] + wanted % longest
    rows = lending.send(places, orders.send, orders.receive)
    return lambda dtype: FarRows(rows().to(dtype), orders.source, orders.head, orders.most)


def _places_of(head: Tensor, heads: int) -> Tensor:
    """Which row of its head every row is, int ``[U]``, of so many heads."""
    order = head.argsort(stable=True)
    count = torch.bincount(head, minlength=heads)
    before = (count.cumsum(0) - count)[head[order]]
    place = torch.empty_like(order)
    place[order] = torch.arange(head.shape[0], device=head.device) - before
    return place


class _Orders(NamedTuple):
    """Who wants which rows.

    Attributes:
        send: How many rows go to every rank.
        receive: How many come from it.
        wanted: int ``[rows]``, what other ranks want, as (sample · Hk + head) · longest + place.
        source: As in `FarRows`, and so are the next two.
        head: See above.
        most: See above.
    """

    send: list[int]
    receive: list[int]
    wanted: Tensor
    source: Tensor
    head: Tensor
    most: int


@torch.no_grad()
def _orders(key: Tensor, choice: Choice, longest: int, shards: Shards) -> _Orders:
    """Tell the other ranks which of their rows this one wants, and hear what they want."""
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
    wanted = different % max(span, 1)
    lead = torch.div(wanted, max(longest, 1), rounding_mode="floor")
    # At least one head, so that there is a maximum. Read together, because to read is to wait.
    most = torch.bincount(lead, minlength=1).amax()
    *receive, most = torch.cat([asked, most.view(1)]).tolist()
    purpose = shards.purpose("asking for the chosen keys")
    wanted = exchange(wanted, receive, told, ranks, purpose)
    return _Orders(told, receive, wanted, source, lead, most)
