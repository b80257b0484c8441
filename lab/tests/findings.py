"""What tests of the findings share: the rows of the cells, and the text that has to agree.

Every sentence is looked for on its page with the numbers that the cells give, so neither can change
without the other.
"""

import json
import statistics
from functools import cache
from pathlib import Path

from lln_lab.experiments.cells import read_all
from lln_lab.experiments.report_page import BASELINES

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab/results/experiments"


@cache
def page(name="docs/findings.md"):
    """The text on one line: where it is wrapped does not matter."""
    return " ".join((ROOT / name).read_text("utf-8").split())


@cache
def cells(name, folder="cells"):
    found = {}
    for one in read_all(RESULTS / folder, name, "small"):
        place = one["cell"]
        found.setdefault((place["task"], place["method"]), {})[place["seed"]] = one
    return found


def values(name, task, method, measure="accuracy"):
    return [one[measure] for _, one in sorted(cells(name)[task, method].items())]


def mean(*of, **measure):
    return statistics.mean(values(*of, **measure))


def spread(*of):
    return statistics.stdev(values(*of))


def percent(*of, digits=1, **measure):
    return f"{100 * mean(*of, **measure):.{digits}f}"


def behind(name, task, method, other):
    """By how many nats a row is behind another, lowest and highest over the seeds."""
    pairs = zip(*(values(name, task, one, "loss") for one in (method, other)), strict=True)
    found = [one - two for one, two in pairs]
    return min(found), max(found)


def methods(name, task):
    return [method for where, method in cells(name) if where == task]


def ranked(name, task):
    """Methods by their mean, the best first."""
    return sorted(methods(name, task), key=lambda method: -mean(name, task, method))


@cache
def baseline(place, name, measure="accuracy"):
    return json.loads(BASELINES.read_text("utf-8"))["rows"][place][name][measure]


def says(*sentences, name="docs/findings.md"):
    for sentence in sentences:
        assert sentence in page(name), sentence
