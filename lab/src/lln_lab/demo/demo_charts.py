"""The four charts of the page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lln_lab.demo.concentration import KERNELS, Concentration, Curves
from lln_lab.demo.speed import TIMED, Speed
from lln_lab.demo.trainees import TRAINED, Training
from lln_lab.report import plot_area
from lln_lab.report.chart import Chart
from lln_lab.report.numbers import round_length
from lln_lab.report.series import LOOKS
from lln_lab.report.theme import colour

if TYPE_CHECKING:
    from lln_lab.report.chart import AnyFigure

LABELS = {"lln": "LLN, variance-matched (default)", "quadratic": "quadratic, (q·k)²"}


def concentration_charts(part: Concentration) -> list[Chart]:
    """Entropy and spectral gap against the variance of the scores."""
    return [
        _concentration(part, part.entropy, "entropy, bits", part.even_entropy, " bits"),
        _concentration(part, part.gap, "spectral gap", 1.0, ""),
    ]


def _concentration(
    part: Concentration, curves: Curves, label: str, high: float, unit: str
) -> Chart:
    asked, lines = part.score_variances, math.ceil(len(KERNELS) / 2)

    def draw(figure: AnyFigure) -> None:
        axes = plot_area.plot_area(figure, "variance p of the softmax scores", label, lines)
        ticks = {p: f"{p:g}" if p >= 1 else f"1/{1 / p:g}" for p in asked}
        plot_area.log_axis_with_ticks(axes.xaxis, asked[0] / 1.15, asked[-1] * 1.15, ticks)
        plot_area.linear_axis(axes.yaxis, 0, high)
        # Softmax is a wide band, so that a line on top of it does not hide it.
        for name in KERNELS:
            points = [(p, part.middle(curves, name, p)) for p in part.measured()]
            wide, text = name == "softmax", LABELS.get(name, "")
            plot_area.curve(axes, name, points, unit=unit, label=text, band=wide)
        plot_area.legend_below(figure, axes, columns=2)

    return Chart(f"{label} against score variance", _height(lines), draw)


def speed_chart(part: Speed) -> Chart:
    """Milliseconds per call against sequence length, with the crossovers that are certain."""
    measured = part.measured()
    spread = {name: part.spread(name) for name in TIMED}
    every = [1e3 * end for series in spread.values() for ends in series.values() for end in ends]
    last = max(measured[-1], 2 * measured[0])
    found = {name: part.crossover(name) for name in TIMED if name != "softmax"}
    places = {name: each.place for name, each in found.items() if each and each.place is not None}

    def draw(figure: AnyFigure) -> None:
        axes = plot_area.plot_area(figure, "sequence length N", "milliseconds per call", 1)
        ticks = {float(n): f"{n:,}" for n in part.lengths if n <= last}
        plot_area.log_axis_with_ticks(axes.xaxis, measured[0] / 1.15, last * 1.15, ticks)
        plot_area.log_axis(axes.yaxis, min(every) / 1.25, max(every) * 1.25)
        for name in TIMED:
            for n, (low, high) in spread[name].items():
                ends = [1e3 * low, 1e3 * high]
                axes.plot([n, n], ends, color=colour(name), linewidth=1.4, alpha=0.55)
            points = [(n, 1e3 * seconds) for n, seconds in part.times(name).items()]
            plot_area.curve(axes, name, points, unit=" ms")
        for line, (name, place) in enumerate(places.items()):
            text = f"{LOOKS[name].label}: N ≈ {round_length(place)}"
            plot_area.upright_rule(axes, name, place, text, line)
        plot_area.legend_below(figure, axes, columns=3)

    return Chart("milliseconds per call against sequence length", _height(1), draw)


def training_chart(part: Training) -> Chart:
    """Held-out loss against training steps."""
    seen = [loss for point in part.points for loss in point.loss.values() if math.isfinite(loss)]
    margin = 0.05 * (max(seen) - min(seen)) + 0.01

    def draw(figure: AnyFigure) -> None:
        axes = plot_area.plot_area(
            figure, "training steps", "held-out loss, nats per masked byte", 2
        )
        plot_area.linear_axis(axes.xaxis, 0, part.points[-1].step)
        plot_area.linear_axis(axes.yaxis, min(seen) - margin, max(seen) + margin)
        plot_area.level_rule(axes, part.unigram, "byte frequencies alone")
        for name in TRAINED:
            points = [(float(point.step), point.loss[name]) for point in part.points]
            plot_area.curve(axes, name, points, unit=" nats")
        plot_area.legend_below(figure, axes, columns=3)

    return Chart("held-out loss against training steps", _height(2), draw)


def _height(legend_lines: int) -> int:
    return plot_area.HEIGHT + plot_area.LEGEND_LINE * legend_lines
