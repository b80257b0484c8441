"""Ratios, and the figures drawn from results."""

import xml.etree.ElementTree as tree

import pytest

from lln_lab.bench.compare import add_ratios
from lln_lab.bench.speed_figure import draw_speed, main_series

ENVIRONMENT = {"device": "a GPU", "threads": 2, "torch": "2.11", "triton": "3.6"}


def row(operation, tokens, milliseconds, backward=False, batch=None, width=64, **rest):
    return {
        "operation": operation,
        "batch": 4096 // tokens if batch is None else batch,
        "heads": 12,
        "tokens": tokens,
        "width": width,
        "dtype": "bfloat16",
        "backward": backward,
        "milliseconds": milliseconds,
        "graph_milliseconds": milliseconds,
        "peak_bytes": 1000 * tokens,
        **rest,
    }


def results():
    cases = []
    for backward in (False, True):
        for tokens in (512, 1024, 2048, 4096):
            cases += [
                row("sdpa_flash", tokens, tokens / 256, backward),
                row("sdpa_cudnn", tokens, tokens / 512, backward),
                row("lln_matched", tokens, 3.0, backward),
                row("lln_diag", tokens, 0.5, backward),
                row("sdpa_cudnn_causal", tokens, tokens / 1024, backward),
                row("lln_causal", tokens, 9.0, backward),
                row("lln", tokens, 1.0, backward, batch=1),
            ]
    return {"environment": ENVIRONMENT, "cases": cases}


def test_ratios_are_to_the_fastest_softmax_of_the_same_job_and_shape():
    cases = [
        row("sdpa_flash", 512, 4.0),
        row("sdpa_cudnn", 512, 3.0),
        row("sdpa_cudnn_causal", 512, 1.0),
        row("lln", 512, 1.5),
        row("lln_compiled", 512, 6.0),
        row("lln_causal", 512, 0.5),
        row("fla_causal", 512, 0.25),
        row("lln", 1024, 1.5),
        row("lln", 512, 1.5, backward=True),
    ]
    add_ratios(cases)
    by_place = dict(enumerate(cases))
    assert by_place[3]["softmax_ratio"] == pytest.approx(2.0)
    assert by_place[3]["graph_compiled_ratio"] == pytest.approx(4.0)
    assert by_place[5]["softmax_ratio"] == pytest.approx(2.0)
    assert by_place[5]["fla_ratio"] == pytest.approx(0.5)
    assert "fla_ratio" not in by_place[6]
    assert by_place[6]["softmax_ratio"] == pytest.approx(4.0)
    for index in (0, 1, 7, 8):
        assert "softmax_ratio" not in by_place[index]


def test_one_curve_has_one_width_and_one_rule_for_the_batch():
    cases = results()["cases"] + [row("lln", 512, 1.0, width=128)]
    chosen = main_series(cases, "bidirectional")
    assert {r["width"] for r in chosen} == {64}
    assert {r["batch"] * r["tokens"] for r in chosen} == {4096}
    assert main_series([], "causal") == []


def test_figure_shows_time_and_memory_and_says_where_the_curves_cross(tmp_path):
    written = draw_speed(results(), tmp_path / "speed.svg")
    assert [path.suffix for path in written] == [".svg", ".png"]
    text = " ".join(tree.parse(written[0]).getroot().itertext())
    assert "LLN, moments matched: faster from N ≈ 1536" in text
    assert "LLN + Diag: faster at every N" in text
    assert "megabytes" in text
    assert "B·N = 4,096" in text
    causal = draw_speed(results(), tmp_path / "causal.svg", "causal")
    text = " ".join(tree.parse(causal[0]).getroot().itertext())
    assert "LLN, causal: not faster at N = 4096" in text
    # The same figure is the same file, so that a run of the report changes nothing.
    again = draw_speed(results(), tmp_path / "again.svg")
    assert written[0].read_bytes() == again[0].read_bytes()


def test_no_figure_without_rows(tmp_path):
    assert draw_speed({"environment": ENVIRONMENT, "cases": []}, tmp_path / "a.svg") == []
    untimed = [row("lln", 512, None, peak_bytes=None)]
    assert draw_speed({"environment": ENVIRONMENT, "cases": untimed}, tmp_path / "a.svg") == []
    assert not list(tmp_path.iterdir())
