"""The results of the simulated training step are what the simulation says."""

import json

from tests.pages import ROOT, needs_pages

from lln_lab.benchmarks.parallel_cost import RESULTS, cases


@needs_pages
def test_the_results_are_what_the_simulation_says():
    assert json.loads((ROOT / RESULTS).read_text("utf-8"))["cases"] == cases()
