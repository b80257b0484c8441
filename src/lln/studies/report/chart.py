"""Line charts as inline SVG: drawn with the page's own colours, so that they follow its theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lln.studies.report.markup import number
from lln.studies.report.picture import colour_at
from lln.studies.report.series import LOOKS, marker

_WIDTH, _HEIGHT = 480, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 27, 50


@dataclass(frozen=True)
class Axis:
    """One axis: its range, its ticks as ``(value, label)`` and whether it is logarithmic."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value lies between the ends, but for rounding."""
        return -1e-9 <= self.fraction(value) <= 1 + 1e-9

    def fraction(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high end."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)


@dataclass(frozen=True)
class Line:
    """One attention's points.

    Attributes:
        key: The attention.
        points: ``(x, y)``.
        unit: Ends the note on each point.
        wide: Whether a band lies under the line, which others may cover.
        ranges: ``(x, low, high)``, drawn as thin upright strokes.
        marks: Whether points are marked.
    """

    key: str
    points: Sequence[tuple[float, float]]
    unit: str = ""
    wide: bool = False
    ranges: Sequence[tuple[float, float, float]] = ()
    marks: bool = True


@dataclass(frozen=True)
class Bars:
    """A histogram: heights between consecutive edges, filled in an attention's colour."""

    key: str
    edges: Sequence[float]
    heights: Sequence[float]


@dataclass(frozen=True)
class Dots:
    """Points of their own, ``(x, y, shade from 0 to 1, note)``, dark to light by shade.

    Points beyond an axis are drawn at its end, with a ring.
    """

    points: Sequence[tuple[float, float, float, str]]


@dataclass(frozen=True)
class Rule:
    """A dashed line across the chart, at ``x`` or at ``y``, with its label.

    Attributes:
        label: Short text beside it.
        x: Place of a vertical line.
        y: Place of a horizontal line.
        key: Attention whose colour it takes; empty = that of the axes.
        row: Lines of text by which the label of a vertical line is moved down.
    """

    label: str
    x: float | None = None
    y: float | None = None
    key: str = ""
    row: int = 0


def linear_axis(label: str, low: float, high: float, count: int = 5) -> Axis:
    """An axis over a range, with about ``count`` round ticks inside."""
    high = max(high, low + 1e-3)
    span = high - low
    power = 10 ** math.floor(math.log10(span / count))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if span / (m * power) <= count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = tuple((n * step, number(n * step, ",.6g")) for n in range(first, last + 1))
    return Axis(label, low, high, ticks)


def log_axis(label: str, low: float, high: float) -> Axis:
    """A logarithmic axis over a range, with ticks at 1, 10, 100 … and more if it is short."""
    decades = math.log10(high / low)
    steps = (1.0,) if decades > 2.5 else (1.0, 2.0, 5.0)
    low, high = low / 1.25, high * 1.25
    values = _multiples(steps, low, high)
    if len(values) < 3:
        values = _multiples((1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0), low, high)
    return Axis(label, low, high, tuple((v, f"{v:,.6g}") for v in values), log=True)


def _multiples(steps: Sequence[float], low: float, high: float) -> list[float]:
    """The steps times powers of ten that lie in a range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = (step * 10.0**power for power in powers for step in steps)
    return [value for value in values if low <= value <= high]


def line_chart(
    title: str,
    x: Axis,
    y: Axis,
    lines: Sequence[Line | Bars | Dots],
    rules: Sequence[Rule] = (),
) -> str:
    """The chart as ``<svg>``; points that are not finite are left out."""
    body = [_grid(x, y), *(_rule(rule, x, y) for rule in rules)]
    draw = {Line: _line, Bars: _bars, Dots: _dots}
    body += [draw[type(line)](line, x, y) for line in lines]
    # Text last: nothing may be drawn over it.
    body += [_rule_label(rule, x, y) for rule in rules]
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(body)}</svg>'
    )


def _across(axis: Axis, value: float) -> float:
    return _LEFT + axis.fraction(value) * (_WIDTH - _LEFT - _RIGHT)


def _up(axis: Axis, value: float) -> float:
    return _HEIGHT - _BOTTOM - axis.fraction(value) * (_HEIGHT - _TOP - _BOTTOM)


def _grid(x: Axis, y: Axis) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for value, label in y.ticks:
        place = _up(y, value)
        parts.append(f'<path class="grid" d="M{_LEFT} {place:.1f}H{right}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 7}" y="{place + 4:.1f}">{label}</text>')
    for value, label in x.ticks:
        place = _across(x, value)
        parts.append(f'<path class="axis" d="M{place:.1f} {bottom}v5"/>')
        parts.append(f'<text class="tick mid" x="{place:.1f}" y="{bottom + 19}">{label}</text>')
    middle = (_LEFT + right) / 2
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>')
    parts.append(f'<text class="name mid" x="{middle}" y="{_HEIGHT - 8}">{escape(x.label)}</text>')
    parts.append(f'<text class="name" x="2" y="12">{escape(y.label)}</text>')
    return "".join(parts)


def _rule(rule: Rule, x: Axis, y: Axis) -> str:
    if rule.x is not None:
        way = f"M{_across(x, rule.x):.1f} {_TOP}V{_HEIGHT - _BOTTOM}"
    else:
        way = f"M{_LEFT} {_up(y, rule.y or 0):.1f}H{_WIDTH - _RIGHT}"
    return f'<path class="rule {_rule_colour(rule)}" d="{way}"/>'


def _rule_label(rule: Rule, x: Axis, y: Axis) -> str:
    if rule.x is None:
        across, up, anchor = _WIDTH - _RIGHT - 3.0, _up(y, rule.y or 0) - 5, "end"
    else:
        # On the side with more room.
        anchor, shift = ("end", -6) if x.fraction(rule.x) > 0.5 else ("", 6)
        across, up = _across(x, rule.x) + shift, _TOP + 14.0 + 16 * rule.row
    return (
        f'<text class="note {anchor} {_rule_colour(rule)}" x="{across:.1f}" y="{up:.1f}">'
        f"{escape(rule.label)}</text>"
    )


def _rule_colour(rule: Rule) -> str:
    return f"c-{rule.key}" if rule.key else "c-axis"


def _line(line: Line, x: Axis, y: Axis) -> str:
    look = LOOKS[line.key]
    places = [
        (_across(x, across), _up(y, up), _note(line, across, up))
        for across, up in line.points
        if math.isfinite(up)
    ]
    if not places:
        return ""
    path = "L".join(f"{across:.1f} {up:.1f}" for across, up, _ in places)
    dash = f' stroke-dasharray="{look.dash}"' if look.dash else ""
    marks = "".join(marker(line.key, *place) for place in places) if line.marks else ""
    band = f'<path class="line band" d="M{path}"/>' if line.wide else ""
    band += "".join(
        f'<path class="range" d="M{_across(x, across):.1f} {_up(y, low):.1f}V{_up(y, high):.1f}"/>'
        for across, low, high in line.ranges
    )
    return f'<g class="c-{line.key}">{band}<path class="line" d="M{path}"{dash}/>{marks}</g>'


def _note(line: Line, across: float, up: float) -> str:
    what = f"{LOOKS[line.key].label}: {number(up, '.4g')}{line.unit}"
    return f"{what} at {number(across, ',.4g')}"


def _bars(bars: Bars, x: Axis, y: Axis) -> str:
    """One outline around all bars, down to the axis."""
    bottom = _HEIGHT - _BOTTOM
    way = f"M{_across(x, bars.edges[0]):.1f} {bottom}"
    for right, height in zip(bars.edges[1:], bars.heights, strict=True):
        way += f"V{_up(y, height):.1f}H{_across(x, right):.1f}"
    return f'<g class="c-{bars.key}"><path class="bars" d="{way}V{bottom}Z"/></g>'


def _dots(dots: Dots, x: Axis, y: Axis) -> str:
    drawn = []
    for across, up, shade, note in dots.points:
        if math.isfinite(across) and math.isfinite(up):
            colour = f"rgb({' '.join(map(str, colour_at(shade)))})"
            inside = x.holds(across) and y.holds(up)
            ring = "" if inside else ' class="ring"'
            place = (
                _across(x, min(max(across, x.low), x.high)),
                _up(y, min(max(up, y.low), y.high)),
            )
            drawn.append(
                f'<circle r="4" cx="{place[0]:.1f}" cy="{place[1]:.1f}" fill="{colour}"{ring}>'
                f"<title>{escape(note)}</title></circle>"
            )
    return f'<g class="dots">{"".join(drawn)}</g>'
