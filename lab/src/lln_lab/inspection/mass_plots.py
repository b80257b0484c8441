"""The charts of what block, chosen keys and slots would hold of each head's attention."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from lln_lab.inspection.key_masses import KEYS
from lln_lab.inspection.key_needs import ENOUGH, USUAL, is_one_block, mass_rows
from lln_lab.inspection.maps import MASSES, draw_maps
from lln_lab.inspection.study import Study
from lln_lab.report import plot_area
from lln_lab.report.chart import CaptionedChart, Chart, notes
from lln_lab.report.numbers import number
from lln_lab.report.theme import colour, colour_map

if TYPE_CHECKING:
    from lln_lab.report.chart import AnyFigure

# The fewer keys a share needs, the stronger its colour.
_STRENGTHS = (0.95, 0.72, 0.52, 0.36, 0.22)


def mass_plots(study: Study) -> list[CaptionedChart]:
    """Heat maps, shares of every head, and shares by the number of keys."""
    rows = mass_rows(study)
    if not rows or is_one_block(study):
        return []
    return [*draw_maps(study, MASSES), _shares(rows), _by_number(study, rows)]


def _shares(rows: list[tuple[str, list[float]]]) -> CaptionedChart:
    """Every head as a column of shares, one above the other."""
    count = len(KEYS)
    edges = [float(place) for place in range(len(rows) + 1)]
    held = [[1 - values[1 + count + place] for _, values in rows] for place in range(count)]
    levels = [[0.0] * len(rows), [values[0] for _, values in rows], *held, [1.0] * len(rows)]
    # Medians over samples need not add up, but a level is never below the one before.
    for below, level in pairwise(levels):
        level[:] = [max(low, high) for low, high in zip(below, level, strict=True)]
    steps = [f"{KEYS[0]} keys", *map(str, KEYS[1:])]
    parts: list[tuple[str, dict[str, Any]]] = [("own block", {"color": colour("softmax")})]
    parts += [
        (label, {"color": colour("lln"), "alpha": strength})
        for label, strength in zip(steps, _STRENGTHS, strict=True)
    ]
    parts.append(("slots", {"color": colour("lln_diag"), "alpha": 0.85}))

    def draw(figure: AnyFigure) -> None:
        from matplotlib.collections import PolyCollection

        axes = plot_area.plot_area(figure, "heads, the least held first", "share of attention", 2)
        axes.set_xlim(0, len(rows))
        axes.set_xticks([])
        plot_area.linear_axis(axes.yaxis, 0, 1)
        for (label, look), low, high in zip(parts, levels, levels[1:], strict=False):
            axes.stairs(high, edges, baseline=low, fill=True, linewidth=0, label=label, **look)
        told = [
            f"head {name}: block {number(values[0], '.0%')}, {USUAL} keys "
            f"{number(values[1 + KEYS.index(USUAL)], '.0%')}, slots "
            f"{number(values[1 + count + KEYS.index(USUAL)], '.0%')}"
            for name, values in rows
        ]
        # Invisible targets for tooltips.
        columns = [
            [(left, 0), (right, 0), (right, 1), (left, 1)] for left, right in pairwise(edges)
        ]
        axes.add_collection(PolyCollection(columns, alpha=0, linewidth=0, **notes(told)))
        plot_area.legend_below(figure, axes, columns=4)

    chart = Chart(
        "shares of block, chosen keys and slots of every head",
        plot_area.HEIGHT + 2 * plot_area.LEGEND_LINE,
        draw,
    )
    return CaptionedChart(
        chart,
        "Every head",
        f": its own block, what {KEYS[0]} and more chosen keys add, and what is left to slots "
        f"beside {KEYS[-1]} keys.",
    )


def _by_number(study: Study, rows: list[tuple[str, list[float]]]) -> CaptionedChart:
    """What block and keys hold, by the number of keys."""
    count, last = len(KEYS), max(len(study.layers) - 1, 1)
    places = list(range(1 + count))
    lines = [
        (int(name.partition(".")[0]), [values[0], *(1 - rest for rest in values[1 + count :])])
        for name, values in rows
    ]
    middle = [median(line[place] for _, line in lines) for place in places]

    def draw(figure: AnyFigure) -> None:
        axes = plot_area.plot_area(figure, "chosen keys", "share of block and keys")
        axes.set_xlim(0, count)
        axes.set_xticks(places, labels=["0", *map(str, KEYS)])
        plot_area.linear_axis(axes.yaxis, 0, 1.02)
        for layer, line in lines:
            axes.plot(
                places, line, color=colour_map()(0.2 + 0.8 * layer / last), linewidth=1, alpha=0.6
            )
        axes.plot(places, middle, color=colour("text"), linewidth=3)
        told = [f"median head: {number(share, '.0%')}" for share in middle]
        axes.scatter(places, middle, s=144, alpha=0, linewidth=0, **notes(told))
        axes.axhline(ENOUGH, color=colour("soft"), linewidth=1.4, linestyle=(0, (3, 4)))

    return CaptionedChart(
        Chart("share of block and chosen keys by their number", plot_area.HEIGHT, draw),
        "By the number of keys",
        ": every head, dark in the first layer and light in the last, and the median head (thick). "
        f"The dashed line is {ENOUGH:.0%}.",
    )
