"""Exact keys: one softmax over a query's own block, its chosen keys and the slots of the summary.

For query i of a block, with (L, C) the summary of the sequence (`lln.eager.summary`):

    logits_i = [ q_i·k_j/√D                 keys j of its block
               | q_i·k_j/√D                 keys j chosen for its group, outside the block
               | αq_if + (L_f - βμ_f) + q_i·μ/√D + g + ln ρ_i    slots f = 1 … D ]
    out_i = softmax(logits_i) · [ v_j | v_j | C_f ]

ρ_i is the share of keys that are neither in the block nor chosen: when every key is exact, the
slots vanish and this is softmax attention. μ is the mean of the keys that the summary holds: the
slots are those of centred keys. Softmax does not change when a vector is added to all keys, and
neither does this.

Dimension legend: B batch (1 for packed sequences), H heads, T tokens, D head width, E value width,
n blocks, W tokens in a block, G groups, g queries in a group, K keys per group.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lln.eager.key_blocks import Groups
from lln.eager.products import multiply
from lln.eager.scan import running_merge
from lln.eager.selection import seen_keys
from lln.eager.summary import LOG_ZERO, key_exponents, summarise, summarise_heads

# L - βμ, C and μ.
Slots = tuple[Tensor, Tensor, Tensor]


class KeyTerms(NamedTuple):
    """A call in the accumulation dtype, whose tokens lie in blocks.

    Attributes:
        query: ``[B, H, T, D]``.
        key: Like query.
        value: ``[B, H, T, E]``.
        alpha: A number, or broadcasts to ``[B, H, n, 1, 1]``.
        offset: g, likewise.
        slots: L - βμ, C and μ for every block: broadcast to ``[B, H, n, D]``, ``[B, H, n, D, E]``
            and ``[B, H, n, D]``.
        groups: Where the tokens lie, and what a group may see.
        scale: Factor of the scores; None = 1/√D.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    alpha: float | Tensor
    offset: float | Tensor
    slots: Slots
    groups: Groups
    scale: float | None = None

    @property
    def factor(self) -> float:
        """Factor of the scores."""
        return 1.0 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale


def attend_keys(terms: KeyTerms, indices: Tensor, *, are_seen: bool = False) -> Tensor:
    """The attention above: ``[B, H, T, E]``.

    Args:
        terms: The call.
        indices: int ``[B, H, G, K]``; -1 = none. Keys that a group may not see are left out.
        are_seen: Whether indices hold only keys that a group may see, so that none is left out.
    """
    seen = indices >= 0 if are_seen else seen_keys(indices, terms.groups)
    share = log_share(seen, terms.groups, terms.query.dtype)
    chosen = tuple(_pick(side, indices, seen) for side in (terms.key, terms.value))
    return attend_rows(terms, share, chosen, seen)


def attend_rows(terms: KeyTerms, share: Tensor, chosen: tuple[Tensor, ...], seen: Tensor) -> Tensor:
    """The attention above from chosen rows, wherever they come from: ``[B, H, T, E]``.

    Args:
        terms: The call.
        share: Ln ρ, ``[B, H, n, W, 1]``.
        chosen: The chosen keys ``[B, H, G, K, D]`` and their values ``[B, H, G, K, E]``, zero where
            not seen.
        seen: bool ``[B, H, G, K]``, which of them there are.
    """
    blocks, group_size, key_mask = terms.groups
    rows = blocks.gather(terms.query)
    scaled = rows * terms.factor
    near_keys, near_values = blocks.gather(terms.key), blocks.gather(terms.value)
    # Where every place holds a key, there is nothing to hide.
    valid = None if blocks.is_plain and key_mask is None else blocks.valid(key_mask)
    if valid is not None:
        keep = valid[:, None].unsqueeze(-1)
        near_keys, near_values = (torch.where(keep, side, 0.0) for side in (near_keys, near_values))
    near = multiply(scaled, near_keys.mT)
    if valid is not None:
        near = torch.where(valid[:, None].unsqueeze(-2), near, LOG_ZERO)

    far_keys, far_values = chosen
    grouped = scaled.flatten(2, 3).unflatten(2, (-1, group_size))
    far = torch.where(seen.unsqueeze(-2), multiply(grouped, far_keys.mT), LOG_ZERO)
    far = far.flatten(2, 3).unflatten(2, (-1, near.shape[3]))

    log_mass, centroid, centre = terms.slots
    level = (scaled * centre.unsqueeze(-2)).sum(-1, keepdim=True) + terms.offset + share
    linear = terms.alpha * rows + (log_mass.unsqueeze(-2) + level)

    weights = torch.cat([near, far, linear], -1).softmax(-1)
    near, far, linear = weights.split([near.shape[-1], far.shape[-1], linear.shape[-1]], -1)
    far = far.flatten(2, 3).unflatten(2, (-1, group_size))
    from_far = multiply(far, far_values).flatten(2, 3).unflatten(2, (-1, near.shape[3]))
    return blocks.scatter(multiply(near, near_values) + from_far + _read(linear, centroid))


def _read(weights: Tensor, centroid: Tensor) -> Tensor:
    """What the slots bring: ``[B, H, n, W, E]``; blocks may share one summary."""
    if centroid.shape[2] == 1 and weights.shape[:2] == centroid.shape[:2]:
        rows = multiply(weights.flatten(2, 3), centroid[:, :, 0])
        return rows.unflatten(2, (-1, weights.shape[3]))
    alike = weights.shape[:3] == centroid.shape[:3]
    return multiply(weights, centroid) if alike else weights @ centroid


def log_share(seen: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Ln ρ of every query, ``[B, H, n, W, 1]``: the share of the summary's keys not exact.

    Args:
        seen: bool ``[B, H, G, K]``, see `lln.eager.selection.seen_keys`.
        groups: Who sees them.
        dtype: Of the result.
    """
    blocks, group_size, key_mask = groups
    size = blocks.place.shape[2]
    own = blocks.valid(key_mask).sum(-1)
    upto = own.cumsum(-1)
    held = upto[:, blocks.last] - (upto - own)[:, blocks.first]
    far = seen.sum(-1).unflatten(2, (-1, size // group_size))
    return share_of(held, held - own, far, group_size, dtype)


def share_of(
    held: Tensor, rest: Tensor, far: Tensor, group_size: int, dtype: torch.dtype
) -> Tensor:
    """Ln ρ of every query, ``[B, H, n, W, 1]``, from numbers of keys.

    Args:
        held: int ``[B, n]``, keys in the summary that a block reads.
        rest: int ``[B, n]``, those of them outside the block.
        far: int ``[B, H, n, W / g]``, those chosen by every group.
        group_size: g.
        dtype: Of the result.
    """
    left = (rest[:, None, :, None] - far).to(dtype)
    share = left / held[:, None, :, None].clamp_min(1)
    found = torch.where(left > 0, share.clamp_min(torch.finfo(dtype).tiny).log(), LOG_ZERO)
    return found.repeat_interleave(group_size, -1).unsqueeze(-1)


def slots_of_sequences(
    key: Tensor, value: Tensor, beta: float | Tensor, groups: Groups, segment: Tensor
) -> Slots:
    """L - βμ, C and μ of the packed sequence of every block.

    Args:
        key: ``[1, H, T, D]``.
        value: ``[1, H, T, E]``.
        beta: A number, or broadcasts to ``[1, H, n, 1, 1]``.
        groups: Where the tokens lie.
        segment: int ``[n]``, the sequence of every block.
    """
    blocks, _, key_mask = groups
    valid = blocks.valid(key_mask)[:, None]
    rows = blocks.gather(key)
    summaries = summarise(*key_exponents(rows, blocks.gather(value), beta, valid))
    # The mean key is the centroid of one more slot, in which all keys weigh the same. Its weights
    # are shares: a difference of running sums would lose the digits of what came in between.
    own = torch.where(valid.unsqueeze(-1), rows, 0.0).sum(-2)
    number = valid.sum(-1, keepdim=True).to(own.dtype)
    weight = torch.where(number > 0, number.clamp_min(1).log(), LOG_ZERO)
    mean = weight, (own / number.clamp_min(1)).unsqueeze(-2)
    (log_mass, centroid), (_, centre) = (
        (mass.index_select(-2, blocks.last), middle.index_select(-3, blocks.last))
        for mass, middle in (running_merge(*sides, segment) for sides in (summaries, mean))
    )
    centre = centre.squeeze(-2)
    factor = beta.squeeze(-1) if isinstance(beta, Tensor) else beta
    return log_mass - factor * centre, centroid, centre


def slots_of_heads(
    key: Tensor, value: Tensor, beta: float | Tensor, key_mask: Tensor | None, heads: int
) -> Slots:
    """L - βμ, C and μ of whole sequences: ``[B, H, 1, D]``, ``[B, H, 1, D, E]``, ``[B, H, 1, D]``.

    Args:
        key: ``[B, Hk, T, D]``.
        value: ``[B, Hk, T, E]``.
        beta: A number, or broadcasts to ``[B, H, 1, 1]`` or ``[B, Hk, 1, 1]``.
        key_mask: bool ``[B, T]``.
        heads: H.
    """
    log_mass, centroid = summarise_heads(key, value, beta, key_mask)
    if key_mask is None:
        centre = key.sum(2) / max(key.shape[2], 1)
    else:
        kept = torch.where(key_mask[:, None, :, None], key, 0.0)
        centre = kept.sum(2) / key_mask.sum(-1).clamp_min(1)[:, None, None]
    summaries = log_mass.shape[1]
    own = centre.repeat_interleave(summaries // max(centre.shape[1], 1), 1)
    if isinstance(beta, Tensor):
        beta = beta.to(key.dtype).reshape((1,) * (4 - beta.dim()) + tuple(beta.shape)).squeeze(-1)
    sides = (log_mass - beta * own, centroid, own)
    log_mass, centroid, centre = (
        side.repeat_interleave(heads // max(summaries, 1), 1).unsqueeze(2) for side in sides
    )
    return log_mass, centroid, centre


def _pick(side: Tensor, indices: Tensor, seen: Tensor) -> Tensor:
    """The rows of ``[B, H, T, D]`` that a group has chosen: ``[B, H, G, K, D]``; 0 if not seen."""
    known = torch.where(seen, indices, 0).flatten(2).unsqueeze(-1)
    rows = side.gather(2, known.expand(-1, -1, -1, side.shape[-1]))
    return torch.where(seen.unsqueeze(-1), rows.unflatten(2, seen.shape[2:]), 0.0)
