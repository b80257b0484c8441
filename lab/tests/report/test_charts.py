"""Charts: what they draw, what extremes do to them, and that a page can hold them."""

import base64
import json
import math
import re
from xml.etree import ElementTree

import matplotlib as mpl
import pytest
import torch
from lab.tests.drawings import cells, draw

from lln.instruments.robust_ends import robust_ends
from lln_lab.report import chart as chart_module
from lln_lab.report import plot_area
from lln_lab.report.chart import WIDTH, Chart, inline_svg, notes, svg_file
from lln_lab.report.heatmap import heat_map
from lln_lab.report.picture import matrix_picture
from lln_lab.report.series import LOOKS
from lln_lab.report.theme import _COLOURS, DIVERGING, colour, colour_map, theme_css


def one_curve(points=((1, 1.0), (2, math.nan), (4, math.inf)), label="a < b"):
    def draw(figure):
        axes = plot_area.plot_area(figure, "x", "y")
        plot_area.log_axis_with_ticks(axes.xaxis, 1, 4, {1: "one", 4: "four"})
        plot_area.linear_axis(axes.yaxis, 0, 1)
        plot_area.curve(axes, "lln", points, unit=" & more")

    return Chart(label, plot_area.HEIGHT, draw)


def test_a_chart_is_one_element_with_a_label_and_nothing_to_load():
    svg = inline_svg(one_curve())
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == "a < b"
    assert root.get("viewBox") == f"0 0 {WIDTH} {plot_area.HEIGHT}"
    assert not re.search(r"https?://|url\(|xlink|<\?xml|<!|<metadata|<style", svg)
    ids = re.findall(r' id="([^"]*)"', svg)
    assert sorted(f"#{ident}" for ident in ids) == sorted(set(re.findall(r'href="([^"]*)"', svg)))
    assert {"one", "four", "x", "y"} <= {text.text for text in root.iter("text")}


def test_points_that_are_not_finite_are_left_out():
    svg = inline_svg(one_curve())
    assert re.findall("<title>(.*?)</title>", svg) == ["LLN: 1 &amp; more at 1"]
    assert "nan" not in svg.lower()
    assert inline_svg(one_curve([(1, math.nan)])).count("<title>") == 0


def test_the_same_chart_is_the_same_text_whatever_the_reader_has_configured():
    first = inline_svg(one_curve())
    with mpl.rc_context({"font.size": 30, "svg.fonttype": "path", "axes.facecolor": "red"}):
        assert inline_svg(one_curve()) == first
        assert mpl.rcParams["font.size"] == 30


def test_names_inside_two_charts_of_a_page_differ():
    drawn = [inline_svg(one_curve(label=label)) for label in ("first", "second")]
    names = [set(re.findall(r' id="([^"]*)"', svg)) for svg in drawn]
    assert all(names)
    assert not names[0] & names[1]


def test_colours_follow_the_theme():
    svg = inline_svg(one_curve())
    assert "var(--lln)" in svg
    assert "#" not in re.sub(r'"#m[0-9a-f]+"', "", svg), "a colour that a dark page cannot change"
    used = set(re.findall(r"var\(--([\w-]+)\)", svg))
    css = theme_css()
    light, dark = css.split("@media")
    for name in used:
        assert f"--{name}:" in light
        assert f"--{name}:" in dark
    assert {look.colour_name for look in LOOKS.values()} <= set(_COLOURS)


def test_no_colour_stands_for_two_things():
    light = [colour(name) for name in _COLOURS]
    assert len(set(light)) == len(light)
    from matplotlib.colors import to_hex

    for centred in (False, True):
        shades = {to_hex(colour_map(centred)(index)) for index in range(256)}
        assert not shades & set(light)


def test_charts_share_a_file():
    def area(height):
        def draw(figure):
            axes = plot_area.boxed_axes(figure, 10, 10, 10, 10)
            axes.scatter([0], [0], **notes(["title"]))

        return Chart("area", height, draw)

    drawn = svg_file([area(100), area(330), area(100)])
    root = ElementTree.fromstring(drawn)
    assert root.get("viewBox") == "0 0 1032 502"
    assert len(re.findall("<title>title</title>", drawn)) == 3
    # Frames of the three: side by side at the top, the third below the taller one.
    corners = {
        (float(x), float(y)) for x, y in re.findall(r'd="M ([\d.]+) ([\d.]+) L[^"]*z "', drawn)
    }
    assert {(34, 114), (538, 344), (34, 468)} <= corners
    assert theme_css() in drawn
    assert len(svg_file([area(100)]).split('viewBox="0 0 528 148"')) == 2


@pytest.mark.parametrize(("low", "high"), [(0, 8), (2.31, 3.4), (0, 1), (3.0, 3.0), (0, 12_345)])
def test_linear_ticks_span_the_range(low, high):
    def fill(figure):
        plot_area.linear_axis(plot_area.plot_area(figure, "x", "y").yaxis, low, high)

    (axes,) = draw(Chart("", 330, fill)).axes
    bottom, top = axes.get_ylim()
    assert bottom <= low
    assert top >= high
    assert 2 <= sum(bottom <= tick <= top for tick in axes.get_yticks()) <= 8


@pytest.mark.parametrize(("low", "high"), [(0.4, 900), (6, 9), (1.1, 1.2), (1, 1e5), (5, 5)])
def test_logarithmic_ticks_are_enough_to_read_by(low, high):
    def fill(figure):
        axes = plot_area.plot_area(figure, "x", "y")
        plot_area.log_axis(axes.yaxis, low / 1.25, high * 1.25)

    (axes,) = draw(Chart("", 330, fill)).axes
    ticks = axes.get_yticks()
    assert 2 <= len(ticks) <= 8
    assert all(low / 1.25 <= tick <= high * 1.25 for tick in ticks)
    if (low, high) == (6, 9):
        assert [label.get_text() for label in axes.get_yticklabels()] == ["5", "7", "10"]


def test_signed_numbers_have_two_colours_that_meet_at_zero():
    drawn = cells(inline_svg(heat_map("skew", [[-2.0, 0.0, 1.0, 2.0]], centred=True)))
    below, zero, above, most = drawn.values()
    assert min(zero) > 230, "zero has next to no colour"
    assert max(zero) - min(zero) < 10
    assert below[2] > below[0], "blue below zero"
    assert above[0] > above[2], "orange above"
    # As far from zero, as strong.
    ends = ["#{:02x}{:02x}{:02x}".format(*each) for each in (below, most)]
    assert ends == [DIVERGING[0], DIVERGING[-1]]


def test_one_extreme_head_leaves_the_colours_to_the_others():
    grid = [[1.0 + 0.1 * head for head in range(8)] for _ in range(3)]
    usual = inline_svg(heat_map("p", grid))
    grid[1][5] = 6000.0
    svg = inline_svg(heat_map("p", grid))
    changed = cells(svg)
    same = [text for text in cells(usual) if not text.startswith("layer 1, head 5")]
    assert {text: changed[text] for text in same} == {text: cells(usual)[text] for text in same}
    assert len(changed) == 24
    assert "layer 1, head 5: 6000, above the scale" in changed
    assert "▲ 1 above the scale, up to 6e+03 (head 1.5)" in svg
    assert svg.count("<use ") - usual.count("<use ") == 1, "the cell is marked"
    assert "▼" not in svg
    assert "above the scale" not in usual


def test_extremes_of_signed_and_logarithmic_numbers():
    signed = heat_map("skew", [[-0.3, -0.2, -0.1, 0.0, 0.1, 0.2, -30.0]], centred=True)
    svg = inline_svg(signed)
    assert "▼ 1 below the scale, down to −30 (head 0.6)" in svg
    assert ">−0.3<" in svg, "the scale ends where the others do"
    logs = inline_svg(heat_map("α", [[1.0, 2.0, 4.0, 8.0, 16.0, 1e-9]], log=True))
    assert "▼ 1 below the scale" in logs
    # Ten times the others is nothing out of the way where they span a hundred.
    assert robust_ends([1, 10, 100, 1000], log=True) == (1, 1000)


def test_heads_that_were_not_measured_have_a_dash_and_no_colour():
    svg = inline_svg(heat_map("p", [[1.0, math.nan], [2.0, 3.0]]))
    assert "layer 0, head 1: not measured" in svg
    assert ">–<" in svg
    assert len(cells(svg)) == 3


def test_numbers_are_written_into_cells_only_where_they_fit():
    for columns, written in ((16, True), (17, False)):
        svg = inline_svg(heat_map("p", [[0.125] * columns], write=lambda value: f"{value:.3f}"))
        # Both ends of the scale are always written.
        assert (svg.count(">0.125<") == columns + 2) == written
        assert len(cells(svg)) == columns


def test_ends_that_extremes_cannot_move():
    assert robust_ends([5.0, 5.0, 5.0, 5.0, 9.0]) == (5.0, 9.0), "a middle half without width"
    assert robust_ends([math.nan, 3.0, math.inf]) == (3.0, 3.0)
    assert robust_ends([]) == (0.0, 1.0)
    assert robust_ends([-1.0, 0.0, 1.0, 10.0], log=True) == (1.0, 10.0)


def test_matrices_are_png_files_inside_the_page():
    from io import BytesIO

    from matplotlib.image import imread

    address = matrix_picture(torch.tensor([[1.0, 0.0], [1e9, 16.0]]))
    kind, data = address.split(",")
    assert kind == "data:image/png;base64"
    pixels = imread(BytesIO(base64.b64decode(data)), format="png")
    assert pixels.shape == (2, 2, 4)
    middle, lowest, highest = colour_map()([0.5, 0.0, 1.0])
    for pixel, expected in (
        (pixels[0, 0], middle),
        (pixels[0, 1], lowest),
        (pixels[1, 0], highest),
        (pixels[1, 1], highest),
    ):
        assert pixel == pytest.approx(expected, abs=0.01)
    assert matrix_picture(torch.ones(2, 2)) == matrix_picture(torch.ones(2, 2))


def test_dots_beyond_the_axes_are_ringed_at_their_edge():
    def fill(figure):
        axes = plot_area.plot_area(figure, "x", "y")
        axes.set(xlim=(0, 10), ylim=(0, 10))
        plot_area.dots(axes, [(5.0, 10.0, 0.5, "inside"), (5.0, 12.0, 0.5, "outside")])

    (axes,) = draw(Chart("", 330, fill)).axes
    (dots,) = axes.collections
    inside, outside = dots.get_linewidths()
    assert inside < 1 < outside
    assert dots.get_offsets().tolist() == [[5.0, 10.0], [5.0, 10.0]]


def test_json_keeps_lists_of_numbers_on_one_line():
    from lln_lab.report.json_text import json_text

    content = {"a": [1.0, math.nan, 2.123456789], "b": ["x, y"]}
    text = json_text(content, digits=3)
    assert '"a": [1.0, null, 2.12]' in text
    assert json.loads(text) == {"a": [1.0, None, 2.12], "b": ["x, y"]}


def test_the_style_of_the_charts_names_settings_of_matplotlib():
    assert set(chart_module._STYLE) <= set(mpl.rcParams)
