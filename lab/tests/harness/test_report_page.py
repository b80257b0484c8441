"""The report: charts in the order of the tasks, to the last step; costs with their units."""

import json

from lln_lab.experiments.catalogue import EXPERIMENTS
from lln_lab.experiments.cost import cost_table
from lln_lab.experiments.report_page import charts_of, made_by, section


def test_charts_come_in_the_order_of_the_tasks_and_show_the_last_step():
    def cell(task):
        curve = [[500, 3.0], [1000, 2.0]]
        return {"cell": {"method": "lln", "task": task, "seed": 0}, "curve": curve}

    charts = charts_of({"second": [cell("second")], "first": [cell("first")], "empty": []})
    assert [chart["task"] for chart in charts] == ["second", "first"]
    assert "1,000" in charts[0]["svg"]


def test_costs_have_their_units_in_the_caption(tmp_path):
    setup = {"device": "a GPU", "commit": "0123456789abcdef", "changed": False}
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
    assert "a GPU; commit 0123456789; 0 of 3 measurements from a tree with" in text
    assert "; made by python -m lln_lab.experiments time lra --scale small." in text
    assert cost_table(EXPERIMENTS["lra"], "full", tmp_path) == ""


def finished(task, seed, changed, **measures):
    setup = {"device": "a GPU", "commit": f"{seed}123456789abcdef", "changed": changed}
    place = {"method": "softmax", "task": task, "seed": seed}
    return {"cell": place, "seconds": 90, "setup": setup, **measures}


def test_a_table_says_how_many_of_its_cells_no_commit_holds():
    cells = [finished("cats_dogs", seed, seed > 0, accuracy=0.5) for seed in range(3)]
    text = made_by(EXPERIMENTS["table3"], "smoke", cells)
    assert "3 cells, 4 minutes of training in all. a GPU; seeds 0, 1, 2; " in text
    assert "commit 0123456789, 1123456789, 2123456789; 2 of 3 cells from a tree with" in text
    assert "uncommitted changes in src; made by python -m lln_lab.experiments run table3" in text
    cells[0]["setup"]["changed"] = None
    text = made_by(EXPERIMENTS["table3"], "smoke", cells)
    assert "changes in src, not recorded for 1; made by" in text


def test_qqp_and_mrpc_show_accuracy_whatever_their_score_once_was():
    cells = [finished("qqp", seed, False, score=0.9, f1=0.66, accuracy=0.7) for seed in range(2)]
    lines = section(EXPERIMENTS["table1"], "small", cells).splitlines()
    assert lines[0] == "| attention | seeds | qqp | qqp, F1 |"
    assert lines[2] == "| Softmax attention | 2 | 70.0 ± 0.0 | 66.0 ± 0.0 |"
    assert "accuracy, F1, in percent; 2 cells" in lines[-1]
