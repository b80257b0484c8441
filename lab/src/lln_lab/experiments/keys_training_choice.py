"""Which keys are exact in `keys_training`: marks instead of indices, all dense.

Marks are [B, H, rows, N], not 0 = exact, with a row for every N / rows queries. Keys come as
features [B, H, D, N]. B sequences, N tokens, H heads, D features of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Exact keys, by how they are chosen; see `choose`.
SELECTIONS = ("random", "block", "group", "query", "half")
# Queries that share their keys under "group".
GROUP = 16


def own_block(length: int, block: int, device: torch.device) -> Tensor:
    home = torch.arange(length, device=device) // block
    return home[:, None] == home


def mark_largest(scores: Tensor, count: int) -> Tensor:
    """True at the ``count`` largest entries of every row, in bfloat16; of equal ones the first.

    The count-th largest is found bit by bit: compiled, faster than `topk` on so many short rows.
    """
    length = scores.shape[-1]
    bits = scores.bfloat16().view(torch.int16).int()
    # Integers from 0 in the order of the numbers; the places make them all different.
    order = (bits ^ (bits >> 15 & 0x7FFF)) + 0x8000
    order = order * length + torch.arange(length - 1, -1, -1, dtype=torch.int32, device=bits.device)
    least = torch.zeros_like(order[..., :1])
    for power in reversed(range((0x10000 * length - 1).bit_length())):
        enough = (order >= least + 2**power).sum(-1, keepdim=True, dtype=torch.int32) >= count
        least = least + 2**power * enough.int()
    return order >= least


def two_strongest(q: Tensor) -> Tensor:
    """[B, H, N, 2D]: True at the two largest of [q, −q], which are q's largest by size."""
    size = q.abs()
    places = torch.arange(q.shape[-1], device=q.device)
    first = places == size.argmax(-1, keepdim=True)
    second = places == size.masked_fill(first, -1.0).argmax(-1, keepdim=True)
    strongest = first | second
    return torch.cat([strongest & (q >= 0), strongest & (q < 0)], -1)


def by_features(q: Tensor, features: Tensor, count: int, rows: Tensor) -> Tensor:
    """For every query half of the keys by each of its two strongest features of [q, −q].

    A feature's keys are those where it is largest. Centring it over the tokens would not change
    their order, so it is left out. The rows of the blocks are one more feature of their queries. A
    key chosen twice counts once.
    """
    size = q.shape[2] // rows.shape[-2]
    blocks = own_block(q.shape[2], size, q.device)[:, ::size]
    asked = torch.cat([two_strongest(q), blocks.expand(*q.shape[:2], -1, -1)], -1)
    largest = [mark_largest(side, count // 2) for side in (features, -features)]
    chosen = torch.cat([*largest, rows.expand(*q.shape[:2], -1, -1)], 2)
    # A product of zeros and ones: a gather that runs on the matrix units.
    return asked.to(q.dtype) @ chosen.to(q.dtype)


@torch.no_grad()
def choose(kind: str, q: Tensor, features: Tensor, keys: int, block: int) -> Tensor:
    """The keys that every query sees exactly, its own block among them. No gradient goes here.

    By the mean query of every block ("block") or group, by query, or half and half.
    """
    length = q.shape[2]
    size = GROUP if kind == "group" else block
    # Groups lie inside a block, so a group's first query speaks for all.
    rows = own_block(length, block, q.device)[::size]
    each_way = keys // 2 if kind == "half" else keys
    if kind == "random":
        scores = torch.rand((*q.shape[:2], *rows.shape), device=q.device)
    elif kind != "query":
        scores = q.unflatten(2, (-1, size)).mean(3) @ features
    if kind != "query":
        outside = scores.masked_fill(rows, -math.inf)
        rows = rows | mark_largest(outside, min(each_way, length - block))
    if kind in ("query", "half"):
        return by_features(q, features, min(each_way, 2 * length), rows)
    return rows
