"""A number for every layer and head, as a grid of coloured cells in inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from lln.report.picture import colour_at, scale_stops

_WIDTH, _LEFT, _TOP, _ROW = 480, 42, 24, 24
_BAR, _BAR_LABEL = 110, 46
# Columns beyond which the numbers no longer fit into the cells.
_MOST_NUMBERED = 16


def heat_map(
    title: str,
    grid: Sequence[Sequence[float]],
    *,
    low: float | None = None,
    high: float | None = None,
    write: Callable[[float], str] = lambda value: f"{value:.2g}",
    log: bool = False,
    centred: bool = False,
) -> str:
    """The grid as ``<svg>``: layers from the top, heads from the left.

    Args:
        title: What the numbers are.
        grid: By layer and head; NaN = not measured.
        low: Number of the darkest colour; None = the smallest.
        high: Number of the lightest colour; None = the largest.
        write: How a number is written.
        log: Whether colours follow the logarithm.
        centred: Whether zero has the middle colour.
    """
    numbers = [value for row in grid for value in row if math.isfinite(value)]
    low = min(numbers, default=0.0) if low is None else low
    high = max(numbers, default=1.0) if high is None else high
    if centred:
        high = max(abs(low), abs(high))
        low = -high
    columns = max((len(row) for row in grid), default=1)
    width = (_WIDTH - _LEFT) / columns
    bottom = _TOP + _ROW * len(grid)
    parts = [f'<text class="name" x="2" y="13">{escape(title)}</text>', _bar(low, high, write)]
    for index, row in enumerate(grid):
        middle = _TOP + _ROW * (index + 0.5) + 4
        parts.append(f'<text class="tick end" x="{_LEFT - 7}" y="{middle:.1f}">{index}</text>')
        for head, value in enumerate(row):
            place = (_LEFT + head * width, _TOP + _ROW * index, width)
            note = f"layer {index}, head {head}: "
            if math.isnan(value):
                parts.append(_lost(place, note))
            else:
                shade = _shade(value, low, high, log)
                text = write(value) if columns <= _MOST_NUMBERED else ""
                parts.append(_cell(place, shade, text, f"{note}{value:.5g}"))
    every = max(1, math.ceil(columns / 24))
    for head in range(0, columns, every):
        across = _LEFT + (head + 0.5) * width
        parts.append(f'<text class="tick mid" x="{across:.1f}" y="{bottom + 15}">{head}</text>')
    middle = (_LEFT + _WIDTH) / 2
    parts.append(f'<text class="tick mid" x="{middle}" y="{bottom + 32}">head</text>')
    turned = f'transform="translate(12 {(_TOP + bottom) / 2}) rotate(-90)"'
    parts.append(f'<text class="tick mid" {turned}>layer</text>')
    return (
        f'<svg class="chart heat" viewBox="0 0 {_WIDTH} {bottom + 40}" role="img" '
        f'aria-label="{escape(title)} by layer and head">{"".join(parts)}</svg>'
    )


def _shade(value: float, low: float, high: float, log: bool) -> float:
    if log and low > 0:
        value, low, high = (math.log(max(number, 1e-300)) for number in (value, low, high))
    if not high > low:
        return 0.5
    return min(max((value - low) / (high - low), 0.0), 1.0)


def _cell(place: tuple[float, float, float], shade: float, text: str, note: str) -> str:
    x, y, width = place
    red, green, blue = colour_at(shade)
    # Perceived lightness: numbers must stay readable on every colour.
    tone = "dark" if 0.3 * red + 0.59 * green + 0.11 * blue > 118 else "light"
    number = (
        f'<text class="value {tone}" x="{x + width / 2:.1f}" y="{y + _ROW / 2 + 4:.1f}">'
        f"{escape(text)}</text>"
        if text
        else ""
    )
    return (
        f'<g><title>{escape(note)}</title><rect class="cell" x="{x:.1f}" y="{y}" '
        f'width="{width:.1f}" height="{_ROW}" fill="rgb({red} {green} {blue})"/>{number}</g>'
    )


def _lost(place: tuple[float, float, float], note: str) -> str:
    x, y, width = place
    return (
        f'<g><title>{escape(note)}not measured</title><rect class="absent" x="{x + 1:.1f}" '
        f'y="{y + 1}" width="{width - 2:.1f}" height="{_ROW - 2}"/>'
        f'<text class="value lost" x="{x + width / 2:.1f}" y="{y + _ROW / 2 + 4:.1f}">–</text></g>'
    )


def _bar(low: float, high: float, write: Callable[[float], str]) -> str:
    """The scale of the colours, in the upper right corner."""
    left = _WIDTH - _BAR - _BAR_LABEL
    stops = scale_stops()
    step = _BAR / (len(stops) - 1)
    # Pieces instead of a gradient, whose name would have to be unique on the page.
    pieces = "".join(
        f'<rect x="{left + step * index / 4:.1f}" y="4" width="{step / 4 + 0.5:.1f}" height="9" '
        f'fill="rgb({" ".join(map(str, colour_at(index / (4 * (len(stops) - 1)))))})"/>'
        for index in range(4 * (len(stops) - 1))
    )
    return (
        f'{pieces}<text class="tick end" x="{left - 5}" y="13">{escape(write(low))}</text>'
        f'<text class="tick" x="{left + _BAR + 5}" y="13">{escape(write(high))}</text>'
    )
