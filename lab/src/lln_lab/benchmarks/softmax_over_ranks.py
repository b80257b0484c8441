"""Softmax attention over ranks, to compare with: ring attention and Ulysses, exact, with gradients.

*Ring* (Liu et al. 2023): keys and values go round the ranks, each rank attends to what it holds at
the moment and merges; backward they go round once more with their gradients. *Ulysses* (Jacobs et
al. 2023): an exchange turns shards of tokens into shards of heads, every rank attends over the
whole sequence, another exchange turns back. Shards of one length, no mask, plain PyTorch.

Dimension legend: R ranks, B batch, H heads, T tokens of a rank, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lln.parallel.collectives import exchange
from lln.parallel.ranks import Ranks, find_ranks


def ulysses_attention(query: Tensor, key: Tensor, value: Tensor, group: Any = None) -> Tensor:
    """Softmax attention ``[B, H, T, D]`` of this rank's rows; the ranks divide the heads."""
    ranks = find_ranks(group, "ulysses_attention")
    sides = (_to_heads(side, ranks) for side in (query, key, value))
    return _to_tokens(scaled_dot_product_attention(*sides), ranks)


def _to_heads(side: Tensor, ranks: Ranks) -> Tensor:
    """``[B, H, T, D]`` of some tokens → ``[B, H / R, R·T, D]`` of some heads."""
    rows = side.unflatten(1, (ranks.size, -1)).movedim(1, 0)
    found = exchange(rows, *_one_each(ranks), ranks, "ulysses_attention: tokens to heads")
    return found.movedim(0, 2).flatten(2, 3)


def _to_tokens(side: Tensor, ranks: Ranks) -> Tensor:
    """The opposite of `_to_heads`."""
    rows = side.unflatten(2, (ranks.size, -1)).movedim(2, 0)
    found = exchange(rows, *_one_each(ranks), ranks, "ulysses_attention: heads to tokens")
    return found.movedim(0, 1).flatten(1, 2)


def _one_each(ranks: Ranks) -> tuple[list[int], list[int]]:
    return [1] * ranks.size, [1] * ranks.size


def ring_attention(query: Tensor, key: Tensor, value: Tensor, group: Any = None) -> Tensor:
    """Softmax attention ``[B, H, T, D]`` of this rank's rows; keys and values go round."""
    return _Ring.apply(query, key, value, find_ranks(group, "ring_attention"))


class _Ring(torch.autograd.Function):
    """Keeps this rank's own tensors only; the others' keys and values come round again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ranks: Ranks) -> Tensor:
        out = lse = None
        held = torch.stack([key, value])
        for step in range(ranks.size):
            held = _pass_on(held, ranks) if step else held
            part, part_lse = _attend(query, *held)
            if out is None or lse is None:
                out, lse = part, part_lse
                continue
            merged = torch.logaddexp(lse, part_lse)
            out = out * (lse - merged).exp() + part * (part_lse - merged).exp()
            lse = merged
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.ranks = ranks
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        (gradient,) = gradients
        delta = (gradient * out).sum(-1, keepdim=True)
        scale = query.shape[-1] ** -0.5
        dq = torch.zeros_like(query)
        # Keys, values and their gradients so far.
        held = torch.stack([key, value, torch.zeros_like(key), torch.zeros_like(value)])
        for step in range(ctx.ranks.size):
            if step:
                held = _pass_on(held, ctx.ranks)
            near_key, near_value, dk, dv = held
            weights = (query @ near_key.mT * scale - lse).exp()
            dv += weights.mT @ gradient
            scores = weights * (gradient @ near_value.mT - delta) * scale
            dq += scores @ near_key
            dk += scores.mT @ query
        # One step further the gradients are at home.
        dk, dv = _pass_on(held[2:], ctx.ranks)
        return dq, dk, dv, None


def _attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention to some keys, and the logarithms of its normalisers ``[B, H, T, 1]``."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ value, lse


def _pass_on(held: Tensor, ranks: Ranks) -> Tensor:
    """What this rank holds goes to the next rank; what the one before held comes here."""
    send, receive = [0] * ranks.size, [0] * ranks.size
    send[(ranks.own + 1) % ranks.size] = receive[(ranks.own - 1) % ranks.size] = len(held)
    return exchange(held.contiguous(), send, receive, ranks, "ring_attention: passing on")
