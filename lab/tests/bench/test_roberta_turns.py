"""The table of RoBERTa's steps in turn: how its cells come about."""

import json
from pathlib import Path

from lln_lab.benchmarks.roberta_turns import RESULTS, SYSTEMS, turns_table

ROOT = Path(__file__).parents[3]


def test_the_launchers_are_those_that_were_asked_for():
    content = json.loads((ROOT / RESULTS).read_text("utf-8"))
    assert content["runs"]["compiled"]["launcher"] == "compiled"
    assert content["runs"]["python"]["launcher"].startswith("python")


def test_cells_are_compared_with_softmax_of_the_same_process():
    def rows(times):
        return [
            {"system": name, "tokens": 512, "best": time, "median": 99.0}
            for name, time in zip(SYSTEMS, times, strict=True)
        ]

    runs = {"python": {"rows": rows([10, 20, 5, 15])}, "compiled": {"rows": rows([20, 20, 30, 10])}}
    setup = {"device": "GPU", "torch": "2", "command": "make", "commit": "abc"}
    lines = turns_table({"runs": runs, "turns": 3, "setup": setup}).splitlines()
    assert lines[0] == "| ms per step | 512 tokens, python | 512 tokens, compiled |"
    assert lines[2] == "| softmax (SDPA) | 10.0 | 20.0 |"
    assert lines[3] == "| LLN | 20.0 (2.00×) | 20.0 (1.00×) |"
    assert lines[4] == "| LLN + Diag | 5.0 (0.50×) | 30.0 (1.50×) |"


def test_what_was_cut_off_stays_empty():
    rows = [
        {"system": name, "tokens": tokens, "best": 4.0, "median": 9.0}
        for name in SYSTEMS
        for tokens in (512, 2048)
    ]
    runs = {"python": {"rows": rows}, "compiled": {"rows": [r for r in rows if r["tokens"] < 999]}}
    setup = {"device": "GPU", "torch": "2", "command": "make", "commit": "abc"}
    lines = turns_table({"runs": runs, "turns": 3, "setup": setup}).splitlines()
    assert lines[2] == "| softmax (SDPA) | 4.0 | 4.0 | 4.0 |  |"
    assert lines[3] == "| LLN | 4.0 (1.00×) | 4.0 (1.00×) | 4.0 (1.00×) |  |"


def test_compiled_models_have_a_column_where_they_were_measured():
    rows = [{"system": name, "tokens": 512, "best": 4.0, "median": 9.0} for name in SYSTEMS]
    runs = {name: {"rows": rows} for name in ("python", "compiled", "reduce-overhead")}
    setup = {"device": "GPU", "torch": "2", "command": "make", "commit": "abc"}
    table = turns_table({"runs": runs, "turns": 3, "setup": setup})
    assert table.splitlines()[0].endswith("| 512 tokens, compiled | 512 tokens, reduce-overhead |")
    assert 'torch.compile(mode="reduce-overhead")' in table
