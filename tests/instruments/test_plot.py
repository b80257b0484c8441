"""`seen.plot()`: the medians of a capture as maps that matplotlib draws."""

import math
import sys

import pytest
import torch

from lln.errors import BackendUnavailableError, InvalidInputError
from lln.instruments.measurements import Measurement, Measurements

pytest.importorskip("matplotlib")


def measured(heads=3, **values):
    """Two layers, the second with one head less, two samples each."""
    calls = []
    for layer, count in (("first", heads), ("second", heads - 1)):
        numbers = {
            name: torch.full((2, count), value, dtype=torch.float64)
            + torch.arange(count, dtype=torch.float64)
            for name, value in values.items()
        }
        calls.append(Measurement(layer, 0, "softmax", 8, 8, values=numbers))
    return Measurements(calls)


def maps(figure):
    """Title → the map's axes, without the scales of colours."""
    return {axes.get_title(): axes for axes in figure.axes if axes.get_title()}


def test_every_instrument_has_a_map_with_its_medians():
    found = measured(entropy=1.25, spectral_gap=0.5)
    drawn = maps(found.plot())
    assert set(drawn) == {"entropy", "spectral_gap"}
    axes = drawn["entropy"]
    shown = axes.images[0].get_array().filled(math.nan)
    assert shown[0].tolist() == list(found.medians("entropy")["first"].values())
    assert shown[1, :2].tolist() == list(found.medians("entropy")["second"].values())
    assert math.isnan(shown[1, 2])
    assert [text.get_text() for text in axes.texts] == ["1.25", "2.25", "3.25", "1.25", "2.25", "–"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "second"]


def test_the_scale_of_colours_is_read_as_it_stands():
    nearly_equal = measured(entropy=5.9995)
    for call in nearly_equal.calls:
        call.values["entropy"] = 5.9995 + 1e-4 * (call.values["entropy"] - 5.9995)
    figure = nearly_equal.plot()
    figure.draw_without_rendering()
    scale = next(axes for axes in figure.axes if not axes.get_title())
    assert scale.yaxis.get_offset_text().get_text() == ""
    assert scale.get_ylabel() == "bits"


def test_extremes_do_not_set_the_colours():
    found = measured(heads=6, entropy=1.0)
    found.calls[0].values["entropy"][:, 2] = math.inf
    found.calls[1].values["entropy"][:, 2] = 1e6
    (axes,) = maps(found.plot()).values()
    assert axes.images[0].get_clim() == (1.0, 6.0)
    assert "inf" in [text.get_text() for text in axes.texts]


def test_many_heads_have_colours_without_numbers():
    (axes,) = maps(measured(heads=40, entropy=1.0).plot()).values()
    assert not axes.texts
    assert axes.images[0].get_array().shape == (2, 40)


@pytest.mark.parametrize(("name", "start"), [("a/b.png", b"\x89PNG"), ("b.SVG", b"<?xml")])
def test_it_is_saved_where_asked(tmp_path, name, start):
    figure = measured(entropy=1.0).plot(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)
    assert figure.axes


def test_what_cannot_be_drawn_is_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(InvalidInputError, match="nothing was measured"):
        Measurements().plot()
    with pytest.raises(InvalidInputError, match=r"got 'b.txt'; there are .*png"):
        measured(entropy=1.0).plot(tmp_path / "b.txt")
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'lln\[instruments\]'"):
        measured(entropy=1.0).plot()
