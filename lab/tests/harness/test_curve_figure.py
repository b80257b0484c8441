"""Curves of finished cells: the mean over seeds, one line per method, a panel per kind of curve."""

import re

from lln_lab.experiments.curve_figure import draw_curves


def cell(method, seed, losses, temperatures=None):
    found = {"cell": {"method": method, "task": "mlm", "seed": seed}}
    found["curve"] = [[10 * (step + 1), loss] for step, loss in enumerate(losses)]
    if temperatures is not None:
        found["observed"] = {"temperature": [[10, one] for one in temperatures]}
    return found


def drawn(cells, path):
    svg, png = draw_curves(cells, path)
    assert png.read_bytes()[1:4] == b"PNG"
    return svg.read_text("utf-8")


def test_a_panel_for_every_kind_of_curve(tmp_path):
    cells = [cell("softmax", seed, [5.0 + seed, 4.0], [1.0]) for seed in range(2)]
    cells += [cell("performer", 0, [6.0, 5.5])]
    text = drawn(cells, tmp_path / "all")
    assert len(set(re.findall(r'id="(axes_\d+)"', text))) == 2
    for words in ("loss, nats", "temperature, median of all heads", "training steps"):
        assert words in text
    # In the legend once, however many panels show it.
    assert text.count("Softmax attention") == 1
    assert text.count("Performer (FAVOR+)") == 1


def test_no_panel_without_points(tmp_path):
    text = drawn([cell("diag", 0, [3.0, 2.0], [None])], tmp_path / "one")
    assert len(set(re.findall(r'id="(axes_\d+)"', text))) == 1
    assert "temperature" not in text
