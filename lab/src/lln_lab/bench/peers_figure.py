"""Time and memory of every system over the length, a panel per family."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lln_lab.bench.length_axis import label_lengths, machine_of, points
from lln_lab.bench.peers_cells import ALONE, FRAME
from lln_lab.bench.result_rows import Row
from lln_lab.drawing import save
from lln_lab.peers import FAMILIES, card

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# Drawn in every panel for comparison; the frame only next to blocks.
_BESIDE = {"softmax": "#000000", "lln": "#0072B2", "lln_diag": "#D55E00"}
_FRAME_COLOUR = "#777777"
# Ten colours that differ in lightness too; markers also differ.
_COLOURS = (
    *("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8B6914"),
    *("#6A3D9A", "#B22222", "#2F6B6B", "#8DB600", "#FF8FA3"),
)
_MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*", "<", ">")
# Least vertical distance between names, as a share of the panel's height.
_APART = 0.062


def draw_peers(
    results: dict[str, Any], path: Path, field: str = "milliseconds", passes: str = "both"
) -> list[Path]:
    """Draw batch 1 over the length; returns the files, an SVG and a PNG, or none without rows.

    Args:
        results: Content of a results file of ``lln bench peers``.
        path: Where to write; the suffix is replaced.
        field: ``"milliseconds"`` or ``"peak_bytes"``.
        passes: ``"forward"`` or ``"both"``.
    """
    rows = [row for row in results["cases"] if (row["part"], row["passes"]) == (ALONE, passes)]
    measured = {row["system"] for row in rows if row.get(field) is not None}
    families = {
        family: shown
        for family, names in FAMILIES.items()
        if (shown := [name for name in names if name in measured])
    }
    if not families:
        return []
    columns = min(3, len(families))
    lines = -(-len(families) // columns)

    def fill(figure: Figure) -> None:
        grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
        panels: list[Axes] = list(grid.flat)
        lengths = sorted({row["tokens"] for row in rows})
        for axes, (family, names) in zip(panels, families.items(), strict=False):
            axes.set_title(family, fontsize=10)
            _panel(axes, rows, names, field)
            label_lengths(axes, lengths)
        for axes in panels[len(families) :]:
            axes.set_visible(False)
        # Axis limits are shared, so names are placed after every panel is drawn.
        for axes in panels[: len(families)]:
            _name_lines(axes)
        figure.supxlabel("tokens N", fontsize=9)
        unit = "milliseconds" if field == "milliseconds" else "megabytes at peak"
        figure.supylabel(unit, fontsize=9)
        figure.suptitle(_title(results, passes), fontsize=9)

    return save(path, (4.0 * columns, 0.7 + 3.1 * lines), fill)


def _panel(axes: Axes, rows: Sequence[Row], names: Sequence[str], field: str) -> None:
    beside = dict(_BESIDE)
    if any(card(name).kind == "block" for name in names):
        beside[FRAME] = _FRAME_COLOUR
    for name, colour in beside.items():
        if name not in names:
            _line(axes, rows, name, field, color=colour, linewidth=1.0, linestyle="--")
    others = [name for name in names if name not in _BESIDE]
    for name in names:
        index = others.index(name) if name in others else 0
        colour = _BESIDE.get(name, _COLOURS[index])
        _line(axes, rows, name, field, color=colour, marker=_MARKERS[index])


def _line(axes: Axes, rows: Sequence[Row], name: str, field: str, **look: Any) -> None:
    own = [row for row in rows if row["system"] == name]
    found = points(own, field, 1e-6 if field == "peak_bytes" else 1.0)
    # Mark lines that end because of memory or the time limit.
    ended = any(row["status"] != "timed" for row in own)
    if found:
        axes.plot(*zip(*found, strict=True), label=f"{name} ×" if ended else name, **look)


def _name_lines(axes: Axes) -> None:
    """Write names next to the ends of their lines, moved apart where they would overlap."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    lines = sorted(axes.get_lines(), key=_end)
    heights = [(math.log(_end(line)) - low) / (high - low) for line in lines]
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + _APART)
    # If they then exceed the top, they are moved down again from there.
    for index in range(len(heights)):
        heights[-1 - index] = min(heights[-1 - index], 1.0 - index * _APART)
    for height, line in zip(heights, lines, strict=True):
        axes.annotate(
            str(line.get_label()), (1.02, height), xycoords="axes fraction", va="center",
            fontsize=7.5, color=line.get_color(), annotation_clip=False,
        )  # fmt: skip


def _end(line: Line2D) -> float:
    return float(list(line.get_ydata())[-1])  # pyright: ignore


def _title(results: dict[str, Any], passes: str) -> str:
    layer = results["layer"]
    what = "forward" if passes == "forward" else "forward + backward"
    return (
        f"One layer, {what}, batch 1, {layer['width']} wide, {layer['heads']} heads, "
        f"{layer['dtype']}, {machine_of(results)}; dashed: softmax and LLN again; ×: ends out of "
        "memory or over the time limit"
    )
