"""The table of the simulated training step."""

import json

from tests.pages import ROOT, needs_pages

from lln_lab.benchmarks.markdown import TABLES
from lln_lab.benchmarks.parallel_cost import RESULTS, cases, times_table


@needs_pages
def test_the_page_and_the_results_are_what_the_simulation_says():
    rows = cases()
    assert json.loads((ROOT / RESULTS).read_text("utf-8"))["cases"] == rows
    assert times_table(rows) in (ROOT / TABLES).read_text("utf-8")
