"""The plots of the report that are no heat maps, each as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lln.studies.inspection.choice import Chosen
from lln.studies.inspection.study import Layer, Study, bin_edges
from lln.studies.report.chart import Bars, Dots, Line, line_chart, linear_axis, log_axis
from lln.studies.report.limits import robust_ends
from lln.studies.report.markup import number

# Heads outside the axes that are named; the others are counted.
_MOST_NAMED = 3


class Plot(NamedTuple):
    """A plot, and what it leaves out, in sentences that begin with a space.

    Attributes:
        svg: Empty where there is nothing to draw.
        remark: Empty where everything is in the plot.
    """

    svg: str = ""
    remark: str = ""


def histogram(study: Study, chosen: Chosen) -> Plot:
    """The distribution of log P: of a head, of LLN in its place, and the fitted normal one."""
    layer = study.layers[chosen.layer]
    shape = layer.shapes[chosen.head]
    mean = layer.value("log_normality.mean", chosen.head)
    variance = layer.value("log_normality.variance", chosen.head)
    bins = len(shape.softmax_histogram)
    if not bins or not variance > 0:
        return Plot()
    edges = bin_edges(mean, variance, bins)
    width = edges[1] - edges[0]
    # No weight is above 1, so there is nothing to see beyond the bin that ends at log P = 0.
    bins = sum(edge < 0 for edge in edges[:-1])
    edges = edges[: bins + 1]
    own, other = (
        [share / width for share in side[:bins]]
        for side in (shape.softmax_histogram, shape.lln_histogram)
    )
    normal = [
        (x, math.exp(-((x - mean) ** 2) / (2 * variance)) / math.sqrt(2 * math.pi * variance))
        for x in edges
    ]
    middles = [(left + width / 2, height) for left, height in zip(edges, other, strict=False)]
    highest = max(*own, *(y for _, y in normal), min(max(other), 2 * max(own)))
    clipped = [(x, min(y, 1.05 * highest)) for x, y in middles]
    x = linear_axis("log P", edges[0], edges[-1])
    y = linear_axis(f"density, head {chosen.name}", 0, 1.08 * highest)
    lines = [
        Bars("softmax", edges, own),
        Line("lln", clipped, marks=False),
        Line("normal", normal, marks=False),
    ]
    remark = _above_one(layer, chosen.head)
    if max(other) > 1.05 * highest:
        remark += f" LLN’s peak, {number(max(other), '.2g')} high, is cut off."
    outside = 1 - sum(shape.lln_histogram)
    if outside >= 0.005:
        remark += f" {number(outside, '.0%')} of LLN’s log P lies outside the axis."
    return Plot(line_chart(f"distribution of log P of head {chosen.name}", x, y, lines), remark)


def _above_one(layer: Layer, head: int) -> str:
    """Says how much of the fitted normal would be weights above 1, where that is much."""
    mean = layer.value("log_normality.mean", head)
    variance = layer.value("log_normality.variance", head)
    share = math.erfc(-mean / math.sqrt(2 * variance)) / 2 if variance > 0 else 0.0
    if share < 0.001:
        return ""
    return (
        f" The axis ends at log P = 0, where P is 1; {number(share, '.1%')} of the fitted normal "
        "lies above."
    )


def quantile_plot(study: Study, chosen: Chosen) -> Plot:
    """Quantiles of log P against those of the fitted normal distribution."""
    layer = study.layers[chosen.layer]
    shape = layer.shapes[chosen.head]
    points = list(zip(shape.normal_quantiles, shape.quantiles, strict=True))
    if not all(math.isfinite(value) for pair in points for value in pair):
        return Plot()
    points = [pair for pair in points if pair[0] <= 0]
    low = min((min(pair) for pair in points), default=0.0)
    high = max((max(pair) for pair in points), default=0.0)
    if not high > low:
        return Plot()
    x = linear_axis("quantile of the fitted normal", points[0][0], points[-1][0])
    y = linear_axis(f"quantile of log P, head {chosen.name}", low, high)
    ends = [points[0][0], points[-1][0]]
    notes = (f"{number(b, '.3f')} where the normal has {number(a, '.3f')}" for a, b in points)
    lines = [
        Line("theory", [(end, end) for end in ends], marks=False),
        Dots([(a, b, 0.15, note) for (a, b), note in zip(points, notes, strict=True)]),
    ]
    chart = line_chart(f"quantiles of log P of head {chosen.name}", x, y, lines)
    return Plot(chart, _above_one(layer, chosen.head))


def against(
    study: Study,
    across: str,
    up: str,
    labels: tuple[str, str],
    *,
    sign: float = 1.0,
    low: float | None = None,
    log: bool = False,
) -> Plot:
    """One value of every head against another; dark dots are early layers.

    Args:
        study: Where the values are.
        across: Name of the value from left to right.
        up: Name of the other.
        labels: What the two are.
        sign: Factor of both.
        low: Smaller values are drawn here.
        log: Whether both axes are logarithmic.
    """
    dots, names = [], []
    last = max(len(study.layers) - 1, 1)
    for layer, head, values in study.cells(across, up):
        x, y = (sign * value for value in values)
        where = f"{number(y, '.4g')} upright, {number(x, '.4g')} across"
        if low is not None:
            x, y = max(x, low), max(y, low)
        if not log or min(x, y) > 0:
            dots.append((x, y, layer / last, f"head {layer}.{head}: {where}"))
            names.append(f"{layer}.{head} ({where})")
    if not dots:
        return Plot()
    # Both axes are alike, so that the line of equal values is the diagonal.
    sides = [robust_ends([dot[side] for dot in dots], log=log) for side in (0, 1)]
    least, most = min(side[0] for side in sides), max(side[1] for side in sides)
    if log:
        axes = [log_axis(label, least, most) for label in labels]
    else:
        margin = 0.04 * (most - least) + 1e-6
        axes = [linear_axis(label, least - margin, most + margin) for label in labels]
    ends = (axes[0].low, axes[0].high)
    lines = [Line("theory", [(end, end) for end in ends], marks=False), Dots(dots)]
    outside = [
        name
        for name, (x, y, _, _) in zip(names, dots, strict=True)
        if not (axes[0].holds(x) and axes[1].holds(y))
    ]
    chart = line_chart(f"{labels[1]} against {labels[0]}", axes[0], axes[1], lines)
    return Plot(chart, _ringed(outside))


def _ringed(outside: Sequence[str]) -> str:
    """Names the heads that are drawn at the edge because they lie outside the axes."""
    if not outside:
        return ""
    rest = len(outside) - _MOST_NAMED
    more = f" and {rest} more" if rest > 0 else ""
    return f" Outside the axes, ringed at the edge: {', '.join(outside[:_MOST_NAMED])}{more}."


def shape_plots(study: Study, chosen: Chosen) -> list[tuple[str, str]]:
    """The distribution of a head as histogram and quantile plot, each with its caption."""
    value = study.layers[chosen.layer].value
    shape, quantiles = histogram(study, chosen), quantile_plot(study, chosen)
    if not shape.svg or not quantiles.svg:
        return []
    numbers = ", ".join(
        f"{label} {number(value(f'log_normality.{name}', chosen.head), f'.{digits}f')}"
        for label, name, digits in (
            ("skew", "skew", 2),
            ("excess kurtosis", "kurtosis", 2),
            ("distance from normal", "ks", 3),
        )
    )
    entropy = number(value("entropy", chosen.head), ".2f")
    return _captioned(
        (
            shape,
            f"<b>Head {chosen.name}</b>, {chosen.why}: entropy {entropy} bits, {numbers}.",
        ),
        (
            quantiles,
            f"<b>Head {chosen.name}</b>: quantiles of log P against those of the fitted normal "
            "distribution, from 0.01 % to 99.99 %. On the dashed line it would be normal.",
        ),
    )


def theory_plots(study: Study) -> list[tuple[str, str]]:
    """What Proposition 3.1 predicts and what is, each with its caption."""
    variance, mean, entropy = (
        (f"{label}, predicted", f"{label}, measured")
        for label in ("variance of log P in a row", "−mean of log P", "entropy in bits")
    )
    return _captioned(
        (
            against(study, "theory.variance", "score_variance.within_row", variance, log=True),
            "<b>Variance inside a row</b> against σq²σk². What lies off the line is C_cross of "
            "Eq. (5). Axes are logarithmic.",
        ),
        (
            against(study, "theory.mean", "log_normality.mean", mean, sign=-1, log=True),
            "<b>Mean of log P</b> against −ln N − p/2, with the measured p. Axes are logarithmic.",
        ),
        (
            against(study, "theory.entropy", "entropy", entropy, low=0.0),
            "<b>Entropy</b> against that of a log-normal P of the measured p; predictions below 0 "
            "are drawn at 0.",
        ),
    )


def lln_plots(study: Study) -> list[tuple[str, str]]:
    """LLN attention beside softmax attention, each with its caption."""
    return _captioned(
        (
            against(
                study,
                "spectral_gap",
                "lln.spectral_gap",
                ("spectral gap of softmax", "spectral gap of LLN"),
            ),
            "<b>Spectral gap</b> at equal entropy. On the dashed line LLN mixes tokens as fast as "
            "softmax does.",
        ),
        (
            against(
                study,
                "entropy",
                "lln.formula_entropy",
                ("entropy of softmax, bits", "entropy of LLN by formula, bits"),
            ),
            "<b>The closed formula</b>, which measures nothing: how far the entropy is from "
            "softmax’s where entries are not Gaussian.",
        ),
    )


def _captioned(*plots: tuple[Plot, str]) -> list[tuple[str, str]]:
    """The plots that are there, each with its caption and what it leaves out."""
    return [(plot.svg, caption + plot.remark) for plot, caption in plots if plot.svg]
