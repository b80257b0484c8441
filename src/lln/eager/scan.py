"""The running merge of a row of summaries: what every chunk may read of the chunks before it.

A summary holds keys and values in D slots (`lln.eager.summary`). Summaries merge associatively, so
the running merge is a scan. It is done in blocks: inside a block one small lower-triangular product
per slot, then the same over the blocks' totals, and so on. All weights are exp(L_j − L_merged) ≤ 1,
so no step can overflow, and the cost is linear in the number of summaries.

Dimension legend: n summaries in a row, D slots, E value width, ``...`` leading dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.eager.summary import LOG_ZERO, merge
from lln.tracing import is_compiling

BLOCK = 32

# Segment number of the padding after the last summary: larger than any number of sequences.
_NO_SEGMENT = 2**62


def running_merge(
    log_mass: Tensor, centroid: Tensor, segment: Tensor | None = None, levels: int | None = None
) -> tuple[Tensor, Tensor]:
    """Summary i of the result holds summaries 0 … i (of the same segment) merged.

    Args:
        log_mass: ``[..., n, D]``.
        centroid: ``[..., n, D, E]``.
        segment: int ``[n]``, never decreasing; summaries merge within a segment only.
            None = all one segment.
        levels: How many levels of block totals to use; None = as many as needed. A trace must hold
            for every length and uses one: linear up to BLOCK² summaries.
    """
    count = log_mass.shape[-2]
    if levels is None and is_compiling():
        levels = 1
    if segment is None:
        segment = torch.zeros(count, dtype=torch.int64, device=log_mass.device)
    if levels == 0 if levels is not None else count <= BLOCK:
        return _merge_triangle(log_mass, centroid, segment)
    blocks = whole_parts(count, BLOCK)
    padding = blocks * BLOCK - count
    log_mass = F.pad(log_mass, (0, 0, 0, padding), value=LOG_ZERO).unflatten(-2, (blocks, BLOCK))
    centroid = F.pad(centroid, (0, 0, 0, 0, 0, padding)).unflatten(-3, (blocks, BLOCK))
    segment = F.pad(segment, (0, padding), value=_NO_SEGMENT).unflatten(0, (blocks, BLOCK))
    log_mass, centroid = _merge_triangle(log_mass, centroid, segment)

    above = None if levels is None else levels - 1
    totals = (log_mass[..., -1, :], centroid[..., -1, :, :])
    carry = running_merge(*totals, segment[:, -1], above)
    carry_log_mass, carry_centroid = shift(*carry)
    carry_segment = F.pad(segment[:-1, -1], (1, 0), value=-1)
    continues = (segment == carry_segment.unsqueeze(-1)).unsqueeze(-1)
    carry_log_mass = torch.where(continues, carry_log_mass.unsqueeze(-2), LOG_ZERO)
    carry_centroid = torch.where(continues.unsqueeze(-1), carry_centroid.unsqueeze(-3), 0.0)
    log_mass, centroid = merge(log_mass, centroid, carry_log_mass, carry_centroid)
    return log_mass.flatten(-3, -2)[..., :count, :], centroid.flatten(-4, -3)[..., :count, :, :]


def earlier_merge(
    log_mass: Tensor, centroid: Tensor, before: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Summary i of the result holds what came before the row, and summaries 0 … i − 1 of it.

    Args:
        log_mass: ``[..., n, D]``.
        centroid: ``[..., n, D, E]``.
        before: Log-mass ``[..., D]`` and centroid ``[..., D, E]`` of earlier tokens.
    """
    log_mass = torch.cat([before[0].unsqueeze(-2), log_mass[..., :-1, :]], -2)
    centroid = torch.cat([before[1].unsqueeze(-3), centroid[..., :-1, :, :]], -3)
    return running_merge(log_mass, centroid)


def whole_parts(count: int, size: int) -> int:
    """How many parts of ``size`` items hold ``count`` items.

    A trace must hold for every count and cannot ask whether the last part is full, so it always
    uses one part more than the number of full ones.
    """
    if is_compiling():
        return count // size + 1
    return (count + size - 1) // size


def shift(log_mass: Tensor, centroid: Tensor) -> tuple[Tensor, Tensor]:
    """Shift every summary by one place; the first becomes empty."""
    log_mass = F.pad(log_mass[..., :-1, :], (0, 0, 1, 0), value=LOG_ZERO)
    return log_mass, F.pad(centroid[..., :-1, :, :], (0, 0, 0, 0, 1, 0))


def _merge_triangle(log_mass: Tensor, centroid: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
    """The running merge of one short row, as one lower-triangular product per slot."""
    place = torch.arange(log_mass.shape[-2], device=log_mass.device)
    visible = (place.unsqueeze(-1) >= place) & (segment.unsqueeze(-1) == segment.unsqueeze(-2))
    # [..., D, i, j]: the weight of summary j in the merge of all summaries up to i.
    weight = torch.where(visible.unsqueeze(-3), log_mass.mT.unsqueeze(-2), LOG_ZERO)
    merged = weight.logsumexp(-1)
    # Set to zero explicitly: in a row without any key so far, softmax gives invisible ones weight.
    weight = torch.where(visible.unsqueeze(-3), weight.softmax(-1), 0.0)
    # A NaN must reach the rows that see it, but as 0 · NaN it would reach all others too.
    broken = ~centroid.isfinite().all(-1)
    centroid = torch.where(broken.unsqueeze(-1), 0.0, centroid)
    out = (weight @ centroid.transpose(-3, -2)).transpose(-3, -2)
    reached = visible.to(log_mass.dtype) @ broken.to(log_mass.dtype) > 0
    return merged.mT, torch.where(reached.unsqueeze(-1), torch.nan, out)
