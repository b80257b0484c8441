"""The charts of the report that are not heat maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lln.instruments.robust_ends import robust_ends
from lln_lab.inspection.choice import Chosen
from lln_lab.inspection.study import StudiedLayer, Study, bin_edges
from lln_lab.report import plot_area
from lln_lab.report.chart import CaptionedChart, Chart
from lln_lab.report.numbers import number
from lln_lab.report.theme import colour

if TYPE_CHECKING:
    from lln_lab.report.chart import AnyFigure

# How many heads outside the axes are named; the others are only counted.
_MOST_NAMED = 3


def shape_plots(study: Study, chosen: Chosen) -> list[CaptionedChart]:
    """The distribution of a head as histogram and as quantile plot; empty if it has none."""
    charts = _histogram(study, chosen), _quantile_plot(study, chosen)
    return [] if None in charts else [chart for chart in charts if chart is not None]


def _histogram(study: Study, chosen: Chosen) -> CaptionedChart | None:
    """The distribution of log P of a head, of LLN in its place, and the fitted normal one."""
    layer = study.layers[chosen.layer]
    shape = layer.shapes[chosen.head]
    mean = layer.value("log_normality.mean", chosen.head)
    variance = layer.value("log_normality.variance", chosen.head)
    bins = len(shape.softmax_histogram)
    if not bins or not variance > 0:
        return None
    edges = bin_edges(mean, variance, bins)
    width = edges[1] - edges[0]
    # No weight is above 1, so the axis ends with the bin that ends at log P = 0.
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
    highest = max(*own, *(y for _, y in normal), min(max(other), 2 * max(own)))
    clipped = [
        (left + width / 2, min(y, 1.05 * highest)) for left, y in zip(edges, other, strict=False)
    ]

    def draw(figure: AnyFigure) -> None:
        axes = plot_area.plot_area(figure, "log P", f"density, head {chosen.name}", 1)
        plot_area.linear_axis(axes.xaxis, edges[0], edges[-1])
        plot_area.linear_axis(axes.yaxis, 0, 1.08 * highest)
        look = {"color": colour("softmax"), "alpha": 0.28, "linewidth": 0}
        axes.stairs(own, edges, fill=True, label="the head", **look)
        plot_area.curve(axes, "lln", clipped, label="LLN at its α, β", marks=False)
        plot_area.curve(axes, "normal", normal, marks=False)
        plot_area.legend_below(figure, axes, columns=3)

    caption = f", {chosen.why}: entropy {number(layer.value('entropy', chosen.head), '.2f')} bits"
    for label, name, digits in (
        ("skew", "skew", 2),
        ("excess kurtosis", "kurtosis", 2),
        ("distance from normal", "ks", 3),
    ):
        value = layer.value(f"log_normality.{name}", chosen.head)
        caption += f", {label} {number(value, f'.{digits}f')}"
    caption += f".{_above_one(layer, chosen.head)}"
    if max(other) > 1.05 * highest:
        caption += f" LLN’s peak, {number(max(other), '.2g')} high, is cut off."
    outside = 1 - sum(shape.lln_histogram)
    if outside >= 0.005:
        caption += f" {number(outside, '.0%')} of LLN’s log P lies outside the axis."
    label = f"distribution of log P of head {chosen.name}"
    chart = Chart(label, plot_area.HEIGHT + plot_area.LEGEND_LINE, draw)
    return CaptionedChart(chart, f"Head {chosen.name}", caption)


def _above_one(layer: StudiedLayer, head: int) -> str:
    """Says which share of the fitted normal lies above P = 1, if it is large."""
    mean = layer.value("log_normality.mean", head)
    variance = layer.value("log_normality.variance", head)
    share = math.erfc(-mean / math.sqrt(2 * variance)) / 2 if variance > 0 else 0.0
    if share < 0.001:
        return ""
    return (
        f" The axis ends at log P = 0, where P is 1; {number(share, '.1%')} of the fitted normal "
        "lies above."
    )


def _quantile_plot(study: Study, chosen: Chosen) -> CaptionedChart | None:
    """Quantiles of log P against those of the fitted normal distribution."""
    layer = study.layers[chosen.layer]
    shape = layer.shapes[chosen.head]
    points = list(zip(shape.normal_quantiles, shape.quantiles, strict=True))
    if not all(math.isfinite(value) for pair in points for value in pair):
        return None
    points = [pair for pair in points if pair[0] <= 0]
    low = min((min(pair) for pair in points), default=0.0)
    high = max((max(pair) for pair in points), default=0.0)
    if not high > low:
        return None

    def draw(figure: AnyFigure) -> None:
        axes = plot_area.plot_area(
            figure, "quantile of the fitted normal", f"quantile of log P, head {chosen.name}"
        )
        plot_area.linear_axis(axes.xaxis, points[0][0], points[-1][0])
        plot_area.linear_axis(axes.yaxis, low, high)
        plot_area.equal_line(axes, points[0][0], points[-1][0])
        told = (f"{number(b, '.3f')} where the normal has {number(a, '.3f')}" for a, b in points)
        plot_area.dots(axes, [(a, b, 0.0, text) for (a, b), text in zip(points, told, strict=True)])

    return CaptionedChart(
        Chart(f"quantiles of log P of head {chosen.name}", plot_area.HEIGHT, draw),
        f"Head {chosen.name}",
        ": quantiles of log P against those of the fitted normal distribution, from 0.01 % to "
        f"99.99 %. A normal log P would lie on the dashed line.{_above_one(layer, chosen.head)}",
    )


def theory_plots(study: Study) -> list[CaptionedChart]:
    """What Proposition 3.1 predicts against what is measured."""
    variance, mean, entropy = (
        (f"{label}, predicted", f"{label}, measured")
        for label in ("variance of log P in a row", "−mean of log P", "entropy in bits")
    )
    charts = (
        _against(
            study,
            ("theory.variance", "score_variance.within_row"),
            variance,
            "Variance inside a row",
            " against σq²σk². The distance from the line is C_cross of Eq. (5). Axes are "
            "logarithmic.",
            log=True,
        ),
        _against(
            study,
            ("theory.mean", "log_normality.mean"),
            mean,
            "Mean of log P",
            " against −ln N − p/2, with the measured p. Axes are logarithmic.",
            sign=-1,
            log=True,
        ),
        _against(
            study,
            ("theory.entropy", "entropy"),
            entropy,
            "Entropy",
            " against that of a log-normal P of the measured p; predictions below 0 are drawn at "
            "0.",
            low=0.0,
        ),
    )
    return [chart for chart in charts if chart is not None]


def lln_plots(study: Study) -> list[CaptionedChart]:
    """LLN attention compared with softmax attention."""
    charts = (
        _against(
            study,
            ("spectral_gap", "lln.spectral_gap"),
            ("spectral gap of softmax", "spectral gap of LLN"),
            "Spectral gap",
            " at equal entropy. On the dashed line LLN mixes tokens as fast as softmax does.",
        ),
        _against(
            study,
            ("entropy", "lln.formula_entropy"),
            ("entropy of softmax, bits", "entropy of LLN by formula, bits"),
            "The closed formula",
            ", which measures nothing: how far the entropy is from that of softmax where entries "
            "are not Gaussian.",
        ),
    )
    return [chart for chart in charts if chart is not None]


def _against(
    study: Study,
    names: tuple[str, str],
    labels: tuple[str, str],
    lead: str,
    caption: str,
    *,
    sign: float = 1.0,
    low: float | None = None,
    log: bool = False,
) -> CaptionedChart | None:
    """One value of every head against another; dark dots are early layers.

    Args:
        study: Where the values are.
        names: Names of the horizontal and the vertical value.
        labels: Their axis labels.
        lead: The first words of the caption.
        caption: The rest of it; heads outside the axes are added.
        sign: Factor of both values.
        low: Smaller values are drawn at this value.
        log: Whether both axes are logarithmic.
    """
    dots: list[tuple[float, float, int, str]] = []
    for layer, head, values in study.cells(*names):
        x, y = (sign * value for value in values)
        where = f"{number(y, '.4g')} upright, {number(x, '.4g')} across"
        if low is not None:
            x, y = max(x, low), max(y, low)
        if not log or min(x, y) > 0:
            dots.append((x, y, layer, f"{layer}.{head} ({where})"))
    if not dots:
        return None
    # Both axes have the same range, so that the line of equal values is the diagonal.
    across, up = [x for x, *_ in dots], [y for _, y, *_ in dots]
    sides = [robust_ends(side, log=log) for side in (across, up)]
    least, most = min(side[0] for side in sides), max(side[1] for side in sides)
    margin = 0.04 * (most - least) + 1e-6
    ends = (least / 1.25, most * 1.25) if log else (least - margin, most + margin)
    outside = [name for x, y, _, name in dots if not ends[0] <= min(x, y) <= max(x, y) <= ends[1]]
    last = max(len(study.layers) - 1, 1)

    def draw(figure: AnyFigure) -> None:
        axes = plot_area.plot_area(figure, *labels)
        for axis in (axes.xaxis, axes.yaxis):
            (plot_area.log_axis if log else plot_area.linear_axis)(axis, *ends)
        plot_area.equal_line(axes, *ends)
        plot_area.dots(axes, [(x, y, layer / last, f"head {name}") for x, y, layer, name in dots])

    chart = Chart(f"{labels[1]} against {labels[0]}", plot_area.HEIGHT, draw)
    return CaptionedChart(chart, lead, caption + _ringed(outside))


def _ringed(outside: Sequence[str]) -> str:
    """Names the heads that are drawn at the edge because they lie outside the axes."""
    if not outside:
        return ""
    rest = len(outside) - _MOST_NAMED
    more = f" and {rest} more" if rest > 0 else ""
    return f" Outside the axes, ringed at the edge: {', '.join(outside[:_MOST_NAMED])}{more}."
