"""What line charts are made of: an area with two axes, curves, rules, dots and a legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lln_lab.report.chart import notes
from lln_lab.report.numbers import number
from lln_lab.report.series import LOOKS
from lln_lab.report.theme import colour, colour_map

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.transforms import Transform

    from lln_lab.report.chart import AnyFigure

# Heights of a chart without a legend, and of one line of a legend.
HEIGHT, LEGEND_LINE = 330, 19
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 27, 50


def boxed_axes(figure: AnyFigure, left: float, right: float, top: float, bottom: float) -> Axes:
    """Axes with these margins in points."""
    width, height = figure.bbox.size
    sides = 1 - (left + right) / width, 1 - (top + bottom) / height
    return figure.add_axes((left / width, bottom / height, *sides))


def from_corner(figure: AnyFigure) -> Transform:
    """Coordinates in points, from the upper left corner of a chart."""
    from matplotlib.transforms import Affine2D

    width, height = figure.bbox.size
    return Affine2D().scale(1 / width, -1 / height).translate(0, 1) + figure.transSubfigure


def write_at(figure: AnyFigure, x: float, y: float, text: str, **options: Any) -> None:
    """Writes at a place in the coordinates of `from_corner`."""
    width, height = figure.bbox.size
    figure.text(x / width, 1 - y / height, text, **options)


def plot_area(figure: AnyFigure, x_label: str, y_label: str, legend_lines: int = 0) -> Axes:
    """The axes of a line chart, above the space for its legend."""
    axes = boxed_axes(figure, _LEFT, _RIGHT, _TOP, _BOTTOM + LEGEND_LINE * legend_lines)
    axes.set_xlabel(x_label, fontsize=13, fontweight="bold")
    write_at(figure, 2, 13, y_label, fontsize=13, fontweight="bold")
    return axes


def linear_axis(axis: XAxis | YAxis, low: float, high: float) -> None:
    """About five round ticks over a range."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.axes.set(**{f"{axis.axis_name}lim": (low, max(high, low + 1e-3))})
    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value, ",.6g")))


def log_axis(axis: XAxis | YAxis, low: float, high: float) -> None:
    """A logarithmic axis with at least three round ticks, if the range contains that many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        values = (step * 10.0**power for power in powers for step in steps)
        ticks = [value for value in values if low <= value <= high]
        if len(ticks) >= 3:
            break
    log_axis_with_ticks(axis, low, high, {tick: f"{tick:,.6g}" for tick in ticks})


def log_axis_with_ticks(
    axis: XAxis | YAxis, low: float, high: float, ticks: dict[float, str]
) -> None:
    """A logarithmic axis with ticks of the caller's choice."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    axis.set_ticks(list(ticks), labels=list(ticks.values()))
    axis.set_ticks([], minor=True)


def curve(
    axes: Axes,
    name: str,
    points: Sequence[tuple[float, float]],
    *,
    unit: str = "",
    label: str = "",
    marks: bool = True,
    band: bool = False,
) -> None:
    """One attention's points, joined by a line; points that are not finite are left out.

    Args:
        axes: Where to draw.
        name: The attention.
        points: ``(x, y)``.
        unit: Unit of y in each point's tooltip.
        label: In the legend; empty = the attention's name.
        marks: Whether points are marked.
        band: Whether a wide band lies under the line, which other lines may cover.
    """
    look, ink = LOOKS[name], colour(LOOKS[name].colour_name)
    points = [point for point in points if math.isfinite(point[1])]
    across, up = [x for x, _ in points], [y for _, y in points]
    if band:
        axes.plot(across, up, color=ink, linewidth=9, alpha=0.2)
    axes.plot(
        across,
        up,
        **look.line,
        label=label or look.label,
        marker=look.marker if marks else "",
        markeredgecolor=colour("panel") if look.marker != "x" else ink,
        markeredgewidth=0.8 if look.marker != "x" else 2,
    )
    if marks:
        told = [f"{look.label}: {number(y, '.4g')}{unit} at {number(x, ',.4g')}" for x, y in points]
        # Invisible targets for tooltips, larger than the markers, so that they are easy to hit.
        axes.scatter(across, up, s=144, color=ink, linewidth=0, alpha=0, **notes(told))


def equal_line(axes: Axes, low: float, high: float) -> None:
    """A dashed line on which both axes have the same value."""
    axes.plot([low, high], [low, high], **LOOKS["theory"].line)


def dots(axes: Axes, points: Sequence[tuple[float, float, float, str]]) -> None:
    """Points as ``(x, y, shade, note)``, dark at shade 0 and light at 1.

    Points beyond the axes are drawn at their edge, with a ring.
    """
    ends = axes.get_xlim(), axes.get_ylim()
    places = [
        [min(max(point[side], low), high) for point in points]
        for side, (low, high) in enumerate(ends)
    ]
    rings = [
        not (math.isclose(x, point[0]) and math.isclose(y, point[1]))
        for x, y, point in zip(*places, points, strict=True)
    ]
    axes.scatter(
        *places,
        s=64,
        zorder=3,
        # Skips the darkest colours, which are invisible on dark screens.
        color=[colour_map()(0.2 + 0.8 * shade) for _, _, shade, _ in points],
        edgecolors=[colour("text" if ring else "soft") for ring in rings],
        linewidths=[2 if ring else 0.8 for ring in rings],
        **notes([text for *_, text in points]),
    )


def upright_rule(axes: Axes, name: str, x: float, text: str, line: int = 0) -> None:
    """A dashed line in an attention's colour; ``line`` moves its text down."""
    ink = colour(LOOKS[name].colour_name)
    axes.axvline(x, color=ink, linewidth=1.4, linestyle=(0, (3, 4)))
    # On the side with more room.
    right_half = axes.transLimits.transform(axes.transScale.transform((x, 1)))[0] > 0.5
    _rule_text(axes, x, 1, text, "x", -6 if right_half else 6, -4 - 16 * line, ink)


def level_rule(axes: Axes, y: float, text: str) -> None:
    """A dashed line from left to right."""
    axes.axhline(y, color=colour("soft"), linewidth=1.4, linestyle=(0, (3, 4)))
    _rule_text(axes, 1, y, text, "y", -3, 18, colour("soft"))


def _rule_text(
    axes: Axes, x: float, y: float, text: str, data: str, right: float, up: float, ink: str
) -> None:
    axes.annotate(
        text,
        (x, y),
        (right, up),
        xycoords=axes.get_xaxis_transform() if data == "x" else axes.get_yaxis_transform(),
        textcoords="offset points",
        color=ink,
        fontweight="bold",
        ha="right" if right < 0 else "left",
        va="top",
        # Text must stay readable where a line runs behind it.
        bbox={"facecolor": colour("panel"), "edgecolor": "none", "pad": 1},
    )


def legend_below(figure: AnyFigure, axes: Axes, columns: int) -> None:
    """The labelled lines of a chart in the order of drawing, under its lower axis."""
    handles, labels = axes.get_legend_handles_labels()
    width, height = figure.bbox.size
    place = (_LEFT / width, 2 / height)
    figure.legend(handles, labels, loc="lower left", bbox_to_anchor=place, ncols=columns)
