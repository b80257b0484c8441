"""Summaries of all ranks merged: of the whole sequence, or of the ranks before this one.

A rank's shard is summarised where it lies (`lln.eager.summary`); one gather brings the summaries
of all ranks, of fixed size whatever their lengths, and every rank merges them in the same order.

So are the statistics by which temperatures are matched: every rank gets the same numbers to the
last bit.

Dimension legend: R ranks, B batch, H query heads, SH summary heads, T queries, S keys, D head
width, E value width, x further columns of numbers per slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lln.checks.call import Call
from lln.eager.run import repeat_heads
from lln.eager.summary import LOG_ZERO
from lln.errors import InvalidInputError
from lln.matching.moments import Moments
from lln.matching.partial_moments import merge_heads, merge_tensors, part_of_heads, part_of_tensor
from lln.parallel.agreement import Shards
from lln.parallel.journeys import gather_later


class RankSummaries(NamedTuple):
    """The summaries of all ranks.

    Attributes:
        log_mass: ``[R, B, SH, D]``.
        centroid: ``[R, B, SH, D, E]``.
        sums: ``[R, B, SH, D, x]``, numbers that add up over the ranks.
    """

    log_mass: Tensor
    centroid: Tensor
    sums: Tensor

    def merged(self) -> tuple[Tensor, Tensor]:
        """Log-mass and centroid of the whole sequence.

        All at once: the second derivative of a pairwise merge is NaN for a rank without tokens.
        """
        weight = self.log_mass.softmax(0).unsqueeze(-1)
        return self.log_mass.logsumexp(0), (weight * self.centroid).sum(0)

    def centred(
        self, beta: float | Tensor, heads: int
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """L - βμ ``[B, heads, D]``, C and μ of the whole sequence; how many keys it has, ``[B]``.

        Of summaries whose sums are those of the keys and their number.
        """
        total, number = self.sums.sum(0).unbind(-1)
        sides = (*self.merged(), total)
        log_mass, centroid, total = (repeat_heads(side, heads) for side in sides)
        count = number[:, :1, :1].sum((1, 2)).long()
        centre = total / count.clamp_min(1)[:, None, None]
        if isinstance(beta, Tensor):
            beta = beta.to(log_mass.dtype).reshape((1,) * (4 - beta.dim()) + tuple(beta.shape))
            beta = beta.squeeze(-1)
        return (log_mass - beta * centre, centroid, centre), count

    def before(self, rank: int) -> RankSummaries:
        """Those of earlier ranks; the others as if they had no token.

        They stay in the graph with gradients of zero: the backward pass of a gather is a collective
        that no rank may leave out.
        """
        earlier = torch.arange(self.log_mass.shape[0], device=self.log_mass.device) < rank
        earlier = earlier.view(-1, 1, 1, 1)
        return self._replace(
            log_mass=torch.where(earlier, self.log_mass, LOG_ZERO),
            centroid=torch.where(earlier.unsqueeze(-1), self.centroid, 0.0),
        )


def gather_summaries(
    log_mass: Tensor, centroid: Tensor, shards: Shards, sums: Tensor | None = None
) -> Callable[[], RankSummaries]:
    """Start to gather the summaries of all ranks; what is returned waits for them.

    One collective; its gradient is one collective, too. Log-mass is ``[B, SH, D]``, the centroid
    ``[B, SH, D, E]``, and ``sums`` ``[B, SH, D, x]`` are numbers to add up; None = none.
    """
    if sums is None:
        sums = log_mass.new_empty(*log_mass.shape, 0)
    own = torch.cat([log_mass.unsqueeze(-1), centroid, sums], -1)
    everyone = gather_later(own, shards.ranks, shards.purpose("merging the summaries"))
    sizes = [1, centroid.shape[-1], sums.shape[-1]]

    def finish() -> RankSummaries:
        log_mass, centroid, sums = everyone().split(sizes, -1)
        return RankSummaries(log_mass.squeeze(-1), centroid, sums)

    return finish


def measure_shards(call: Call, shards: Shards, *, whole_tensor: bool) -> Callable[[], Moments]:
    """Moments of the whole sequence: ``[B, H]``, or ``[1, 1]`` of the whole tensor.

    It starts to gather those of the shards; what is returned waits for them. One statistic is taken
    over everything in the authors' code.
    """
    query, key, mask = call.query, call.key, call.key_mask
    masks_queries = _is_self_attention(call, shards)
    purpose = shards.purpose("merging the statistics")
    if whole_tensor:
        part = part_of_tensor(query, key, mask, masks_queries=masks_queries)
        parts = gather_later(part, shards.ranks, purpose)
        return lambda: merge_tensors(parts(), query)
    part = part_of_heads(query, key, mask, masks_queries=masks_queries)
    parts = gather_later(part, shards.ranks, purpose)
    return lambda: merge_heads(parts(), query, key)


def _is_self_attention(call: Call, shards: Shards) -> bool:
    """Whether there are as many queries as keys: the key mask then counts for the queries."""
    if shards.queries is None:
        return call.query.shape[2] == call.key.shape[2]
    starts, ends = shards.bounds
    keys = tuple(end - start for start, end in zip(starts, ends, strict=True))
    if keys == shards.queries:
        return True
    if shards.masked and sum(keys) == sum(shards.queries):
        raise InvalidInputError(
            f"{shards.operation}: the sequence has as many queries as keys, so key_mask says which "
            f"queries count, but the ranks hold {list(shards.queries)} queries and {list(keys)} "
            "keys; cut both in the same places, or give alpha and beta."
        )
    return False
