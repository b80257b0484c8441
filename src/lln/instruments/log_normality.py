"""The distribution of log P: its moments, and how far it is from a normal one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lln.checks.printing import brief
from lln.instruments.attention_inputs import AttentionInputs
from lln.instruments.head_groups import measure_all
from lln.instruments.instrument import instrument
from lln.instruments.merged_moments import EntryMoments, entry_moments
from lln.instruments.rows import AttentionRows, Rows

_TAIL = (1e-4, 1e-3, 5e-3)
_PERCENTS = tuple(percent / 100 for percent in range(1, 100))
PROBABILITIES = (*_TAIL, *_PERCENTS, *(1 - tail for tail in reversed(_TAIL)))

# What follows [B, H] in the shape of each field of `LogNormality` but the last.
SHAPES = (*((),) * 6, *((len(PROBABILITIES),),) * 2)

# A variance below this is rounding: such a distribution is a point and has no shape.
_POINT = 1e-20

# Matrices up to this many entries are sorted, larger ones counted in bins.
_SORTED = 1 << 20
_BINS = 1 << 14
_REACH = 12.0


class LogNormality(NamedTuple):
    """The distribution of log P (natural logarithm) over the entries that are not zero.

    Attributes:
        mean: ``[B, H]``.
        variance: ``[B, H]``, over all entries.
        row_variance: ``[B, H]``, mean over the rows of the variance inside a row.
        skew: ``[B, H]``, third standardised moment; 0 for a normal distribution.
        kurtosis: ``[B, H]``, fourth standardised moment less 3; 0 for a normal distribution.
        ks: ``[B, H]``, Kolmogorov-Smirnov distance to the normal distribution of that mean and
            variance, from 0 to 1.
        quantiles: ``[B, H, Q]``, quantiles of log P at ``probabilities``.
        normal_quantiles: ``[B, H, Q]``, the same of that normal distribution: the two axes of a Q-Q
            plot.
        probabilities: ``[Q]``.
    """

    mean: Tensor
    variance: Tensor
    row_variance: Tensor
    skew: Tensor
    kurtosis: Tensor
    ks: Tensor
    quantiles: Tensor
    normal_quantiles: Tensor
    probabilities: Tensor

    def __repr__(self) -> str:
        """By shapes."""
        return brief(self, self._asdict())


@instrument(AttentionInputs)
def log_normality(inputs: AttentionInputs) -> LogNormality:
    """Moments of log P, and its distance from a normal distribution (Propositions 3.1 and 4.1).

    Returns:
        A `LogNormality`; NaN as in `entropy`. Where log P does not vary (uniform attention) it has
        no shape: skew, kurtosis and KS distance are NaN.
    """
    found = measure_all(inputs, lambda heads: shape_of_log_p(AttentionRows(heads)), SHAPES)
    return LogNormality(*found, probabilities=probabilities(inputs.query.device))


def shape_of_log_p(rows: Rows) -> tuple[Tensor, ...]:
    """All fields of `LogNormality` but the last, ``[G]`` and ``[G, Q]``."""
    moments, within_row = entry_moments(rows)
    variance = moments.variance
    there = variance > _POINT
    skew = moments.third / moments.size / variance**1.5
    kurtosis = moments.fourth / moments.size / variance**2 - 3
    spread = variance.sqrt()
    sort = rows.shape[1] * rows.shape[2] <= _SORTED
    ks, quantiles = (_sorted if sort else _binned)(rows, moments, torch.where(there, spread, 1.0))
    quantiles = torch.where(there[:, None], quantiles, moments.mean[:, None])
    normal = torch.special.ndtri(probabilities(spread.device))
    shape = (torch.where(there, number, torch.nan) for number in (skew, kurtosis, ks))
    return (
        moments.mean,
        variance,
        within_row,
        *shape,
        quantiles,
        moments.mean[:, None] + spread[:, None] * normal,
    )


def probabilities(device: torch.device) -> Tensor:
    """The probabilities of the quantiles, ``[Q]``."""
    return torch.tensor(PROBABILITIES, dtype=torch.float64, device=device)


def _sorted(rows: Rows, moments: EntryMoments, spread: Tensor) -> tuple[Tensor, Tensor]:
    """KS distance and quantiles from all entries, one head after the other."""
    found = []
    for part in rows.slices():
        entries = torch.cat([tile.log_p.flatten(1) for tile in part.tiles()], -1)
        for own in entries:
            index = len(found)
            own = _ascending(own[own > -torch.inf])
            normal = torch.special.ndtr((own - moments.mean[index]) / spread[index])
            rank = torch.arange(own.shape[0] + 1, dtype=own.dtype, device=own.device) / own.shape[0]
            ks = torch.maximum((rank[1:] - normal).max(), (normal - rank[:-1]).max())
            found.append((ks, _interpolate(own, probabilities(own.device))))
    return torch.stack([ks for ks, _ in found]), torch.stack([points for _, points in found])


def _ascending(numbers: Tensor) -> Tensor:
    if numbers.device.type == "cpu":
        # Three times faster than torch, which also tracks where every number came from.
        return torch.from_numpy(np.sort(numbers.numpy()))
    return numbers.sort().values


def _interpolate(ordered: Tensor, wanted: Tensor) -> Tensor:
    """Quantiles of sorted numbers, linear between neighbours (`torch.quantile` stops at 16M)."""
    place = wanted * (ordered.shape[0] - 1)
    low = place.floor().long()
    high = (low + 1).clamp_max(ordered.shape[0] - 1)
    return torch.lerp(ordered[low], ordered[high], place - low)


def _binned(rows: Rows, moments: EntryMoments, spread: Tensor) -> tuple[Tensor, Tensor]:
    """KS distance and quantiles from a histogram over mean ± 12 standard deviations."""
    edges = torch.linspace(-_REACH, _REACH, _BINS + 1, dtype=spread.dtype, device=spread.device)
    counts = []
    for part in rows.slices():
        first, own = len(counts), []
        for tile in part.tiles():
            heads = slice(first, first + tile.log_p.shape[0])
            mean, scale = moments.mean[heads, None, None], spread[heads, None, None]
            standard = (tile.log_p - mean) / scale
            own.append(torch.stack([_histogram(head) for head in standard]))
        counts.extend(torch.stack(own).sum(0))
    cumulative = torch.stack(counts).cumsum(-1) / moments.size[:, None]
    normal = torch.special.ndtr(edges)
    ks = (cumulative - normal[1:]).abs().amax(-1)
    wanted = probabilities(spread.device).expand(cumulative.shape[0], -1).contiguous()
    above = torch.searchsorted(cumulative, wanted).clamp_max(_BINS - 1)
    below = torch.where(above > 0, cumulative.gather(-1, (above - 1).clamp_min(0)), 0.0)
    share = (wanted - below) / (cumulative.gather(-1, above) - below)
    standard = edges[above] + share * (edges[1] - edges[0])
    return ks, moments.mean[:, None] + spread[:, None] * standard


def _histogram(standard: Tensor) -> Tensor:
    """Counts by `torch.bincount`, which unlike `torch.histc` is deterministic on every device."""
    there = standard[standard > -torch.inf].clamp(-_REACH, _REACH)
    bins = ((there + _REACH) * (_BINS / (2 * _REACH))).long().clamp_max(_BINS - 1)
    return bins.bincount(minlength=_BINS)
