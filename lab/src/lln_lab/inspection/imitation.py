"""The LLN attention that could replace a softmax head, and how close it would come.

Dimension legend: B batch, H query heads, G heads of a group, T queries, S keys, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lln import match_moments
from lln.instruments import entropy, spectral_gap
from lln.instruments.attention_inputs import AttentionInputs
from lln.instruments.head_groups import head_groups, measure_all
from lln.instruments.observed_call import SeenCall
from lln.instruments.rows import AttentionRows
from lln.instruments.unmasked_heads import UnmaskedHeads
from lln.matching.calibration import LOG_SPREAD_RANGE, find_temperatures
from lln.matching.moments import head_moments

BINS, REACH = 60, 5.0
_STEPS = 12


class StandIn(NamedTuple):
    """LLN attention at the α and β that give a head's entropy; ``[B, H]`` unless stated.

    Attributes:
        alpha: α.
        beta: β.
        entropy: Its entropy in bits.
        spectral_gap: Its spectral gap.
        distance: Mean over the rows of the total variation to softmax's weights, from 0 to 1.
        even_distance: The same for uniform attention, 1/S everywhere.
        formula_entropy: Its entropy at the α and β of ``match_moments(criterion="entropy")``, which
            assumes Gaussian entries instead of measuring; NaN for causal attention.
        softmax_histogram: ``[B, H, BINS]``, share of softmax's log P in each bin over its mean ± 5
            standard deviations.
        lln_histogram: ``[B, H, BINS]``, the same for LLN's log P, over the same bins.
    """

    alpha: Tensor
    beta: Tensor
    entropy: Tensor
    spectral_gap: Tensor
    distance: Tensor
    even_distance: Tensor
    formula_entropy: Tensor
    softmax_histogram: Tensor
    lln_histogram: Tensor


def imitate(seen: SeenCall, tick: Callable[[], object] = lambda: None) -> StandIn:
    """Find the LLN attention for every head of a softmax call and measure it.

    Args:
        seen: A call of kind ``"softmax"`` with its ``log_normality`` among the values.
        tick: Called after each of two steps.
    """
    query, key, is_causal = seen.query, seen.key, bool(seen.options["is_causal"])
    mask = seen.options["key_mask"]
    alpha, beta = _temperatures(seen)
    # A head with NaN has no temperature; it is reported, and the others are still measured.
    healthy = alpha.isfinite() & beta.isfinite()
    alpha, beta = (torch.where(healthy, side, 1.0) for side in (alpha, beta))
    tick()

    def lln_entropy(alpha: Tensor, beta: Tensor) -> Tensor:
        own = {"alpha": alpha, "beta": beta, "key_mask": mask}
        return entropy(query, key, kind="lln", is_causal=is_causal, **own)

    found = lln_entropy(alpha, beta)
    gap = formula = torch.full_like(found, torch.nan)
    if query.shape[2] == key.shape[2]:
        own = {"alpha": alpha, "beta": beta, "key_mask": mask}
        gap = spectral_gap(query, key, kind="lln", is_causal=is_causal, **own)
    if not is_causal:
        closed = match_moments(query, key, criterion="entropy", key_mask=mask)
        formula = lln_entropy(*(torch.where(healthy, side, 1.0) for side in closed))
    distance, even_distance, own_histogram, lln_histogram = _compare(seen, alpha, beta)
    tick()
    return StandIn(
        alpha=torch.where(healthy, alpha, torch.nan)[..., 0, 0].double(),
        beta=torch.where(healthy, beta, torch.nan)[..., 0, 0].double(),
        entropy=found,
        spectral_gap=gap,
        distance=distance,
        even_distance=even_distance,
        formula_entropy=formula,
        softmax_histogram=own_histogram,
        lln_histogram=lln_histogram,
    )


def _temperatures(seen: SeenCall) -> tuple[Tensor, Tensor]:
    """α and β ``[B, H, 1, 1]`` at which LLN attention has softmax's entropy."""
    query, key, mask = seen.query, seen.key, seen.options["key_mask"]
    if not seen.options["is_causal"]:
        return find_temperatures(query, key, mask, pooled=False, scale=seen.options["scale"])
    # The same search as in `calibrate`, over rows that see earlier keys only.
    moments = head_moments(query, key, mask)
    spreads = [
        torch.where(moments.degenerate, 1.0, variance).sqrt()[..., None, None]
        for variance in (moments.query_variance, moments.key_variance)
    ]
    target = seen.values["entropy"].to(query.device)
    low, high = (torch.full_like(target, end) for end in LOG_SPREAD_RANGE)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        alpha, beta = (middle.exp()[..., None, None] / spread for spread in spreads)
        found = entropy(
            query, key, kind="lln", alpha=alpha, beta=beta, key_mask=mask, is_causal=True
        )
        too_flat = found > target
        low, high = torch.where(too_flat, middle, low), torch.where(too_flat, high, middle)
    spread = ((low + high) / 2).exp()[..., None, None]
    return spread / spreads[0], spread / spreads[1]


def _compare(seen: SeenCall, alpha: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Distances ``[B, H]`` and histograms ``[B, H, BINS]`` of softmax and LLN, row by row."""
    shared = {name: seen.options[name] for name in ("key_mask", "is_causal", "scale")}
    softmax, lln = (
        AttentionInputs(seen.query, seen.key, kind=kind, alpha=alpha, beta=beta, **shared)
        for kind in ("softmax", "lln")
    )
    partners = (group.heads for group in head_groups(lln))
    centre = seen.values["log_normality.mean"], seen.values["log_normality.variance"].sqrt()
    places = (
        [side[group.samples].flatten().to(seen.query.device) for side in centre]
        for group in head_groups(softmax)
    )

    def compare(heads: UnmaskedHeads) -> tuple[Tensor, ...]:
        return _compare_heads(heads, next(partners), *next(places))

    return measure_all(softmax, compare, ((), (), (BINS,), (BINS,)))


def _compare_heads(
    softmax: UnmaskedHeads, lln: UnmaskedHeads, mean: Tensor, spread: Tensor
) -> tuple[Tensor, ...]:
    """The results of `_compare` for a group of heads, ``[G]`` and ``[G, BINS]``."""
    found = [
        _compare_head(softmax.part(head, head + 1), lln.part(head, head + 1), *place)
        for head, place in enumerate(zip(mean, spread, strict=True))
    ]
    return tuple(torch.stack(column) for column in zip(*found, strict=True))


def _compare_head(
    softmax: UnmaskedHeads, lln: UnmaskedHeads, mean: Tensor, spread: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    distance = even_distance = own_counts = lln_counts = torch.zeros((), dtype=torch.float64)
    entries = 0
    # The tiles of both cover the same entries.
    pairs = zip(AttentionRows(softmax).tiles(), AttentionRows(lln).tiles(), strict=True)
    for own, other in pairs:
        there = own.log_p > -torch.inf
        p = own.log_p.exp()
        even = there / there.sum(-1, keepdim=True)
        distance = distance + (p - other.log_p.exp()).abs().sum() / 2
        even_distance = even_distance + (p - even).abs().sum() / 2
        own_counts = own_counts + _histogram((own.log_p[there] - mean) / spread)
        lln_counts = lln_counts + _histogram((other.log_p[there] - mean) / spread)
        entries += int(there.sum())
    rows = softmax.query.shape[1]
    return distance / rows, even_distance / rows, own_counts / entries, lln_counts / entries


def _histogram(standard: Tensor) -> Tensor:
    return torch.histc(standard, BINS, -REACH, REACH)
