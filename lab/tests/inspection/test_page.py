"""The page of lln inspect: what extremes and signs do to its colours, axes and numbers."""

import re
from copy import deepcopy
from itertools import pairwise

import pytest
from lab.tests.drawings import cells, draw

from lln_lab.experiments.inspect_minilm import NUMBERS
from lln_lab.inspection.choice import Chosen
from lln_lab.inspection.findings import findings
from lln_lab.inspection.key_masses import KEYS
from lln_lab.inspection.key_needs import keys_sentence, mass_rows, mass_table
from lln_lab.inspection.maps import CROSS, LLN, draw_maps
from lln_lab.inspection.mass_plots import mass_plots, page_plots
from lln_lab.inspection.page import render_page
from lln_lab.inspection.page_masses import page_numbers
from lln_lab.inspection.page_needs import page_table, pages_sentence
from lln_lab.inspection.plots import shape_plots, theory_plots
from lln_lab.inspection.saved import read_study
from lln_lab.report.chart import inline_svg

# A minus before a number that reads zero.
MINUS_ZERO = re.compile(r"[-−]0(\.0*)?(?![\d.])")


@pytest.fixture(scope="module")
def minilm():
    return read_study(NUMBERS)


@pytest.fixture
def study(minilm):
    return deepcopy(minilm[0])


def ticks(chart, axis):
    """What is written at the ticks inside the axes."""
    (axes,) = draw(chart).axes
    low, high = getattr(axes, f"{axis}axis").get_view_interval()
    places = getattr(axes, f"get_{axis}ticks")()
    return [float(place) for place in places if low <= place <= high]


def test_numbers_too_small_to_be_written_have_no_colour(study):
    for layer in study.layers:
        layer.values["lln.entropy"] = [
            value + (-1) ** head * 1e-4 for head, value in enumerate(layer.values["entropy"])
        ]
    (drawn,) = [each.chart for each in draw_maps(study, LLN) if "that LLN misses" in each.caption]
    colours = cells(inline_svg(drawn)).values()
    assert len(colours) == 72
    assert all(min(colour) > 200 for colour in colours)


def test_the_axis_of_log_p_ends_where_weights_do(study):
    # Mean −60 and standard deviation 22: five of them reach +50, the fitted normal's end as well.
    layer = study.layers[0]
    layer.values["log_normality.mean"][2] = -60.0
    layer.values["log_normality.variance"][2] = 484.0
    shape = layer.shapes[2]
    shape.normal_quantiles = [-60 + 22 * (3.72 * (2 * i / 98 - 1)) for i in range(99)]
    shape.quantiles = [min(value, -0.01) for value in shape.normal_quantiles]
    density, quantiles = shape_plots(study, Chosen(0, 2, "as asked"))
    assert max(ticks(density.chart, "x")) <= 0
    assert max(ticks(quantiles.chart, "x") + ticks(quantiles.chart, "y")) <= 0
    sentence = "The axis ends at log P = 0, where P is 1; 0.3% of the fitted normal lies above."
    assert sentence in density.caption
    assert sentence in quantiles.caption
    others = shape_plots(study, Chosen(2, 2, ""))
    assert len(others) == 2
    assert not any("The axis ends" in each.caption for each in others)


def test_one_extreme_head_leaves_the_axes_to_the_others(study):
    usual = theory_plots(study)[0].chart
    for name in ("theory.variance", "score_variance.within_row"):
        study.layers[1].values[name][3] = 5e7
    drawn, _, caption = theory_plots(study)[0]
    assert ticks(drawn, "x") == ticks(usual, "x")
    assert "Outside the axes, ringed at the edge: 1.3 (5e+07 upright, 5e+07 across)." in caption
    (dots,) = draw(drawn).axes[0].collections
    assert sum(width == 2 for width in dots.get_linewidths()) == 1
    for head in range(4):
        study.layers[1].values["score_variance.within_row"][head] = 5e7
    assert ") and 1 more." in theory_plots(study)[0].caption


def test_zero_has_no_sign_anywhere_on_the_page(study):
    del study.layers[2:]
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
    assert len(links) == len(set(links)) == 9


def test_heads_that_need_keys_are_named(study):
    usual = keys_sentence(study)
    assert re.search(r"block of 64 tokens holds \d+% of softmax's attention", usual)
    assert "which need no keys" in usual
    assert re.search(
        r"more keys or rely on slots: (\d\.\d+ \(\d+%\), ){7}.* and \d+ more\.$", usual
    )
    for layer in study.layers:
        for number in KEYS:
            layer.values[f"mass.rest_{number}"] = [0.05] * layer.heads
    assert keys_sentence(study).endswith("block and 64 keys do in 72.")
    study.layers[2].values["mass.rest_64"][5] = 0.4
    study.layers[1].values["mass.block"][0] = 0.95
    text = keys_sentence(study)
    assert "90% in 1 of 72 heads, which need no keys; block and 64 keys do in 71." in text
    assert text.endswith("rely on slots: 2.5 (60%).")
    assert mass_rows(study)[0][0] == "2.5"
    head, first, *_, last = mass_table(study).splitlines()[1:]
    assert re.findall(r"K = (\d+), slots", head) == [str(number) for number in KEYS]
    assert first.split()[0] == "2.5"
    assert first.split()[6:8] == [f"{study.layers[2].values['mass.keys_64'][5]:.0%}", "40%"]
    assert last.startswith("… and 56 heads more")


def test_short_sequences_leave_nothing_to_choose(study):
    study.tokens = 64
    assert "All 64 tokens lie in one block of 64" in keys_sentence(study)
    assert mass_table(study) == ""
    assert mass_plots(study) == []


def test_masses_are_drawn_for_every_head(study):
    charts = mass_plots(study)
    assert len(charts) == 4
    bars, curves = (draw(each.chart).axes[0] for each in charts[2:])
    assert len(bars.patches) == len(KEYS) + 2
    assert len(curves.lines) == 72 + 2
    tops = [patch.get_data().values for patch in bars.patches]
    assert all((low <= high).all() for low, high in pairwise(tops))
    assert (tops[-1] == 1).all()


@pytest.fixture
def paged(study):
    """Every head with 30% in the window, 40% on sinks, and half of the rest at every number."""
    for layer in study.layers:
        layer.pages = {"pages": 32, "page_size": 16, "window": 127, "sinks": 16}
        layer.is_causal = True
        parts = {"window": 0.3, "sinks": 0.4}
        for place, number in enumerate(page_numbers(32)):
            left = 0.3 / 2 ** (place + 1)
            parts |= {f"unseen_{number}": left, f"pages_{number}": 0.3 - left}
        layer.values |= {f"mass.{name}": [share] * layer.heads for name, share in parts.items()}
    return study


def test_heads_that_pages_do_not_hold_are_named(paged):
    text = pages_sentence(paged)
    assert text.startswith(
        "In the median head window and sinks hold 70% of softmax's attention, 85% with 8, 96% with "
        "32 and 99% with 128 chosen pages (127 tokens before a query and 16 sinks; pages of 16 "
        "tokens). Without pages window and sinks hold 90% in 0 of 72 heads; with 32 pages, 72 "
    )
    assert text.endswith("72 heads do.")
    paged.layers[2].values["mass.unseen_32"][5] = 0.4
    text = pages_sentence(paged)
    assert text.endswith("with 32 pages, 71 heads do. Those that hold less: 2.5 (60%).")
    head, first, *_, last = page_table(paged).splitlines()[1:]
    assert re.findall(r"P = (\d+), rest", head) == [str(number) for number in page_numbers(32)]
    assert first.split()[:3] == ["2.5", "30%", "40%"]
    assert first.split()[7:9] == ["26%", "40%"]
    assert last.startswith("… and 56 heads more")
    for layer in paged.layers:
        layer.values["mass.unseen_32"] = [0.0] * layer.heads
    assert "32 pages leave nothing out; longer sequences (--tokens)" in pages_sentence(paged)


def test_an_encoder_has_no_sinks(paged):
    for layer in paged.layers:
        layer.is_causal, layer.pages["sinks"] = False, 0
    assert "window holds 30% of" in pages_sentence(paged)
    assert "(127 tokens on either side of a query; pages" in pages_sentence(paged)
    assert "sinks" not in page_table(paged)
    assert len(page_plots(paged)) == 4
    assert "sinks" not in "".join(each.chart.label + each.caption for each in page_plots(paged))


def test_sequences_inside_one_window_leave_nothing_to_choose(paged):
    paged.tokens = 128
    assert "All 128 tokens lie in one window" in pages_sentence(paged)
    assert page_table(paged) == ""
    assert page_plots(paged) == []
    paged.tokens = 129
    assert "In the median head" in pages_sentence(paged)


def test_masses_of_pages_are_drawn_for_every_head(paged):
    *maps, _, _ = charts = page_plots(paged)
    assert len(maps) == 3
    bars, curves = (draw(each.chart).axes[0] for each in charts[3:])
    assert len(bars.patches) == 2 + 5 + 1
    tops = [patch.get_data().values[0] for patch in bars.patches]
    assert tops == pytest.approx([0.3, 0.7, 0.85, 0.925, 0.9625, 0.98125, 0.990625, 1.0])
    assert len(curves.lines) == 72 + 2
    assert curves.lines[0].get_ydata() == pytest.approx([0.7, *tops[2:7]])


def test_the_share_of_c_cross_is_drawn_with_its_sign(study):
    study.layers[0].values["theory.cross_share"][0] = -0.5
    drawn = cells(inline_svg(draw_maps(study, (CROSS,))[0].chart))
    red, _, blue = drawn["layer 0, head 0: −0.5"]
    assert blue > red
