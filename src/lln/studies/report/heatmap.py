"""A number for every layer and head, as a grid of coloured cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lln.studies.report.chart import WIDTH, Chart, notes
from lln.studies.report.numbers import number
from lln.studies.report.plot_area import boxed_axes, write_at
from lln.studies.report.robust_ends import robust_ends
from lln.studies.report.theme import colour, colour_map

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

_LEFT, _TOP, _ROW, _LINE = 42, 24, 24, 18
_BAR, _BAR_LABEL = 110, 46
# Columns beyond which the numbers no longer fit into the cells.
_MOST_NUMBERED = 16
# Of numbers on dark and on light cells; the same on every screen, as the cells are.
_LIGHT, _DARK = "#fefefe", "#10151b"


@dataclass(frozen=True)
class _Scale:
    """How numbers become colours."""

    low: float
    high: float
    log: bool
    centred: bool

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
        centred: Whether numbers have a sign: zero has the middle of two colours.
        least: What the ends of a centred scale reach at least, so that numbers too small to be
            written have no colour.
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

    def draw(figure: FigureBase) -> None:
        axes = boxed_axes(figure, _LEFT, 1, _TOP, under_map)
        _set_ticks(axes, len(grid), columns)
        cells = [
            _Cell(layer, head, value, scale)
            for layer, row in enumerate(grid)
            for head, value in enumerate(row)
        ]
        _draw_cells(axes, cells)
        for cell in cells:
            if math.isnan(cell.value):
                _write_number(axes, cell, "–")
            elif columns <= _MOST_NUMBERED:
                _write_number(axes, cell, write(cell.value))
        write_at(figure, 2, 14, title, fontsize=13, fontweight="bold")
        _draw_bar(figure, scale, write)
        for index, line in enumerate(beyond):
            at = bottom + 48 + _LINE * index
            write_at(figure, _LEFT, at, line, fontsize=12, color=colour("soft"))

    return Chart(f"{title} by layer and head", bottom + under_map, draw)


def _set_ticks(axes: Axes, rows: int, columns: int) -> None:
    axes.set(xlim=(0, columns), ylim=(rows, 0))
    every = max(1, math.ceil(columns / 24))
    heads = range(0, columns, every)
    axes.set_xticks([head + 0.5 for head in heads], [str(head) for head in heads])
    axes.set_yticks([row + 0.5 for row in range(rows)], [str(row) for row in range(rows)])
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("head", color=colour("soft"))
    axes.set_ylabel("layer", color=colour("soft"))


class _Cell:
    """The number of a head, its colour and how it is told."""

    def __init__(self, layer: int, head: int, value: float, scale: _Scale) -> None:
        from matplotlib.colors import to_hex

        self.layer, self.head, self.value = layer, head, value
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


def _draw_cells(axes: Axes, cells: Sequence[_Cell]) -> None:
    from matplotlib.collections import PolyCollection

    corners = ((0, 0), (1, 0), (1, 1), (0, 1))
    axes.add_collection(
        PolyCollection(
            [[(cell.head + x, cell.layer + y) for x, y in corners] for cell in cells],
            facecolors=[cell.fill for cell in cells],
            edgecolors=[colour("hair" if cell.fill == "none" else "panel") for cell in cells],
            linewidths=1.5,
            **notes([cell.note for cell in cells]),
        ),
        autolim=False,
    )
    for cell in cells:
        if cell.beyond:
            corner = (cell.head + 0.9, cell.layer + 0.5 - 0.33 * cell.beyond)
            mark = "^" if cell.beyond > 0 else "v"
            axes.plot(*corner, mark, color=cell.ink, markersize=4.5, markeredgewidth=0)


def _write_number(axes: Axes, cell: _Cell, text: str) -> None:
    options = {"ha": "center", "va": "center_baseline", "fontsize": 10.5, "color": cell.ink}
    axes.text(cell.head + 0.5, cell.layer + 0.5, text, **options)


def _beyond(
    grid: Sequence[Sequence[float]], scale: _Scale, write: Callable[[float], str]
) -> list[str]:
    """What lies beyond the scale, one line for each end."""
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


def _draw_bar(figure: FigureBase, scale: _Scale, write: Callable[[float], str]) -> None:
    """The scale of the colours, in the upper right corner."""
    height = figure.bbox.height
    axes = boxed_axes(figure, WIDTH - _BAR - _BAR_LABEL, _BAR_LABEL, 4, height - 13)
    axes.imshow(
        [[step / 63 for step in range(64)]],
        aspect="auto",
        cmap=colour_map(scale.centred),
        interpolation="none",
    )
    axes.set_axis_off()
    left = WIDTH - _BAR - _BAR_LABEL
    soft = {"fontsize": 12, "color": colour("soft")}
    write_at(figure, left - 5, 13, write(scale.low), ha="right", **soft)
    write_at(figure, left + _BAR + 5, 13, write(scale.high), **soft)
