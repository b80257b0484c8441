"""Causal LLN attention on a CPU: one walk over the chunks with a running state.

The scan of `lln.eager.causal` writes every chunk's summary and score matrix to memory. Here one
chunk after the other goes through the cache, which is two to three times as fast. The arithmetic is
that of the *fast* form there. With rows r_if = e^{αq_if + p_f − max} and weights
w_jf = e^{βk_jf − p_f}, where p is the largest exponent of every slot so far, a chunk reads

    A = lower triangle of r wᵀ,    out = (A v + r S) / (A 1 + r m)

from the state of all earlier keys, S = Σ w_jᵀ v_j and m = Σ w_j, which moves to a larger p by one
factor. A later key of the same chunk may be so large that earlier rows lose their digits. Their
normaliser shows it; then the walk gives up. The backward pass walks back: dS and dm gather what
later chunks read.

Dimension legend: B batch, H heads, n = B · H, T tokens, D head width, E value width, c tokens in a
chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.eager.products import add_product, flat, per_head, row_by_row
from lln.eager.saved_numbers import by_autograd, save, saved
from lln.eager.summary import LOG_ZERO, key_exponents
from lln.tracing import is_batched

CHUNK = 64
# So many chunks' states are summed before they join the sum of all: fewer roundings in a row.
SPAN = 32


class Walked(NamedTuple):
    """What a walk has found.

    Attributes:
        out: ``[B, H, T, E]``.
        normaliser: ``[B, H, T, 1]``, of every row.
    """

    out: Tensor
    normaliser: Tensor


class Inputs(NamedTuple):
    """Of causal attention.

    Attributes:
        query: ``[B, H, T, D]`` in the accumulation dtype.
        key: ``[B, H, T, D]``.
        value: ``[B, H, T, E]``.
        alpha: Broadcasts to ``[B, H, 1, 1]``.
        beta: Broadcasts to ``[B, H, 1, 1]``.
        key_mask: bool ``[B, T]``, True = attend.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    alpha: float | Tensor
    beta: float | Tensor
    key_mask: Tensor | None

    def of_heads(self, places: Tensor) -> Inputs:
        """Some heads, counted over all samples, as samples with one head."""

        def pick(side: Any) -> Any:
            if not isinstance(side, Tensor) or side.numel() == 1:
                return side
            every = side.expand(*self.query.shape[:2], -1, -1)
            return every.flatten(0, 1)[places].unsqueeze(1)

        query, key, value, alpha, beta, mask = self
        own = None if mask is None else mask[places // self.query.shape[1]]
        return Inputs(pick(query), pick(key), pick(value), pick(alpha), pick(beta), own)

    def showing_infinity(self) -> Inputs:
        """With NaN for infinity in queries and keys: e^−∞ = 0 would hide it."""
        query, key = (torch.where(side.isinf(), torch.nan, side) for side in self[:2])
        return Inputs(query, key, *self[2:])

    def flat(self) -> Heads:
        """The same, head by head."""
        heads = self.query.shape[:2]
        mask = self.key_mask
        if mask is not None:
            mask = mask[:, None].expand(*heads, -1).flatten(0, 1)
        query, key, value = flat(self.query), flat(self.key), flat(self.value)
        alpha, beta = per_head(self.alpha, self.query), per_head(self.beta, self.query)
        return Heads(query, key, value, alpha, beta, mask)


class Heads(Inputs):
    """The inputs head by head, ``[n, T, D or E]``, so that products take no detours.

    α and β are numbers, or ``[n, 1, 1]``; the mask is ``[n, T]``.
    """

    def parts(self) -> list[slice]:
        """The tokens of every chunk."""
        starts = range(0, self.query.shape[1], CHUNK)
        return [slice(start, start + CHUNK) for start in starts]

    def exponents(self, part: slice) -> tuple[Tensor, Tensor]:
        """βk and the values of a chunk; masked tokens have ``LOG_ZERO`` and zero."""
        mask = None if self.key_mask is None else self.key_mask[:, part]
        values = row_by_row(self.value[:, part])
        return key_exponents(self.key[:, part], values, self.beta, mask)

    def rows(self, part: slice, peak: Tensor) -> Tensor:
        """The rows r of a chunk, ``[n, c, D]``."""
        rows = self.query[:, part] * self.alpha
        rows += peak
        rows -= rows.amax(-1, keepdim=True)
        return rows.exp_()

    def blind(self) -> Tensor | None:
        """Rows that see no key at all, ``[n, T, 1]``; None where there are none."""
        if self.key_mask is None:
            return None
        return (self.key_mask.cumsum(-1) == 0).unsqueeze(-1)


@torch.no_grad()
def walk(inputs: Inputs, guard: float) -> Walked | None:
    """Eq. (8) with every row's sum running over the keys up to itself.

    Args:
        inputs: Of the call.
        guard: The smallest normaliser of a row that has its digits.

    Returns:
        The output, without gradient, or None if a row has lost digits.
    """
    heads = inputs.flat()
    query, value = heads.query, heads.value
    out = query.new_empty(*query.shape[:2], value.shape[2])
    normaliser = query.new_empty(*query.shape[:2], 1)
    state, lower = _State(query, value), _lower(query)
    for part in heads.parts():
        exponent, values = heads.exponents(part)
        state.move(torch.maximum(state.peak, exponent.amax(-2, keepdim=True)))
        weights = exponent.sub_(state.peak).exp_()
        rows = heads.rows(part, state.peak)
        score = torch.bmm(rows, row_by_row(weights.mT))
        score *= lower[: rows.shape[1], : rows.shape[1]]
        sums, masses = state.read()
        out[:, part] = add_product(torch.bmm(rows, sums), score, values)
        normaliser[:, part] = torch.bmm(rows, masses).add_(score.sum(-1, keepdim=True))
        state.add(weights, values)
    blind = heads.blind()
    if blind is not None:
        # Their sums are exactly 0, and so must be their output.
        normaliser.masked_fill_(blind, 1.0)
    if bool((normaliser < guard).any()):
        return None
    shape = inputs.query.shape[:3]
    out.div_(normaliser)
    return Walked(out.view(*shape, value.shape[2]), normaliser.view(*shape, 1))


@torch.no_grad()
def walk_back(inputs: Inputs, walked: Walked, gradient: Tensor, needs: Sequence[bool]) -> list[Any]:
    """Gradients of query, key, value, and of α and β for every head, ``[B, H, 1, 1]``.

    Args:
        inputs: Of the call.
        walked: What the walk has found.
        gradient: Of the output.
        needs: Which of the five are needed; None is returned for α and β that are not.
    """
    heads = inputs.flat()
    query, key, value, alpha, beta, key_mask = heads
    parts, lower = heads.parts(), _lower(query)
    peaks, sums, masses = _states(heads)
    of_sums = flat(gradient / walked.normaliser)
    of_mass = -(of_sums * walked.out.flatten(0, 1)).sum(-1, keepdim=True)
    blind = heads.blind()
    if blind is not None:
        of_sums, of_mass = (side.masked_fill(blind, 0.0) for side in (of_sums, of_mass))
    dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    later_sums, later_mass = torch.zeros_like(sums[0]), torch.zeros_like(masses[0])
    for place in range(len(parts) - 1, -1, -1):
        part, peak = parts[place], peaks[place]
        exponent, values = heads.exponents(part)
        weights = exponent.sub_(peak).exp_()
        rows = heads.rows(part, peak)
        seen = lower[: rows.shape[1], : rows.shape[1]]
        up, up_mass = row_by_row(of_sums[:, part]), of_mass[:, part]
        score = torch.bmm(rows, row_by_row(weights.mT)).mul_(seen)
        of_score = torch.bmm(up, row_by_row(values.mT)).add_(up_mass).mul_(seen)
        of_rows = torch.bmm(of_score, weights)
        add_product(of_rows, up, sums[place].mT).addcmul_(up_mass, masses[place].mT)
        of_weights = torch.bmm(of_score.mT, rows)
        add_product(of_weights, values, later_sums.mT).add_(later_mass.mT)
        dv[:, part] = add_product(torch.bmm(score.mT, up), weights, later_sums)
        dq[:, part] = of_rows.mul_(rows)
        dk[:, part] = of_weights.mul_(weights)
        add_product(later_sums, rows.mT, up)
        add_product(later_mass, rows.mT, up_mass)
        if place:
            factor = (peaks[place - 1] - peak).exp_().mT
            later_sums *= factor
            later_mass *= factor
    if key_mask is not None:
        masked = ~key_mask.unsqueeze(-1)
        key = key.masked_fill(masked, 0.0)
        dk, dv = dk.masked_fill_(masked, 0.0), dv.masked_fill_(masked, 0.0)
    shape = inputs.query.shape[:2]
    found = [
        _product(one, other).view(*shape, 1, 1) if need else None
        for one, other, need in zip((query, key), (dq, dk), needs[3:], strict=True)
    ]
    sides = (dq.mul_(alpha), dk.mul_(beta), dv)
    return [*(side.view(*shape, *side.shape[1:]) for side in sides), *found]


def _states(heads: Heads) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Peak of every chunk, and the state of all keys before it."""
    state = _State(heads.query, heads.value)
    peaks, sums, masses = [], [], []
    for part in heads.parts():
        exponent, values = heads.exponents(part)
        state.move(torch.maximum(state.peak, exponent.amax(-2, keepdim=True)))
        peaks.append(state.peak)
        for found, side in zip((sums, masses), state.read(), strict=True):
            found.append(side.clone())
        state.add(exponent.sub_(state.peak).exp_(), values)
    return peaks, sums, masses


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Σ over tokens and channels, ``[n]``: few results, many terms each."""
    found = (left * right).sum((-1, -2), dtype=torch.float64)
    return found.to(left.dtype)


def _lower(like: Tensor) -> Tensor:
    return like.new_ones(CHUNK, CHUNK).tril_()


class _State:
    """Sums over all earlier keys, relative to the largest exponent of every slot so far."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        heads, _, width = query.shape
        self.peak = query.new_full((heads, 1, width), LOG_ZERO)
        # Of this span and, once one has ended, of all earlier ones.
        self.sums = [query.new_zeros(heads, width, value.shape[2])]
        self.masses = [query.new_zeros(heads, width, 1)]
        self.chunks = 0

    def move(self, peak: Tensor) -> None:
        """To a peak that is at least as large."""
        if self.chunks:
            factor = (self.peak - peak).exp_().mT
            for side in (*self.masses, *self.sums):
                side *= factor
        self.peak = peak

    def read(self) -> tuple[Tensor, Tensor]:
        """S ``[n, D, E]`` and m ``[n, D, 1]``."""
        if len(self.sums) == 1:
            return self.sums[0], self.masses[0]
        return self.sums[0] + self.sums[1], self.masses[0] + self.masses[1]

    def add(self, weights: Tensor, values: Tensor) -> None:
        """The keys of a chunk."""
        add_product(self.sums[0], weights.mT, values)
        self.masses[0] += weights.sum(-2, keepdim=True).mT
        self.chunks += 1
        if self.chunks % SPAN == 0:
            for sides in (self.masses, self.sums):
                total = sides[0] if len(sides) == 1 else sides[0] + sides[1]
                sides[:] = [torch.zeros_like(total), total]


class WalkedAttention(torch.autograd.Function):
    """The output of a walk that has been taken, and its gradients.

    Takes the fields of `Inputs`, what the walk has found, and a function that computes the same
    with PyTorch's own gradients: second derivatives and batches of gradients go through it.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """What was found before."""
        *sides, walked, again = given
        save(ctx, sides, *walked)
        ctx.again = again
        return walked.out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """By a walk back, or the long way."""
        *sides, out, normaliser = saved(ctx)
        needs, (gradient,) = ctx.needs_input_grad[:5], gradients
        if torch.is_grad_enabled() or is_batched(gradient):

            def again(query: Tensor, key: Tensor, value: Tensor, alpha: Any, beta: Any) -> Tensor:
                return ctx.again(Inputs(query, key, value, alpha, beta, sides[5]))

            return *by_autograd(again, sides[:5], needs, gradient), None, None, None
        made = walk_back(Inputs(*sides), Walked(out, normaliser), gradient, needs)
        found = [
            side.sum_to_size(like.shape) if need else None
            for side, like, need in zip(made, sides, needs, strict=False)
        ]
        return *found, None, None, None
