"""Loss and entropy over fixed temperatures, lines for what is not fixed, and loss scales."""

import pytest

from lln_lab.experiments.temperature_figure import draw_temperatures, fixed_temperature


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("lln@statistics=fixed,alpha=2.5,beta=2.5+conv", 2.5),
        ("lln@statistics=fixed,alpha=2.5,beta=1.0", None),
        ("lln@matching=entropy+conv", None),
        ("softmax+conv", None),
    ],
)
def test_which_methods_are_fixed(method, expected):
    assert fixed_temperature(method) == expected


def test_the_figure_shows_the_grid_and_the_lines(tmp_path):
    def cell(method, seed, loss):
        observed = {"entropy": [[1, 9.0], [2, 8.0 + loss / 10]]}
        scales = [[1, 65536.0], [2, 32768.0]]
        found = {"loss": loss, "loss_scale": scales, "observed": observed}
        return {"cell": {"method": method, "seed": seed}, **found}

    cells = [
        cell(f"lln@statistics=fixed,alpha={alpha},beta={alpha}+conv", seed, 4 + alpha / 10)
        for alpha in (1.0, 2.0)
        for seed in (0, 1)
    ]
    cells += [cell("softmax+conv", 0, 4.0), cell("lln@matching=variance+conv", 0, 4.1)]
    svg, png = draw_temperatures(cells, tmp_path / "figure")
    text = svg.read_text("utf-8")
    assert png.read_bytes()[1:4] == b"PNG"
    scales = "loss scale of float16, 6 trainings"
    for words in ("α = β", "bits per row", "softmax", "LLN, variance matched", scales):
        assert words in text
    # Nothing is claimed of what was not run.
    assert "entropy matched" not in text
    assert "blocks of softmax" not in text
