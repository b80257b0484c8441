"""Charts of a page as an SVG file of their own, for documents that cannot hold HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lln.studies.report.document import style_sheet

_WIDTH, _MARGIN = 480, 24
_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif'


def svg_file(charts: Sequence[str], columns: int = 2) -> str:
    """Charts in a grid, with the style they need; each row is as high as its highest chart.

    Args:
        charts: ``<svg>`` elements of `lln.studies.report.chart` and `lln.studies.report.heatmap`.
        columns: Charts in a row.
    """
    rows = [charts[start : start + columns] for start in range(0, len(charts), columns)]
    columns = min(columns, max(map(len, rows)))
    parts, top = [], _MARGIN
    for row in rows:
        for place, chart in enumerate(row):
            left = _MARGIN + place * (_WIDTH + _MARGIN)
            where = f'x="{left}" y="{top}" width="{_WIDTH}" height="{_height(chart)}"'
            parts.append(chart.replace("<svg ", f"<svg {where} ", 1))
        top += max(map(_height, row)) + _MARGIN
    width = _MARGIN + columns * (_WIDTH + _MARGIN)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" '
        f"height=\"{top}\" font-family='{_FONT}'>\n<style>\n{style_sheet()}</style>\n"
        f'<rect width="{width}" height="{top}" style="fill: var(--panel)"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _height(chart: str) -> int:
    found = re.search(r'viewBox="0 0 \S+ (\d+)"', chart)
    return int(found[1]) if found else 0
