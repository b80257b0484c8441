"""The report: charts in the order of the tasks, to the last step; costs with their units."""

import json

from experiments.catalogue import EXPERIMENTS
from experiments.cost import cost_table
from experiments.report_page import charts_of


def test_charts_come_in_the_order_of_the_tasks_and_show_the_last_step():
    def cell(task):
        curve = [[500, 3.0], [1000, 2.0]]
        return {"cell": {"method": "lln", "task": task, "seed": 0}, "curve": curve}

    charts = charts_of({"second": [cell("second")], "first": [cell("first")], "empty": []})
    assert [chart["task"] for chart in charts] == ["second", "first"]
    assert "1,000" in charts[0]["svg"]


def test_costs_have_their_units_in_the_caption(tmp_path):
    setup = {"device": "a GPU", "commit": "0123456789abcdef"}
    costs = {
        "text": {
            "lln": {"milliseconds": 1.54, "peak_mib": 2048, "batch": 4, "setup": setup},
            "softmax": {"milliseconds": 2.0, "peak_mib": None, "batch": 4, "setup": setup},
        },
        "image": {"lln": {"milliseconds": 3.0, "peak_mib": 5, "batch": 4, "setup": setup}},
    }
    path = tmp_path / "lra" / "small-costs.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"costs": costs}), "utf-8")
    text = cost_table(EXPERIMENTS["lra"], "small", tmp_path)
    assert "| Linear Log-Normal attention | 1.5 / 2,048 | 3.0 / 5 |" in text
    # Not measured = empty.
    assert "| Softmax attention | 2.0 |  |" in text
    assert "Milliseconds of a training step / MiB of peak memory" in text
    assert "a GPU; commit 0123456789; made by python -m experiments time lra --scale small." in text
    assert cost_table(EXPERIMENTS["lra"], "full", tmp_path) == ""
