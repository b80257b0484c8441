"""The page of lln inspect: what extremes and signs do to its colours, axes and numbers."""

import math
import re
from copy import deepcopy

import pytest
from experiments import inspect_minilm

from lln.studies.inspection.choice import Chosen
from lln.studies.inspection.findings import findings
from lln.studies.inspection.maps import CROSS, LLN, draw_maps
from lln.studies.inspection.page import render_page
from lln.studies.inspection.plots import shape_plots, theory_plots
from lln.studies.inspection.saved import read_study
from lln.studies.report.chart import log_axis
from lln.studies.report.heatmap import heat_map
from lln.studies.report.limits import robust_ends
from lln.studies.report.picture import DIVERGING, colour_at

# A minus before a number that reads zero.
MINUS_ZERO = re.compile(r"[-−]0(\.0*)?(?![\d.])")


@pytest.fixture(scope="module")
def minilm():
    return read_study(inspect_minilm.NUMBERS)


@pytest.fixture
def study(minilm):
    return deepcopy(minilm[0])


def cells(svg):
    """Colour and note of every cell."""
    pattern = r"<g><title>([^<]*)</title><rect class=\"cell\"[^>]*fill=\"rgb\((\d+) (\d+) (\d+)\)"
    return {note: (int(r), int(g), int(b)) for note, r, g, b in re.findall(pattern, svg)}


def ticks(svg, kind):
    found = re.findall(rf'<text class="tick {kind}"[^>]*>([^<]*)</text>', svg)
    return [float(text.replace("−", "-").replace(",", "")) for text in found]


def test_signed_numbers_have_two_colours_that_meet_at_zero():
    drawn = cells(heat_map("skew", [[-2.0, 0.0, 1.0, 2.0]], centred=True))
    below, zero, above, most = drawn.values()
    assert zero == DIVERGING[len(DIVERGING) // 2] == colour_at(0.5, DIVERGING)
    assert below[2] > below[0], "blue below zero"
    assert above[0] > above[2], "orange above"
    assert min(zero) > 200, "zero has next to no colour"
    # As far from zero, as strong.
    assert (below, most) == (DIVERGING[0], DIVERGING[-1])


def test_numbers_too_small_to_be_written_have_no_colour(study):
    for layer in study.layers:
        layer.values["lln.entropy"] = [
            value + (-1) ** head * 1e-4 for head, value in enumerate(layer.values["entropy"])
        ]
    (drawn,) = [svg for svg, caption in draw_maps(study, LLN) if "that LLN misses" in caption]
    assert all(min(colour) > 200 for colour in cells(drawn).values())


def test_one_extreme_head_leaves_the_colours_to_the_others():
    grid = [[1.0 + 0.1 * head for head in range(8)] for _ in range(3)]
    usual = cells(heat_map("p", grid))
    grid[1][5] = 6000.0
    svg = heat_map("p", grid)
    changed = cells(svg)
    same = [note for note in usual if not note.startswith("layer 1, head 5")]
    assert {note: changed[note] for note in same} == {note: usual[note] for note in same}
    assert "layer 1, head 5: 6000, above the scale" in changed
    assert "▲ 1 above the scale, up to 6e+03 (head 1.5)" in svg
    assert svg.count('<path class="dark"') == 1, "the cell is marked"
    assert "▼" not in svg
    assert "above the scale" not in heat_map("p", grid[:1])


def test_extremes_of_signed_and_logarithmic_numbers():
    signed = heat_map("skew", [[-0.3, -0.2, -0.1, 0.0, 0.1, 0.2, -30.0]], centred=True)
    assert "▼ 1 below the scale, down to −30 (head 0.6)" in signed
    assert "−0.3<" in signed, "the scale ends where the others do"
    logs = heat_map("α", [[1.0, 2.0, 4.0, 8.0, 16.0, 1e-9]], log=True)
    assert "▼ 1 below the scale" in logs
    # Ten times the others is nothing out of the way where they span a hundred.
    assert robust_ends([1, 10, 100, 1000], log=True) == (1, 1000)


def test_ends_that_extremes_cannot_move():
    assert robust_ends([5.0, 5.0, 5.0, 5.0, 9.0]) == (5.0, 9.0), "a middle half without width"
    assert robust_ends([math.nan, 3.0, math.inf]) == (3.0, 3.0)
    assert robust_ends([]) == (0.0, 1.0)
    assert robust_ends([-1.0, 0.0, 1.0, 10.0], log=True) == (1.0, 10.0)


def test_the_axis_of_log_p_ends_where_weights_do(study):
    # Mean −60 and standard deviation 22: five of them reach +50, the fitted normal's end as well.
    layer = study.layers[0]
    layer.values["log_normality.mean"][2] = -60.0
    layer.values["log_normality.variance"][2] = 484.0
    shape = layer.shapes[2]
    shape.normal_quantiles = [-60 + 22 * (3.72 * (2 * i / 98 - 1)) for i in range(99)]
    shape.quantiles = [min(value, -0.01) for value in shape.normal_quantiles]
    (density, caption), (quantiles, other) = shape_plots(study, Chosen(0, 2, "as asked"))
    assert max(ticks(density, "mid")) <= 0
    assert max(ticks(quantiles, "mid") + ticks(quantiles, "end")) <= 0
    sentence = "The axis ends at log P = 0, where P is 1; 0.3% of the fitted normal lies above."
    assert sentence in caption
    assert sentence in other
    assert "The axis ends" not in "".join(c for _, c in shape_plots(study, Chosen(2, 2, "")))


def test_one_extreme_head_leaves_the_axes_to_the_others(study):
    usual, _ = theory_plots(study)[0]
    for name in ("theory.variance", "score_variance.within_row"):
        study.layers[1].values[name][3] = 5e7
    drawn, caption = theory_plots(study)[0]
    assert ticks(drawn, "mid") == ticks(usual, "mid")
    assert "Outside the axes, ringed at the edge: 1.3 (5e+07 upright, 5e+07 across)." in caption
    assert drawn.count('class="ring"') == 1
    for head in range(4):
        study.layers[1].values["score_variance.within_row"][head] = 5e7
    assert ") and 1 more." in theory_plots(study)[0][1]


def test_a_short_logarithmic_axis_has_ticks_to_read_it_by():
    for low, high in ((6.0, 9.0), (1.1, 1.2), (0.3, 40.0), (1.0, 1e5)):
        assert len(log_axis("p", low, high).ticks) >= 2
    assert [label for _, label in log_axis("p", 5.5, 8.9).ticks] == ["5", "7", "10"]


def test_zero_has_no_sign_anywhere_on_the_page(study):
    pages = [render_page(study, [])]
    for layer in study.layers:
        for name in layer.values:
            layer.values[name] = [-1e-9] * layer.heads
    pages.append(render_page(study, []))
    for page in pages:
        text = re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL)
        assert not MINUS_ZERO.findall(text)
    assert findings(study)


def test_the_page_is_named_for_the_model_and_its_contents_lead_to_every_section(minilm):
    study, chosen = minilm
    page = render_page(study, chosen)
    assert f"<title>{study.model}</title>" in page
    assert f"<h1>{study.model}</h1>" in page
    links = re.findall(r'<a href="#([^"]+)">', page)
    assert links == re.findall(r'<section id="([^"]+)">', page)
    assert len(links) == len(set(links)) == 7


def test_the_share_of_c_cross_is_drawn_with_its_sign(study):
    study.layers[0].values["theory.cross_share"][0] = -0.5
    drawn = cells(draw_maps(study, (CROSS,))[0][0])
    red, _, blue = drawn["layer 0, head 0: −0.5"]
    assert blue > red
