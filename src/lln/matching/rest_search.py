"""The search for α, β and the offset of attention with exact keys: the rest with the least error.

With the exact keys of row i (its block and its chosen keys) read as softmax attention reads them,
what is left to choose is how the slots stand for the rest: their temperatures, and the offset g
that says how much of the row they get. Both are judged by what they are for, the distance of the
output from softmax attention's on a sample of rows. With E the output of the exact keys alone, S
that of the slots alone, O softmax attention's, and z the log-mass of the slots, at g = 0, over that
of the exact keys,

    output(g) = E + w (S - E)                         w = sigmoid(z + g)
    |output(g) - O|² = w² |S - E|² - 2w (S - E)·(O - E) + |O - E|²

so three numbers per row give the error at every g. The temperatures are those that match the
entropy of Gaussian softmax attention, times a few factors: a rest that is too cool costs little,
one that is too hot costs everything. Having no rest at all is always among the candidates.

Dimension legend: B batch, H heads, Hk key heads, T tokens, D head width, E value width, R sampled
rows, F factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lln.checks.call import fit_blocks
from lln.eager.key_attention import log_share, slots_of_heads
from lln.eager.key_blocks import Groups, dense_blocks
from lln.eager.selection import choose, seen_keys
from lln.eager.summary import LOG_ZERO
from lln.matching.calibration import PAIR_BUDGET, check_tokens, sampled_places, scoped_moments
from lln.matching.mass import REST_FACTOR, keys_temperatures, mass_offset
from lln.precision import accumulation_dtype, without_autocast

# The offset of a head that is better off without its slots.
NO_REST = LOG_ZERO

# What temperatures of matched entropy are multiplied with. Gaussian heads want a half; a decoder's
# heads, whose keys are no Gaussians, are best between a half and an eighth.
FACTORS = (1.0, 0.5, 0.25, 0.125)

# Points of the first grid of offsets, of every finer one, and how many of those there are.
GRID, FINER, ROUNDS = 65, 17, 2


class KeyChoice(NamedTuple):
    """How the keys of a call are chosen.

    Attributes:
        keys: K.
        block_size: Tokens in a block.
        group_size: Queries that share their keys.
    """

    keys: int
    block_size: int
    group_size: int


class SampledRows(NamedTuple):
    """What is known of sampled rows, for every factor and head: each ``[F, H, R]``.

    Attributes:
        gap: z; far below zero where a row has no rest.
        square: |S - E|².
        product: (S - E)·(O - E).
    """

    gap: Tensor
    square: Tensor
    product: Tensor


def entropy_temperatures(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    pooled: bool,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """α and β of matched entropy, where `find_rest` starts: ``[B, H, 1, 1]`` or ``[1, H, 1, 1]``.

    The arguments are those of `find_rest`.
    """
    check_tokens(key, key_mask)
    with without_autocast(query), torch.no_grad():
        moments = scoped_moments(query, key, key_mask, pooled)
        # A scale is a factor of the queries, beside the usual 1/√D.
        factor = 1.0 if scale is None else abs(scale) * math.sqrt(query.shape[-1])
        moments = moments._replace(query_variance=factor**2 * moments.query_variance)
        alpha, beta = keys_temperatures(moments, query.shape[-1], "entropy")
        return factor * alpha, beta


def find_rest(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    beta: float | Tensor,
    key_mask: Tensor | None,
    pooled: bool,
    choice: KeyChoice,
    *,
    factors: Sequence[float] = FACTORS,
    may_be_none: bool = True,
    rows: int = 256,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """α, β and the offset with the smallest error, ``[B, H, 1, 1]``, pooled ``[1, H, 1, 1]``.

    `calibrate_keys` says what most arguments are. α and β are where the search starts, numbers or
    ``[B, H, 1, 1]``, and ``factors`` what they may be multiplied with; ``pooled`` is the scope
    ``"batch"``. ``may_be_none`` puts `NO_REST` among the candidates: an offset that will be trained
    would never come back from there.
    """
    batch, heads = query.shape[:2]
    with without_autocast(query), torch.no_grad():
        dtype = accumulation_dtype(query.dtype)
        query, key, value = (side.detach().to(dtype) for side in (query, key, value))
        shape = (1 if pooled else batch, heads, 1, 1)
        alpha, beta = (
            torch.as_tensor(side, dtype=dtype, device=query.device).expand(batch, heads, 1, 1)
            for side in (alpha, beta)
        )
        every = torch.tensor(factors, dtype=dtype, device=query.device)[:, None, None, None]
        measured = [
            _measure(
                query[one], key[one], value[one], every * alpha[one], every * beta[one],
                None if key_mask is None else key_mask[one], choice, rows, scale,
            )
            for one in (slice(sample, sample + 1) for sample in range(batch))
        ]  # fmt: skip
        if pooled and measured:
            measured = [
                SampledRows(*(torch.cat(sides, -1) for sides in zip(*measured, strict=True)))
            ]
        best = [_least_error(rows, may_be_none) for rows in measured]
        if not best:
            empty = alpha.new_zeros(shape)
            return empty, empty, empty
        index, offset, has_rest = (torch.stack(sides) for sides in zip(*best, strict=True))
        # Without a rest to judge by: half the temperature, as for Gaussian heads.
        usual = min(range(len(factors)), key=lambda place: abs(factors[place] - REST_FACTOR))
        index = torch.where(has_rest, index, usual)
        chosen = every.flatten()[index][..., None, None]
        alpha, beta = (chosen * side[: shape[0]] for side in (alpha, beta))
        moments = scoped_moments(query, key, key_mask, pooled)
        closed = mass_offset(moments, alpha, beta, query.shape[-1], scale)
        offset = torch.where(has_rest[..., None, None], offset[..., None, None], closed)
        return alpha, beta, offset


def _measure(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor,
    beta: Tensor,
    key_mask: Tensor | None,
    choice: KeyChoice,
    rows: int,
    scale: float | None,
) -> SampledRows:
    """Compare the parts of the output with softmax attention, on sampled rows of one sample.

    The arguments are those of `find_rest`, of a batch of one; α and β are ``[F, H, 1, 1]``.
    """
    _, heads, tokens, width = query.shape
    keys, block_size, group_size = choice
    block_size, group_size = fit_blocks(block_size, group_size, tokens)
    blocks = dense_blocks(1, tokens, block_size, key_mask, query.device)
    groups = Groups(blocks, group_size, key_mask)
    flip = scale is not None and scale < 0
    indices = choose(query, key, keys, groups, flip=flip)
    scale = 1 / math.sqrt(width) if scale is None else scale
    key, value = (side.repeat_interleave(heads // side.shape[1], 1) for side in (key, value))
    if key_mask is not None:
        valid = key_mask[:, None, :, None]
        query, key, value = (torch.where(valid, side, 0.0) for side in (query, key, value))
    seen = seen_keys(indices, groups)
    share = blocks.scatter(log_share(seen, groups, query.dtype))
    # One column more than there are tokens, where keys go that a group does not see.
    chosen = torch.where(seen, indices, tokens)[0]

    def slots_alone(alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """What rows would get from their slots alone: log-mass and output, ``[H, T, ·]``."""
        slots = slots_of_heads(key, value, beta[None], key_mask, heads)
        log_mass, centroid, centre = (side[0] for side in slots)
        level = scale * (query[0] * centre).sum(-1, keepdim=True)
        logits = alpha * query[0] + log_mass + level
        return logits.logsumexp(-1), logits.softmax(-1) @ centroid[:, 0]

    slots = [slots_alone(*sides) for sides in zip(alpha, beta, strict=True)]
    token = torch.arange(tokens, device=query.device)
    exists = token < tokens if key_mask is None else key_mask[0]
    place = sampled_places(key_mask, 1, tokens, rows, query.device)[0]
    place, home = place[place >= 0], blocks.home[0]
    group = home * (blocks.place.shape[2] // group_size) + blocks.within[0] // group_size
    step = max(PAIR_BUDGET // max(heads * tokens, 1), 1)
    # A row that has no rest, so that there always is one.
    nothing = query.new_zeros(heads, 1)
    parts = [(nothing + LOG_ZERO, nothing, nothing)] * len(slots)
    for row in place.split(step):
        own = home[row, None]
        exact = torch.zeros(heads, len(row), tokens + 1, dtype=torch.bool, device=query.device)
        exact = exact.scatter_(-1, chosen[:, group[row]], True)[..., :tokens] | (home == own)
        scores = torch.where(exists, scale * query[0][:, row] @ key[0].mT, -torch.inf)
        near = torch.where(exact, scores, -torch.inf)
        from_near = near.softmax(-1) @ value[0]
        missing = scores.softmax(-1) @ value[0] - from_near
        level = share[0][:, row, 0] - near.logsumexp(-1)
        for log_mass, read in slots:
            towards = read[:, row] - from_near
            gap = log_mass[:, row] + level
            parts.append((gap, towards.square().sum(-1), (towards * missing).sum(-1)))
    count = len(slots)
    return SampledRows(
        *(
            torch.stack([torch.cat(side[one::count], -1) for one in range(count)])
            for side in zip(*parts, strict=True)
        )
    )


def _least_error(rows: SampledRows, may_be_none: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The place of the best factor, the best offset, and whether any row has a rest; ``[H]``."""
    there = rows.gap > LOG_ZERO / 2
    has_rest = there.any(-1)
    # Where the slots take nothing from any row, and where they take everything.
    low = -torch.where(there, rows.gap, -torch.inf).amax(-1) - 8
    high = -torch.where(there, rows.gap, torch.inf).amin(-1) + 8
    low, high = (torch.where(has_rest, side, 0.0) for side in (low, high))

    def error(offset: Tensor) -> Tensor:
        """Beside what there is without slots, ``[F, H]``."""
        weight = (rows.gap + offset.unsqueeze(-1)).sigmoid()
        return (weight * (weight * rows.square - 2 * rows.product)).sum(-1)

    best, offset = torch.full_like(low, torch.inf), low
    step = (high - low) / (GRID - 1)
    points = [low + number * step for number in range(GRID)]
    for _ in range(ROUNDS + 1):
        for point in points:
            found = error(point)
            better = found < best
            best, offset = torch.where(better, found, best), torch.where(better, point, offset)
        middle, step = offset, 2 * step / (FINER - 1)
        points = [middle + (number - FINER // 2) * step for number in range(FINER)]
    least, index = best.min(0)
    offset = offset.gather(0, index[None])[0]
    if may_be_none:
        offset = torch.where(least < 0, offset, NO_REST)
    return index, offset, has_rest.any(0)
