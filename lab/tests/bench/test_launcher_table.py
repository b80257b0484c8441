"""The table of both launchers: how its cells come about."""

import json
from pathlib import Path

from lln_lab.benchmarks import host_calls
from lln_lab.benchmarks.launcher import RESULTS, launcher_table

ROOT = Path(__file__).parents[3]


def test_both_launchers_gave_the_same_bits():
    content = json.loads((ROOT / RESULTS).read_text("utf-8"))
    for runs in content["runs"].values():
        assert all(case.get("equal", True) for run in runs for case in run["cases"].values())
    assert {run["launcher"] for run in content["runs"]["compiled"]} == {"compiled"}


def test_cells_are_compared_with_the_best_softmax_of_any_process():
    times = {
        launcher: {f"{name} 512": [100.0 / share, 300.0 / share] for name in host_calls.TITLES}
        for launcher, share in (("python", 1), ("compiled", 2))
    }
    times["python"]["softmax 512"] = [20.0, 100.0]
    setup = {"device": "GPU", "torch": "2", "command": "make", "commit": "abc"}
    runs = {launcher: [{}] for launcher in times}
    content = {"times": times, "setup": setup, "runs": runs, "heads": 2, "width": 8}
    lines = launcher_table(content).splitlines()
    assert lines[2] == "| softmax (SDPA) | 20 / 100 | 20 / 100 |"
    assert lines[3] == "| LLN | 100 / 300 (5.0× / 3.0×) | 50 / 150 (2.5× / 1.5×) |"
    assert "One process with each launcher." in lines[-1]
    runs["python"], runs["compiled"] = [{}] * 3, [{}] * 2
    assert "The best of 2 processes with each launcher." in launcher_table(content)
