"""Figures 1 and 8 from finished cells: what happened during training, one line per method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lln_lab.drawing import save
from lln_lab.experiments.methods import Method, all_methods
from lln_lab.experiments.report_page import CURVES, mean_curve

PANEL = (5.2, 3.0)
# Alone, a panel is wide enough for the legend below it.
WIDE = 8.2


def draw_curves(cells: list[dict[str, Any]], path: Path) -> list[Path]:
    """Draw every kind of curve that the cells have, side by side.

    Args:
        cells: Finished cells of one task.
        path: Of the figure, without a suffix.

    Returns:
        The files, an SVG and a PNG.
    """
    by_method: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        by_method.setdefault(cell["cell"]["method"], []).append(cell)
    order = {name: place for place, name in enumerate(all_methods())}
    methods = sorted(by_method, key=lambda name: (order.get(name, len(order)), name))
    kinds = [kind for kind in CURVES if mean_curve(cells, kind)]

    def draw(figure: Any) -> None:
        panels = figure.subplots(-(-len(kinds) // 2), min(len(kinds), 2), squeeze=False)
        named = {}
        for axes, kind in zip(panels.flat, kinds, strict=False):
            for place, method in enumerate(methods):
                points = mean_curve(by_method[method], kind)
                if points:
                    style = {"color": f"C{place % 10}", "linestyle": ("-", "--")[place // 5 % 2]}
                    (line,) = axes.plot(*zip(*points, strict=True), **style)
                    named[Method.parse(method).title] = line
            axes.set_xlabel("training steps")
            axes.set_ylabel(kind.axis)
        for axes in panels.flat[len(kinds) :]:
            axes.remove()
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=columns)

    rows = -(-len(kinds) // 2)
    columns = 3 if len(kinds) > 1 else 2
    width = 2 * PANEL[0] if len(kinds) > 1 else WIDE
    return save(path, (width, PANEL[1] * rows + 0.25 * -(-len(methods) // columns)), draw)
