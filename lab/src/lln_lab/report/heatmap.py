"""A number for every layer and head, as a grid of coloured cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lln.instruments.robust_ends import robust_ends
from lln_lab.report.chart import WIDTH, Chart, notes
from lln_lab.report.numbers import number
from lln_lab.report.plot_area import from_corner, write_at
from lln_lab.report.theme import colour, colour_map

if TYPE_CHECKING:
    from lln_lab.report.chart import AnyFigure

_LEFT, _TOP, _ROW, _LINE = 42, 24, 24, 18
_BAR, _BAR_LABEL = 110, 46
# With more columns than this the numbers do not fit into the cells.
_MOST_NUMBERED = 16
# Text colours on dark and on light cells; like the cells, the same for light and dark screens.
_LIGHT, _DARK = "#fefefe", "#10151b"
_SOFT: dict[str, Any] = {"fontsize": 12.5, "color": colour("soft")}


@dataclass(frozen=True)
class _Scale:
    """How numbers become colours."""

    low: float
    high: float
    log: bool
    centred: bool

    def shade(self, value: float) -> float:
        """Where a number lies in the scale, from 0 to 1; the middle if all numbers are equal."""
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
) -> Chart:
    """The grid with layers from the top and heads from the left.

    Numbers beyond the ends of the scale have its last colour and a mark, and a line below the map
    says how far they go.

    Args:
        title: What the numbers are.
        grid: By layer and head; NaN = not measured.
        low: Number of the first colour; None = the smallest that is not an extreme.
        high: Number of the last colour; None = the largest that is not an extreme.
        write: How a number is written.
        log: Whether colours follow the logarithm.
        centred: Whether numbers are signed, with zero in the middle of the colour scale.
        least: Least range of a centred scale, so that numbers that round to zero have no colour.
    """
    ends = robust_ends([value for row in grid for value in row], log=log)
    low, high = ends[0] if low is None else low, ends[1] if high is None else high
    if centred:
        high = max(abs(low), abs(high), least)
        low = -high
    scale = _Scale(low, high, log, centred)
    columns = max((len(row) for row in grid), default=1)
    beyond = _beyond(grid, scale, write)
    under_map = 40 + _LINE * len(beyond)
    bottom = _TOP + _ROW * len(grid)

    def draw(figure: AnyFigure) -> None:
        cells = [
            _Cell(layer, head, value, scale, (WIDTH - _LEFT - 1) / columns)
            for layer, row in enumerate(grid)
            for head, value in enumerate(row)
        ]
        _draw_cells(figure, cells)
        for cell in cells:
            if math.isnan(cell.value):
                cell.write(figure, "–")
            elif columns <= _MOST_NUMBERED:
                cell.write(figure, write(cell.value))
        _write_places(figure, len(grid), columns)
        write_at(figure, 2, 14, title, fontsize=13, fontweight="bold")
        _draw_bar(figure, scale, write)
        for index, line in enumerate(beyond):
            write_at(figure, _LEFT, bottom + 48 + _LINE * index, line, **_SOFT)

    return Chart(f"{title} by layer and head", bottom + under_map, draw)


def _write_places(figure: AnyFigure, rows: int, columns: int) -> None:
    """Write the numbers of layers and heads, and the axis labels."""
    width, bottom = (WIDTH - _LEFT - 1) / columns, _TOP + _ROW * rows
    for head in range(0, columns, max(1, math.ceil(columns / 24))):
        write_at(figure, _LEFT + width * (head + 0.5), bottom + 15, f"{head}", ha="center", **_SOFT)
    for layer in range(rows):
        middle = _TOP + _ROW * (layer + 0.5)
        write_at(figure, _LEFT - 7, middle + 4.5, f"{layer}", ha="right", **_SOFT)
    write_at(figure, (_LEFT + WIDTH) / 2, bottom + 32, "head", ha="center", **_SOFT)
    turned = {"rotation": 90, "ha": "center", "va": "center"}
    write_at(figure, 12, (_TOP + bottom) / 2, "layer", **turned, **_SOFT)


class _Cell:
    """The number of a head, its place, its colour and its tooltip."""

    def __init__(self, layer: int, head: int, value: float, scale: _Scale, width: float) -> None:
        from matplotlib.colors import to_hex

        self.value, self.width = value, width
        self.left, self.top = _LEFT + width * head, _TOP + _ROW * layer
        # 1 = above the scale, −1 = below it.
        self.beyond = (value > scale.high) - (value < scale.low)
        self.note = f"layer {layer}, head {head}: "
        if math.isnan(value):
            self.note += "not measured"
            self.fill, self.ink = "none", colour("soft")
            return
        self.note += (
            number(value, ".5g") + ("", ", above the scale", ", below the scale")[self.beyond]
        )
        red, green, blue, _ = shade = colour_map(scale.centred)(scale.shade(value))
        self.fill = to_hex(shade)
        # By perceived lightness, so that numbers stay readable on every colour.
        self.ink = _DARK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.46 else _LIGHT

    def write(self, figure: AnyFigure, text: str) -> None:
        """Writes into the middle."""
        place = self.left + self.width / 2, self.top + _ROW / 2 + 4
        write_at(figure, *place, text, ha="center", fontsize=10.5, color=self.ink)


def _draw_cells(figure: AnyFigure, cells: Sequence[_Cell]) -> None:
    """Draw the cells without axes, which take matplotlib longer than everything else."""
    from matplotlib.collections import PolyCollection
    from matplotlib.lines import Line2D

    corners = ((0, 0), (1, 0), (1, 1), (0, 1))
    placed = from_corner(figure)
    figure.add_artist(
        PolyCollection(
            [
                [(cell.left + cell.width * x, cell.top + _ROW * y) for x, y in corners]
                for cell in cells
            ],
            facecolors=[cell.fill for cell in cells],
            edgecolors=[colour("hair" if cell.fill == "none" else "panel") for cell in cells],
            linewidths=1.5,
            transform=placed,
            **notes([cell.note for cell in cells]),
        )
    )
    for cell in cells:
        if cell.beyond:
            x, y = cell.left + cell.width - 4, cell.top + _ROW / 2 - 8 * cell.beyond
            mark = "^" if cell.beyond > 0 else "v"
            look = {"color": cell.ink, "markersize": 4.5, "markeredgewidth": 0}
            figure.add_artist(Line2D([x], [y], marker=mark, transform=placed, **look))


def _beyond(
    grid: Sequence[Sequence[float]], scale: _Scale, write: Callable[[float], str]
) -> list[str]:
    """Which numbers lie beyond the scale, one line for each end."""
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


def _draw_bar(figure: AnyFigure, scale: _Scale, write: Callable[[float], str]) -> None:
    """The scale of the colours, in the upper right corner."""
    from matplotlib.image import BboxImage
    from matplotlib.transforms import Bbox, TransformedBbox

    left = WIDTH - _BAR - _BAR_LABEL
    place = TransformedBbox(Bbox([[left, 13], [left + _BAR, 4]]), from_corner(figure))
    bar = BboxImage(place, cmap=colour_map(scale.centred))
    bar.set_data([[step / 255 for step in range(256)]])
    figure.add_artist(bar)
    write_at(figure, left - 5, 13, write(scale.low), ha="right", **_SOFT)
    write_at(figure, left + _BAR + 5, 13, write(scale.high), **_SOFT)
