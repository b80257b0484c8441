"""Printing an object that holds tensors takes a line, whatever they hold."""

import pytest
import torch

import lln
from lln import instruments
from lln.checks.call import Call
from lln.instruments.measurements import Measurement
from lln.instruments.observed_call import SeenCall
from lln.integrations.streaming import Past

KEY, VALUE = torch.randn(2, 2, 4, 64, 8).unbind()
SUMMARY = lln.KeySummary.of(KEY, VALUE, 2.0)


@pytest.mark.parametrize(
    ("thing", "parts"),
    [
        (SUMMARY, ("KeySummary(", "log_mass=float32[2, 4, 8]", "float32[2, 4, 8, 8]", "beta=2.0")),
        (lln.KeySummary.of(KEY, VALUE, torch.ones(4, 1, 1)), ("beta=float32[4, 1, 1]",)),
        (lln.KeySummary.empty(1, 2, 3, 4, 1.0, device="meta"), ("float32[1, 2, 3] on meta",)),
        (instruments.log_normality(KEY, KEY), ("LogNormality(", "float64[2, 4]")),
        (Call("lln", KEY, KEY, KEY), ("kind='lln'", "query=float32[2, 4, 64, 8]")),
        (SeenCall("a", 0, "lln", KEY, KEY, {"alpha": KEY}), ("{'alpha': float32[2, 4, 64, 8]}",)),
        (Measurement("a", 0, "lln", 64, 64, 0, {"ks": KEY}), ("{'ks': float32[2, 4, 64, 8]}",)),
        (Past(KEY), ("Past(log_mass=float32[2, 4, 64, 8]", "centroid=None")),
    ],
    ids=["summary", "beta", "meta", "log_normality", "call", "seen", "measurement", "past"],
)
def test_one_line_of_shapes(thing, parts):
    text = repr(thing)
    assert "\n" not in text
    assert "tensor(" not in text
    assert len(text) < 500
    assert str(thing) == text
    for part in parts:
        assert part in text, text


def test_a_capture_prints_how_much_it_saw():
    layer = lln.LLNAttention(32, 4, batch_first=True)
    with instruments.capture(layer, instruments="entropy") as seen:
        for _ in range(3):
            layer(torch.randn(1, 8, 32))
    assert repr(seen) == "capture(calls=3, layers=1)"
