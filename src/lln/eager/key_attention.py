"""Exact keys: one softmax over a query's own block, its chosen keys and the slots of the summary.

For query i of a block, with (L, C) the summary of the sequence (`lln.eager.summary`):

    logits_i = [ q_i·k_j/√D                 keys j of its block
               | q_i·k_j/√D                 keys j chosen for its group, outside the block
               | αq_if + (L_f - βμ_f) + q_i·μ/√D + g + ln ρ_i    slots f = 1 … D ]
    out_i = softmax(logits_i) · [ v_j | v_j | C_f ]

ρ_i is the share of keys that are neither in the block nor chosen: when every key is exact, the
slots vanish and this is softmax attention. μ is the mean of the keys that the summary holds: the
slots are those of centred keys. Softmax does not change when a vector is added to all keys, and
neither does this. A causal row sees the chosen keys and the summary of earlier blocks only.

Dimension legend: B batch (1 for packed sequences), H heads, T tokens, D head width, E value width,
n blocks, W tokens in a block, G groups, g queries in a group, K keys per group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lln.eager.key_blocks import Groups, KeyBlocks
from lln.eager.key_terms import KeyTerms, Slots
from lln.eager.products import multiply
from lln.eager.scan import earlier_merge, running_merge, shift
from lln.eager.selection import seen_keys
from lln.eager.summary import LOG_ZERO, key_exponents, summarise, summarise_heads


class Earlier(NamedTuple):
    """The tokens before the first block of a causal call that continues a sequence.

    Attributes:
        log_mass: ``[B, H, D]``, of their summary.
        centroid: ``[B, H, D, E]``.
        key_sum: ``[B, H, D]``, sum of their keys.
        number: ``[B, 1, 1]``, how many there are.
    """

    log_mass: Tensor
    centroid: Tensor
    key_sum: Tensor
    number: Tensor


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
    blocks, group_size, key_mask, is_causal = terms.groups
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
    if is_causal:
        later = torch.ones(near.shape[-2:], dtype=torch.bool, device=near.device).triu(1)
        # Below LOG_ZERO: a row whose visible keys are all masked must weigh those, not later keys.
        near = near.masked_fill(later, 10 * LOG_ZERO)

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
        groups: Who sees them; the summary of a causal group holds earlier blocks only.
        dtype: Of the result.
    """
    blocks, group_size, key_mask, is_causal = groups
    size = blocks.place.shape[2]
    own = blocks.valid(key_mask).sum(-1)
    upto = own.cumsum(-1)
    before = upto - own
    start = before[:, blocks.first]
    held = before - start if is_causal else upto[:, blocks.last] - start
    rest = held if is_causal else held - own
    far = seen.sum(-1).unflatten(2, (-1, size // group_size))
    return share_of(held, rest, far, group_size, dtype)


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


def slots_of_blocks(
    key: Tensor,
    value: Tensor,
    beta: float | Tensor,
    groups: Groups,
    segment: Tensor | None = None,
    before: Earlier | None = None,
) -> Slots:
    """L - βμ, C and μ that every block reads: of its sequence, or of the blocks before it.

    Args:
        key: ``[B, H, T, D]``.
        value: ``[B, H, T, E]``.
        beta: A number, or broadcasts to ``[B, H, n, 1, 1]``.
        groups: Where the tokens lie; if causal, a block reads only the blocks before it.
        segment: int ``[n]``, the sequence of every block; None = one sequence.
        before: What a causal call of one sequence has seen before the first block.
    """
    blocks, _, key_mask, is_causal = groups
    valid = blocks.valid(key_mask)[:, None]
    rows = blocks.gather(key)
    summaries = summarise(*key_exponents(rows, blocks.gather(value), beta, valid))
    # The mean key is the centroid of one more slot, in which all keys weigh the same. Its weights
    # are shares: a difference of running sums would lose the digits of what came in between.
    own = torch.where(valid.unsqueeze(-1), rows, 0.0).sum(-2)
    number = valid.sum(-1, keepdim=True).to(own.dtype)
    mean = _mean_slot(own, number)
    if before is None:
        log_mass, centroid = _merged(summaries, blocks, segment, is_causal)
        _, centre = _merged(mean, blocks, segment, is_causal)
    else:
        log_mass, centroid = earlier_merge(*summaries, (before.log_mass, before.centroid))
        _, centre = earlier_merge(*mean, _mean_slot(before.key_sum, before.number))
    centre = centre.squeeze(-2)
    factor = beta.squeeze(-1) if isinstance(beta, Tensor) else beta
    return log_mass - factor * centre, centroid, centre


def _merged(
    summaries: tuple[Tensor, Tensor], blocks: KeyBlocks, segment: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """The summary of every block's sequence, or of the blocks before it, from those of blocks."""
    log_mass, centroid = running_merge(*summaries, segment)
    if not is_causal:
        log_mass = log_mass.index_select(-2, blocks.last)
        return log_mass, centroid.index_select(-3, blocks.last)
    log_mass, centroid = shift(log_mass, centroid)
    begins = torch.arange(blocks.first.shape[0], device=blocks.first.device) == blocks.first
    log_mass = torch.where(begins[:, None], LOG_ZERO, log_mass)
    return log_mass, torch.where(begins[:, None, None], 0.0, centroid)


def _mean_slot(total: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Keys that all weigh the same as a summary of one slot, from their sum and their number.

    Args:
        total: ``[..., D]``.
        number: Broadcasts to ``[..., 1]``.

    Returns:
        Log-mass ``[..., 1]`` and centroid ``[..., 1, D]``.
    """
    log_mass = torch.where(number > 0, number.clamp_min(1).log(), LOG_ZERO)
    return log_mass, (total / number.clamp_min(1)).unsqueeze(-2)


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
