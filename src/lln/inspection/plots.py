"""The plots of the report that are no heat maps, each as SVG."""

from __future__ import annotations

import math

from lln.inspection.choice import Chosen
from lln.inspection.study import Study, bin_edges
from lln.report.chart import Bars, Dots, Line, line_chart, linear_axis, log_axis


def histogram(study: Study, chosen: Chosen) -> str:
    """The distribution of log P: of a head, of LLN in its place, and the fitted normal one."""
    layer = study.layers[chosen.layer]
    shape = layer.shapes[chosen.head]
    mean = layer.value("log_normality.mean", chosen.head)
    variance = layer.value("log_normality.variance", chosen.head)
    bins = len(shape.softmax_histogram)
    if not bins or not variance > 0:
        return ""
    edges = bin_edges(mean, variance, bins)
    width = edges[1] - edges[0]
    own, other = (
        [share / width for share in side] for side in (shape.softmax_histogram, shape.lln_histogram)
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
        Bars("softmax", edges, [min(height, highest) for height in own]),
        Line("lln", clipped, marks=False),
        Line("normal", normal, marks=False),
    ]
    return line_chart(f"distribution of log P of head {chosen.name}", x, y, lines)


def quantile_plot(study: Study, chosen: Chosen) -> str:
    """Quantiles of log P against those of the fitted normal distribution."""
    shape = study.layers[chosen.layer].shapes[chosen.head]
    points = list(zip(shape.normal_quantiles, shape.quantiles, strict=True))
    if not points or not all(math.isfinite(value) for pair in points for value in pair):
        return ""
    low = min(min(pair) for pair in points)
    high = max(max(pair) for pair in points)
    if not high > low:
        return ""
    x = linear_axis("quantile of the fitted normal", points[0][0], points[-1][0])
    y = linear_axis(f"quantile of log P, head {chosen.name}", low, high)
    ends = [points[0][0], points[-1][0]]
    lines = [
        Line("theory", [(end, end) for end in ends], marks=False),
        Dots([(a, b, 0.15, f"{b:.3f} where the normal has {a:.3f}") for a, b in points]),
    ]
    return line_chart(f"quantiles of log P of head {chosen.name}", x, y, lines)


def against(
    study: Study,
    across: str,
    up: str,
    labels: tuple[str, str],
    *,
    sign: float = 1.0,
    low: float | None = None,
    log: bool = False,
) -> str:
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
    dots = []
    last = max(len(study.layers) - 1, 1)
    for layer, head, values in study.cells(across, up):
        x, y = (sign * value for value in values)
        note = f"head {layer}.{head}: {y:.4g} upright, {x:.4g} across"
        if low is not None:
            x, y = max(x, low), max(y, low)
        if not log or min(x, y) > 0:
            dots.append((x, y, layer / last, note))
    if not dots:
        return ""
    numbers = [value for x, y, _, _ in dots for value in (x, y)]
    least, most = min(numbers), max(numbers)
    if log:
        axes = [log_axis(label, least, most) for label in labels]
        ends = (axes[0].low, axes[0].high)
    else:
        margin = 0.04 * (most - least) + 1e-6
        ends = (least - margin, most + margin)
        axes = [linear_axis(label, *ends) for label in labels]
    lines = [Line("theory", [(end, end) for end in ends], marks=False), Dots(dots)]
    return line_chart(f"{labels[1]} against {labels[0]}", axes[0], axes[1], lines)


def shape_plots(study: Study, chosen: Chosen) -> list[tuple[str, str]]:
    """The distribution of a head as histogram and quantile plot, each with its caption."""
    value = study.layers[chosen.layer].value
    shape, quantiles = histogram(study, chosen), quantile_plot(study, chosen)
    if not shape or not quantiles:
        return []
    numbers = ", ".join(
        f"{label} {value(f'log_normality.{name}', chosen.head):.{digits}f}".replace("-", "−")
        for label, name, digits in (
            ("skew", "skew", 2),
            ("excess kurtosis", "kurtosis", 2),
            ("distance from normal", "ks", 3),
        )
    )
    entropy = value("entropy", chosen.head)
    return [
        (
            shape,
            f"<b>Head {chosen.name}</b>, {chosen.why}: entropy {entropy:.2f} bits, {numbers}.",
        ),
        (
            quantiles,
            f"<b>Head {chosen.name}</b>: quantiles of log P against those of the fitted normal "
            "distribution, from 0.01 % to 99.99 %. On the dashed line it would be normal.",
        ),
    ]


def theory_plots(study: Study) -> list[tuple[str, str]]:
    """What Proposition 3.1 predicts and what is, each with its caption."""
    variance, mean, entropy = (
        (f"{label}, predicted", f"{label}, measured")
        for label in ("variance of log P in a row", "−mean of log P", "entropy in bits")
    )
    plots = (
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
    return [(plot, caption) for plot, caption in plots if plot]


def lln_plots(study: Study) -> list[tuple[str, str]]:
    """LLN attention beside softmax attention, each with its caption."""
    plots = (
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
    return [(plot, caption) for plot, caption in plots if plot]
