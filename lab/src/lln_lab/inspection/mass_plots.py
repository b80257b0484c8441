"""The charts of what block and chosen keys, or window and pages, hold of each head's attention."""

from __future__ import annotations

from itertools import accumulate, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from lln_lab.inspection.key_needs import KEY_PARTS, is_one_block
from lln_lab.inspection.maps import MASSES, draw_maps, page_maps
from lln_lab.inspection.page_needs import page_parts
from lln_lab.inspection.parts import ENOUGH, Parts, Rows
from lln_lab.inspection.study import Study
from lln_lab.report import plot_area
from lln_lab.report.chart import CaptionedChart, Chart, notes
from lln_lab.report.numbers import number
from lln_lab.report.theme import colour, colour_map

if TYPE_CHECKING:
    from lln_lab.report.chart import AnyFigure

# The fewer keys or pages a share needs, the stronger its colour.
_STRENGTHS = (0.95, 0.72, 0.52, 0.36, 0.22)
_LOOKS: dict[str, dict[str, Any]] = {
    "own block": {"color": colour("softmax")},
    "window": {"color": colour("softmax")},
    "sinks": {"color": colour("diag")},
}


def mass_plots(study: Study) -> list[CaptionedChart]:
    """Of block, keys and slots: maps, shares of every head, and shares by the number of keys."""
    rows, parts = KEY_PARTS.rows(study), KEY_PARTS
    if not rows or is_one_block(study):
        return []
    first, last = parts.numbers[0], parts.numbers[-1]
    shares = CaptionedChart(
        _shares(rows, parts, ["own block"], "shares of block, chosen keys and slots of every head"),
        "Every head",
        f": its own block, what {first} and more chosen keys add, and what is left to slots "
        f"beside {last} keys.",
    )
    axes = "share of block and keys", "share of block and chosen keys by their number"
    return [*draw_maps(study, MASSES), shares, _by_number(study, rows, parts, *axes)]


def page_plots(study: Study) -> list[CaptionedChart]:
    """Of window, sinks and pages: maps, shares of every head, and shares by the number of pages."""
    parts = page_parts(study)
    rows = parts.rows(study) if parts else []
    if not parts or not rows:
        return []
    first, last = parts.numbers[0], parts.numbers[-1]
    both = " and ".join(parts.always)
    shares = CaptionedChart(
        _shares(rows, parts, list(parts.always), f"shares of {both}, pages and rest of every head"),
        "Every head",
        f": {both}, what {first} and more chosen pages add, and what {last} pages leave out.",
    )
    held = f"share of {', '.join(parts.always)} and"
    axes = f"{held} pages", f"{held} chosen pages by their number"
    return [*draw_maps(study, page_maps(parts)), shares, _by_number(study, rows, parts, *axes)]


def _shares(rows: Rows, parts: Parts, labels: list[str], name: str) -> Chart:
    """Every head as a column of shares, one above the other.

    Args:
        rows: The heads.
        parts: What their numbers are.
        labels: Of the parts that are always there.
        name: The chart's.
    """
    edges = [float(place) for place in range(len(rows) + 1)]
    always = [list(accumulate(values[: len(labels)])) for _, values in rows]
    held = [[1 - rest for rest in parts.left_of(values)] for _, values in rows]
    columns = [[0.0, *low, *high, 1.0] for low, high in zip(always, held, strict=True)]
    # Medians over samples need not add up, but a level is never below the one before.
    levels = list(zip(*(accumulate(column, max) for column in columns), strict=True))
    steps = [f"{parts.numbers[0]} {parts.chosen}", *map(str, parts.numbers[1:])]
    bands = [(label, _LOOKS[label]) for label in labels]
    bands += [
        (label, {"color": colour("lln"), "alpha": strength})
        for label, strength in zip(steps, _STRENGTHS, strict=False)
    ]
    bands.append((parts.left, {"color": colour("lln_diag"), "alpha": 0.85}))

    def told(head: str, values: list[float]) -> str:
        at = parts.numbers.index(parts.usual)
        named = zip(parts.always, values, strict=False)
        own = [f"{part} {number(value, '.0%')}" for part, value in named]
        own.append(f"{parts.usual} {parts.chosen} {number(values[len(labels) + at], '.0%')}")
        own.append(f"{parts.left} {number(parts.left_of(values)[at], '.0%')}")
        return f"head {head}: {', '.join(own)}"

    def draw(figure: AnyFigure) -> None:
        from matplotlib.collections import PolyCollection

        axes = plot_area.plot_area(figure, "heads, the least held first", "share of attention", 2)
        axes.set_xlim(0, len(rows))
        axes.set_xticks([])
        plot_area.linear_axis(axes.yaxis, 0, 1)
        for (label, look), (low, high) in zip(bands, pairwise(levels), strict=True):
            axes.stairs(high, edges, baseline=low, fill=True, linewidth=0, label=label, **look)
        # Invisible targets for tooltips.
        targets = [
            [(left, 0), (right, 0), (right, 1), (left, 1)] for left, right in pairwise(edges)
        ]
        texts = notes([told(*row) for row in rows])
        axes.add_collection(PolyCollection(targets, alpha=0, linewidth=0, **texts))
        plot_area.legend_below(figure, axes, columns=4)

    return Chart(name, plot_area.HEIGHT + 2 * plot_area.LEGEND_LINE, draw)


def _by_number(study: Study, rows: Rows, parts: Parts, y_label: str, name: str) -> CaptionedChart:
    """What is held, by the number of keys or pages."""
    last = max(len(study.layers) - 1, 1)
    places = list(range(1 + len(parts.numbers)))
    lines = [
        (int(head.partition(".")[0]), [parts.alone(v), *(1 - rest for rest in parts.left_of(v))])
        for head, v in rows
    ]
    middle = [median(line[place] for _, line in lines) for place in places]

    def draw(figure: AnyFigure) -> None:
        axes = plot_area.plot_area(figure, f"chosen {parts.chosen}", y_label)
        axes.set_xlim(0, places[-1])
        axes.set_xticks(places, labels=["0", *map(str, parts.numbers)])
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
        Chart(name, plot_area.HEIGHT, draw),
        f"By the number of {parts.chosen}",
        ": every head, dark in the first layer and light in the last, and the median head (thick). "
        f"The dashed line is {ENOUGH:.0%}.",
    )
