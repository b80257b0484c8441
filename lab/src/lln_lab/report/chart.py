"""Charts that matplotlib draws, as inline SVG for a page or together as one SVG file."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup, escape

from lln_lab.report.theme import colour, theme_css, themed

if TYPE_CHECKING:
    from typing import TypeAlias

    from matplotlib.figure import Figure, SubFigure

    AnyFigure: TypeAlias = Figure | SubFigure

# Width in points, which are also the units of the SVG.
WIDTH = 480
_MARGIN = 24
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_NOTES = "notes:"
_STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": colour("soft"),
    "axes.facecolor": "none",
    "axes.labelcolor": colour("text"),
    "axes.labelpad": 7,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 12.5,
    "grid.color": colour("hair"),
    "grid.linewidth": 1,
    "legend.borderaxespad": 0,
    "legend.borderpad": 0,
    "legend.columnspacing": 1.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "lines.linewidth": 2,
    "lines.markersize": 7,
    "lines.scale_dashes": False,
    # Text stays text, so that it can be searched and uses the font of the page.
    "svg.fonttype": "none",
    "text.color": colour("text"),
    "xtick.color": colour("soft"),
    "xtick.major.size": 5,
    "xtick.minor.size": 0,
    "ytick.color": colour("soft"),
    "ytick.major.pad": 7,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}


class Chart(NamedTuple):
    """A chart that is not drawn yet.

    Attributes:
        label: What it shows, for screen readers.
        height: In points; the width is always `WIDTH`.
        draw: Draws it into an empty figure of that size.
    """

    label: str
    height: int
    draw: Callable[[AnyFigure], None]


class CaptionedChart(NamedTuple):
    """A chart, the first words of its caption, which are bold, and the rest of the caption."""

    chart: Chart
    lead: str
    caption: str


def notes(texts: Sequence[str]) -> dict[str, Any]:
    """Options of a collection that give each of its parts a tooltip text."""
    return {"gid": "\n".join((_NOTES, *texts)), "clip_on": False}


def inline_svg(chart: Chart) -> Markup:
    """The chart as an ``<svg>`` element with the colours of the page."""
    drawn = _draw(chart.label, WIDTH, chart.height, chart.draw)
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {chart.height}" role="img" '
        f'aria-label="{escape(chart.label)}">{drawn}</svg>'
    )


def svg_file(charts: Sequence[Chart], columns: int = 2) -> str:
    """Charts in a grid as a separate file, for documents that cannot contain HTML."""
    rows = [charts[start : start + columns] for start in range(0, len(charts), columns)]
    columns = min(columns, len(charts))
    heights = [_MARGIN, *(side for row in rows for side in (_tallest(row), _MARGIN))]
    widths = [_MARGIN, *(side for _ in range(columns) for side in (WIDTH, _MARGIN))]
    size = sum(widths), sum(heights)

    def draw(figure: Figure) -> None:
        grid = figure.add_gridspec(
            len(heights), len(widths), height_ratios=heights, width_ratios=widths
        )
        for index, row in enumerate(rows):
            for place, chart in enumerate(row):
                cell = figure.add_subfigure(grid[2 * index + 1, 2 * place + 1])
                below = _tallest(row) - chart.height
                # A shorter chart keeps its size, at the top of its row.
                halves = cell.add_gridspec(2, 1, height_ratios=(chart.height, below))
                chart.draw(cell.add_subfigure(halves[0]))

    drawn = _draw("file", *size, draw)
    box = f'viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}" height="{size[1]}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n<style>\n{theme_css()}'
        f"text{{font-family:{_FONT}!important}}\n</style>\n"
        f'<rect width="100%" height="100%" style="fill:var(--panel)"/>\n{drawn}</svg>\n'
    )


def _tallest(row: Sequence[Chart]) -> int:
    return max(chart.height for chart in row)


def _draw(salt: str, width: int, height: int, draw: Callable[[Any], None]) -> str:
    """The content of matplotlib's ``<svg>``, without external references and dates."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    file = io.StringIO()
    with mpl.rc_context():
        # The reader's own matplotlibrc must not change the pages.
        mpl.rcdefaults()
        style: Any = _STYLE | {"svg.hashsalt": salt}
        # Names inside a drawing come from the salt, so they differ between the charts of a page.
        mpl.rcParams.update(style)
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        draw(figure)
        nothing: Any = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=nothing)
    return themed(_clean(file.getvalue()))


def _clean(svg: str) -> str:
    """The drawing alone: no namespaces, clipping or unused names."""
    inside = svg[svg.index("</style>") : svg.rindex("</svg>")].partition("</defs>")[2]
    # Hundredths of a point are enough, and the same on every processor.
    inside = re.sub(r' (d|x|y|transform)="[^"]*"', lambda found: _rounded(found[0]), inside)
    inside = re.sub(rf'<g id="{_NOTES}\n([^"]*)">(.*?)</g>', _titled, inside, flags=re.DOTALL)
    for pattern, replacement in (
        (r"<defs>\s*(<clipPath.*?</clipPath>\s*)+</defs>", ""),
        (r' clip-path="[^"]*"| transform="rotate\(-?0 [^"]*"', ""),
        (r"font-family: [^;\"]*; ", ""),
        (r'<g id="[^"]*"(/?)>', r"<g\1>"),
        (r'(<image [^>]*?)id="[^"]*"', r"\1"),
        (r"xlink:href", "href"),
        (r">\s+<", "><"),
        (r"<g/>", ""),
    ):
        inside = re.sub(pattern, replacement, inside, flags=re.DOTALL)
    return inside.strip()


def _rounded(attribute: str) -> str:
    numbers = re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.2f}", attribute)
    return f" {' '.join(numbers.split())}"


def _titled(group: re.Match[str]) -> str:
    """A group with one title in each of its parts; parts with a name are only definitions."""
    texts = iter(group[1].split("\n"))
    parts = re.sub(
        r"<(path|use)((?:(?! id=)[^>])*)/>",
        lambda part: f"<{part[1]}{part[2]}><title>{next(texts)}</title></{part[1]}>",
        group[2],
    )
    return f"<g>{parts}</g>"
