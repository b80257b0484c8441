"""A number for every layer and head, as a grid of coloured cells in inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from lln.studies.report.limits import robust_ends
from lln.studies.report.markup import number
from lln.studies.report.picture import DIVERGING, SEQUENTIAL, Stops, colour_at

_WIDTH, _LEFT, _TOP, _ROW, _LINE = 480, 42, 24, 24, 18
_BAR, _BAR_LABEL, _BAR_PIECES = 110, 46, 16
# Columns beyond which the numbers no longer fit into the cells.
_MOST_NUMBERED = 16


@dataclass(frozen=True)
class _Scale:
    """How numbers become colours: the numbers at its ends, and the colours between them."""

    low: float
    high: float
    log: bool
    stops: Stops

    def shade(self, value: float) -> float:
        """Where a number lies, from 0 to 1; the middle where all are alike."""
        low, high = self.low, self.high
        if self.log and low > 0:
            value, low, high = (math.log(max(each, 1e-300)) for each in (value, low, high))
        if not high > low:
            return 0.5 + 0.5 * ((value > high) - (value < low))
        return min(max((value - low) / (high - low), 0.0), 1.0)


def heat_map(
    title: str,
    grid: Sequence[Sequence[float]],
    *,
    low: float | None = None,
    high: float | None = None,
    write: Callable[[float], str] = lambda value: number(value, ".2g"),
    log: bool = False,
    centred: bool = False,
    least: float = 0.0,
) -> str:
    """The grid as ``<svg>``: layers from the top, heads from the left.

    Numbers beyond the ends of the scale have its last colour and a mark, and a line below the map
    says how far they go.

    Args:
        title: What the numbers are.
        grid: By layer and head; NaN = not measured.
        low: Number of the first colour; None = the smallest that is no extreme.
        high: Number of the last colour; None = the largest that is no extreme.
        write: How a number is written.
        log: Whether colours follow the logarithm.
        centred: Whether numbers have a sign: zero has the middle of two colours.
        least: What the ends of a centred scale reach at least, so that numbers too small to be
            written have no colour.
    """
    ends = robust_ends([value for row in grid for value in row], log=log)
    low, high = ends[0] if low is None else low, ends[1] if high is None else high
    if centred:
        high = max(abs(low), abs(high), least)
        low = -high
    scale = _Scale(low, high, log, DIVERGING if centred else SEQUENTIAL)
    columns = max((len(row) for row in grid), default=1)
    width = (_WIDTH - _LEFT) / columns
    bottom = _TOP + _ROW * len(grid)
    parts = [f'<text class="name" x="2" y="13">{escape(title)}</text>', _bar(scale, write)]
    for index, row in enumerate(grid):
        middle = _TOP + _ROW * (index + 0.5) + 4
        parts.append(f'<text class="tick end" x="{_LEFT - 7}" y="{middle:.1f}">{index}</text>')
        for head, value in enumerate(row):
            place = (_LEFT + head * width, _TOP + _ROW * index, width)
            note = f"layer {index}, head {head}: "
            if math.isnan(value):
                parts.append(_lost(place, note))
            else:
                text = write(value) if columns <= _MOST_NUMBERED else ""
                parts.append(_cell(place, value, scale, text, note + number(value, ".5g")))
    every = max(1, math.ceil(columns / 24))
    for head in range(0, columns, every):
        across = _LEFT + (head + 0.5) * width
        parts.append(f'<text class="tick mid" x="{across:.1f}" y="{bottom + 15}">{head}</text>')
    middle = (_LEFT + _WIDTH) / 2
    parts.append(f'<text class="tick mid" x="{middle}" y="{bottom + 32}">head</text>')
    turned = f'transform="translate(12 {(_TOP + bottom) / 2}) rotate(-90)"'
    parts.append(f'<text class="tick mid" {turned}>layer</text>')
    height = bottom + 40
    for line in _beyond(grid, scale, write):
        parts.append(f'<text class="tick" x="{_LEFT}" y="{height + 10}">{escape(line)}</text>')
        height += _LINE
    return (
        f'<svg class="chart heat" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)} by layer and head">{"".join(parts)}</svg>'
    )


def _beyond(
    grid: Sequence[Sequence[float]], scale: _Scale, write: Callable[[float], str]
) -> list[str]:
    """What lies beyond the scale, a line for each end."""
    cells = [
        (value, f"{layer}.{head}")
        for layer, row in enumerate(grid)
        for head, value in enumerate(row)
        if not math.isnan(value)
    ]
    above = [cell for cell in cells if cell[0] > scale.high]
    below = [cell for cell in cells if cell[0] < scale.low]
    lines = []
    if above:
        value, head = max(above)
        lines.append(f"▲ {len(above)} above the scale, up to {write(value)} (head {head})")
    if below:
        value, head = min(below)
        lines.append(f"▼ {len(below)} below the scale, down to {write(value)} (head {head})")
    return lines


def _cell(
    place: tuple[float, float, float], value: float, scale: _Scale, text: str, note: str
) -> str:
    x, y, width = place
    red, green, blue = colour_at(scale.shade(value), scale.stops)
    # Perceived lightness: numbers must stay readable on every colour.
    tone = "dark" if 0.3 * red + 0.59 * green + 0.11 * blue > 118 else "light"
    mark, right = "", x + width - 3
    if value > scale.high:
        mark = f'<path class="{tone}" d="M{right:.1f} {y + 6}h-5l2.5-4z"/>'
        note += ", above the scale"
    elif value < scale.low:
        mark = f'<path class="{tone}" d="M{right:.1f} {y + _ROW - 6}h-5l2.5 4z"/>'
        note += ", below the scale"
    if text:
        mark += (
            f'<text class="value {tone}" x="{x + width / 2:.1f}" y="{y + _ROW / 2 + 4:.1f}">'
            f"{escape(text)}</text>"
        )
    return (
        f'<g><title>{escape(note)}</title><rect class="cell" x="{x:.1f}" y="{y}" '
        f'width="{width:.1f}" height="{_ROW}" fill="rgb({red} {green} {blue})"/>{mark}</g>'
    )


def _lost(place: tuple[float, float, float], note: str) -> str:
    x, y, width = place
    return (
        f'<g><title>{escape(note)}not measured</title><rect class="absent" x="{x + 1:.1f}" '
        f'y="{y + 1}" width="{width - 2:.1f}" height="{_ROW - 2}"/>'
        f'<text class="value lost" x="{x + width / 2:.1f}" y="{y + _ROW / 2 + 4:.1f}">–</text></g>'
    )


def _bar(scale: _Scale, write: Callable[[float], str]) -> str:
    """The scale of the colours, in the upper right corner."""
    left, step = _WIDTH - _BAR - _BAR_LABEL, _BAR / _BAR_PIECES
    # Pieces instead of a gradient, whose name would have to be unique on the page.
    pieces = "".join(
        f'<rect x="{left + step * index:.1f}" y="4" width="{step + 0.5:.1f}" height="9" '
        f'fill="rgb({" ".join(map(str, colour_at(index / (_BAR_PIECES - 1), scale.stops)))})"/>'
        for index in range(_BAR_PIECES)
    )
    return (
        f'{pieces}<text class="tick end" x="{left - 5}" y="13">{escape(write(scale.low))}</text>'
        f'<text class="tick" x="{left + _BAR + 5}" y="13">{escape(write(scale.high))}</text>'
    )
