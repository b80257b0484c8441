"""Reads charts back: the colours of heat maps, and axes as matplotlib draws them."""

import re

from matplotlib.figure import Figure

from lln_lab.report.chart import WIDTH


def cells(svg):
    """Colour of every cell by its note."""
    found = re.findall(r'style="fill: #(..)(..)(..); stroke: var[^>]*><title>([^<]*)</title>', svg)
    return {text: tuple(int(part, 16) for part in colours) for *colours, text in found}


def draw(chart):
    """The figure of a chart, with ticks and limits as they are drawn."""
    figure = Figure(figsize=(WIDTH / 72, chart.height / 72), dpi=72)
    chart.draw(figure)
    figure.draw_without_rendering()
    return figure
