"""The report: sections filled from results, targets met or missed, cells not run left empty."""

from pathlib import Path

from lln_lab.documents.speed_tables import (
    cpu_table,
    fla_table,
    gpu_other_table,
    gpu_table,
    roberta_summary,
    roberta_table,
    speed_summary,
    trees_table,
)
from lln_lab.documents.study_sections import gate_rows
from lln_lab.documents.targets import TARGETS, targets_table
from lln_lab.markdown import source

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {
    "device": "a GPU",
    "threads": 2,
    "torch": "2.11",
    "triton": "3.6",
    "command": "lln bench",
    "commit": "0123456789abcdef",
}
# Milliseconds of one unit at this copy speed: 65,536 · 12 · 64 bfloat16 numbers.
COPY = 4.0
UNIT = 65536 * 12 * 64 * 2 / (COPY * 1e9)
UNITS = {"lln": (4, 11), "lln_diag": (6, 15), "lln_diag_64": (6, 15), "lln_matched": (6, 13)}


def row(operation, tokens, milliseconds, backward=False, python=None, **rest):
    found = {
        "name": f"{operation} {tokens} {backward} {rest.get('width')}",
        "operation": operation,
        "batch": 65536 // tokens,
        "heads": 12,
        "tokens": tokens,
        "width": 64,
        "dtype": "bfloat16",
        "backward": backward,
        "status": "timed",
        "graph_milliseconds": milliseconds,
        "milliseconds": milliseconds if python is None else python,
        "memory_ratio": 1.05,
    }
    if operation in UNITS and milliseconds is not None:
        floor = UNITS[operation][backward] * UNIT
        found |= {"graph_floors": milliseconds / floor, "floors": found["milliseconds"] / floor}
    return found | rest


def results(*cases):
    return {
        "environment": ENVIRONMENT,
        "copy_terabytes_per_second": COPY,
        "cases": list(cases),
    }


def verdicts(*cases):
    table = targets_table(results(*cases))
    lines = [line.split("|")[1:-1] for line in table.splitlines()[2 : 2 + len(TARGETS)]]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}


def test_targets_are_met_or_missed_by_the_worst_length():
    found = verdicts(
        row("lln", 512, 4.4 * UNIT, python=8 * UNIT),
        row("lln", 1024, 5.2 * UNIT, python=5.2 * UNIT),
        row("lln_diag", 512, 6.6 * UNIT),
        row("lln_diag", 1024, 9.0 * UNIT),
    )
    assert found["LLN forward ≤ 1.35 floors"] == ["1.30", "met", "2.00", "missed"]
    assert found["LLN + Diag forward ≤ 1.4 floors"] == ["1.50", "missed", "1.50", "missed"]


def test_matching_is_measured_in_units_of_time():
    name = "matching on the fly adds ≤ 3 units"
    cases = [row("lln", 512, 5 * UNIT), row("lln", 512, 12 * UNIT, backward=True)]
    cases += [row("lln_matched", 512, 7.5 * UNIT)]
    assert verdicts(*cases)[name][:2] == ["2.5 units", "met"]
    cases += [row("lln_matched", 512, 15.5 * UNIT, backward=True)]
    assert verdicts(*cases)[name][:2] == ["3.5 units", "missed"]


def test_rivals_are_judged_at_the_lengths_that_are_asked():
    found = verdicts(
        row("sdpa_flash", 512, 2.0),
        row("sdpa_cudnn", 512, 1.0),
        row("lln_diag", 512, 0.8),
        row("sdpa_cudnn_causal", 1024, 1.0),
        row("lln_causal", 1024, 2.0),
        row("sdpa_cudnn_causal", 2048, 2.0),
        row("lln_causal", 2048, 1.6),
        row("fla_causal", 2048, 1.6),
    )
    assert found["LLN + Diag faster than the best softmax from N = 512"][:2] == ["1.25×", "met"]
    causal = found["causal LLN faster than the best causal softmax from N = 2,048"]
    assert causal[:2] == ["1.25×", "met"]
    assert found["causal LLN no slower than fla's `chunk_linear_attn`"][:2] == [
        "1.00 of its time",
        "met",
    ]


def test_the_backward_of_causal_blocks_is_compared_with_causal_lln():
    name = "… its backward pass ≤ 1.4 × causal LLN's"
    cases = [row("lln_causal", 512, 1.0), row("lln_causal", 512, 3.0, backward=True)]
    cases += [row("lln_diag_causal", 512, 2.0), row("lln_diag_causal", 1024, 9.0)]
    assert verdicts(*cases)[name] == ["", "", "", ""]
    cases.append(row("lln_diag_causal", 512, 5.0, backward=True))
    assert verdicts(*cases)[name][:2] == ["1.50 of its time", "missed"]


def test_fla_is_compared_within_its_own_run():
    own = results(row("lln_causal", 512, 1.0), row("fla_causal_raw", 512, 2.0))
    fla = results(row("lln_causal", 512, 3.0), row("fla_causal_raw", 512, 4.0))
    name = "… nor than 1.1 × its sums alone, without normaliser"
    for given, expected in (((own, fla), "0.75"), ((own,), "0.50")):
        (line,) = [line for line in targets_table(*given).splitlines() if name in line]
        assert f"| {expected} of its time | met |" in line
    lines = fla_table(fla).splitlines()
    # No column for what was not run.
    assert lines[0] == "| N | LLN | fla, sums alone |"
    assert lines[2] == "| 512 | 3.000 | 4.000 (0.75) |"
    both = results(*fla["cases"], row("lln_causal", 512, 5.0, backward=True))
    assert fla_table(both).splitlines()[0] == "| N | LLN | fla, sums alone | LLN, fwd+bwd |"


def test_two_trees_are_compared_call_by_call():
    def times(factor):
        names = (
            "graph lln_diag_64 D = 32 4096",
            "host lln matched 512",
            "graph softmax causal 512",
        )
        both = [(name, what) for name in names for what in ("forward", "forward + backward")]
        return {f"{name} {what}": factor * (1 + k / 4) for k, (name, what) in enumerate(both)}

    found = trees_table(
        {
            "device": "a GPU",
            "torch": "2.11",
            "command": "python -m lln_lab.benchmarks.two_trees OLD/src NEW/src",
            "commits": ["0123456", "789abcd"],
            "milliseconds": {"old": times(2.0), "new": times(1.0)},
        }
    ).splitlines()
    assert found[2:5] == [
        "| LLN + Diag, blocks of 64, D = 32, N = 4,096 | GPU | 2.000 ms | 1.000 ms | 0.50 "
        "| 2.500 ms | 1.250 ms | 0.50 |",
        "| softmax, causal, N = 512 | GPU | 4.000 ms | 2.000 ms | 0.50 "
        "| 4.500 ms | 2.250 ms | 0.50 |",
        "| LLN, matched, N = 512 | host | 3000 µs | 1500 µs | 0.50 | 3500 µs | 1750 µs | 0.50 |",
    ]
    assert "commits `0123456` and `789abcd`" in found[-1]


def test_wide_and_narrow_heads_have_targets_of_their_own():
    cases = [row("lln", 512, 4.4 * UNIT), row("lln", 512, 9.0 * UNIT, width=128)]
    cases += [row("lln_diag_64", 512, 7.0 * UNIT, width=128), row("lln_diag", 512, 1.0, width=32)]
    found = verdicts(*cases)
    assert found["LLN forward ≤ 1.35 floors"][1] == "met"
    assert found["D = 128: LLN forward ≤ 1.5 floors"][1] == "missed"
    assert found["D = 128: LLN + Diag, blocks of 64, forward ≤ 1.6 floors"][1] == "met"
    assert found["D = 32: LLN forward ≤ 1.35 floors"] == ["", "", "", ""]


def test_memory_is_judged_with_the_backward():
    name = "LLN memory, fwd + bwd, ≤ 1.1 × tensors"
    cases = [row("lln", 512, 1.0, memory_ratio=3.0)]
    assert verdicts(*cases)[name] == ["", "", "", ""]
    cases.append(row("lln", 512, 1.0, backward=True, memory_ratio=1.2))
    assert verdicts(*cases)[name] == ["", "", "1.20", "missed"]


def test_other_widths_and_small_batches_do_not_count():
    cases = [row("lln", 512, 99.0, width=128), row("lln", 512, 99.0, batch=1)]
    assert verdicts(*cases)["LLN forward ≤ 1.35 floors"] == ["", "", "", ""]


def test_nothing_measured_is_neither_met_nor_missed():
    assert all(cells == ["", "", "", ""] for cells in verdicts().values())


def test_gpu_table_leaves_cells_that_were_not_run_empty():
    table = gpu_table(
        results(
            row("sdpa_cudnn", 512, 1.0),
            row("lln", 512, 0.5, python=0.8),
            row("lln_diag", 1024, None, status="out of memory"),
        )
    )
    lines = table.splitlines()
    first, second = lines[2], lines[3]
    assert first.startswith("| 512 | forward | 1.000 | 0.500 (2.0×; ")
    assert "0.800 (1.2×; " in first
    assert second == "| 1024 | forward |  |  | out of memory |  |  | out of memory |"
    assert "lln bench" in table
    assert "0123456789`" in table


def test_the_summary_shows_the_lengths_it_is_asked_for_beside_the_fastest_softmax():
    cases = [row("lln", tokens, 0.1, python=0.5) for tokens in (512, 1024, 2048)]
    cases += [row("sdpa_flash", 512, 0.2, python=2.0), row("sdpa_cudnn", 512, 0.3, python=1.5)]
    cases.append(row("lln_diag", 2048, None, status="out of memory"))
    lines = speed_summary(results(*cases), cases, (512, 2048), "as it was").splitlines()
    assert lines[2] == "| 512 | 1.50 | 0.50 (3.0×) |  |  |  |  |"
    assert lines[3] == "| 2,048 |  | 0.50 |  |  |  |  |"
    assert "as it was" in lines[-1]
    assert "0123456789`" in lines[-1]


def test_the_rest_of_the_gpu_run_has_a_table():
    table = gpu_other_table(
        results(
            row("lln", 512, 0.5),
            row("lln", 512, 0.5, width=128, graph_softmax_ratio=3.0),
            row("lln_causal", 2048, None, status="wrong"),
        )
    )
    assert len(table.splitlines()) == 4
    assert "| LLN | forward | 128 | 512 | 128 | 0.500 |" in table
    assert "3.00×" in table
    assert "wrong" in table


def test_cpu_table_has_speed_ups_only_beside_sdpa():
    cases = [row("sdpa", 128, 4.0), row("lln", 128, 2.0), row("lln", 256, 2.0)]
    lines = cpu_table(results(*cases)).splitlines()
    assert lines[2].startswith("| 128 | 4.0 | 2.0 (2.0×) |  |")
    assert lines[3].startswith("| 256 |  | 2.0 |  |")


def test_captions_say_which_launcher_was_used():
    environment = {"command": "lln bench", "commit": 40 * "a", "changed": False}
    assert source(environment) == source(environment | {"launcher": "python"})
    compiled = source(environment | {"launcher": "compiled"})
    assert compiled == f"made by `lln bench` with the compiled launcher, commit `{10 * 'a'}`"


def test_captions_say_whether_the_commit_is_what_ran():
    environment = {"command": "lln bench", "commit": 40 * "a", "changed": True}
    assert source(environment).endswith(f"commit `{10 * 'a'}`, with uncommitted changes in src")
    for unknown in (environment | {"changed": None}, {"command": "c", "commit": "a"}):
        assert source(unknown).endswith(", changes in src not recorded")


def test_roberta_table():
    cell = {"part": "batch 1", "system": "lln", "batch": 1, "tokens": 512, "status": "timed"}
    cell |= {"milliseconds": 25.2, "peak_bytes": 4.04e9}
    table = roberta_table(results(cell), "batch 1")
    assert "| GB, LLN | 4.0 |" in table
    assert "| ms, LLN | 25.2 |" in table
    assert roberta_table(results(), "filled") == "Not measured."


def test_roberta_summary_leaves_what_was_not_run_empty():
    def step(part, system, batch, milliseconds, tokens=512):
        cell = {"part": part, "system": system, "batch": batch, "tokens": tokens}
        return cell | {"status": "timed", "milliseconds": milliseconds}

    cells = [step("batch 1", "softmax_sdpa", 1, 20.0), step("batch 1", "lln", 1, 40.0)]
    cells += [step("filled", "softmax_sdpa", 64, 30.0), step("filled", "lln", 64, 15.0)]
    # One sequence may be longer than what the batches of many hold.
    cells.append(step("batch 1", "lln", 1, 900.0, tokens=1 << 20))
    graphs = [step("graph", "softmax_sdpa", 1, 9.0), step("graph", "lln", 1, 6.0)]
    one, other = results(*cells), results(*graphs)
    parts = [(one, "batch 1"), (other, "graph"), (one, "filled")]
    lines = roberta_summary(parts, (512, 1024)).splitlines()
    assert "| 32,768 tokens, N = 1,024 |" in lines[0]
    assert "| as a CUDA graph, N = 512 |" in lines[0]
    assert lines[2] == "| softmax (SDPA) | 20.0 |  | 9.0 |  | 30.0 |  |"
    assert lines[3] == "| LLN | 40.0 (0.50×) |  | 6.0 (1.50×) |  | 15.0 (2.00×) |  |"
    assert lines[5] == "| Diag alone |  |  |  |  |  |  |"


def test_rows_of_gates_are_those_that_were_trained():
    def cell(task, method, seed, loss):
        own = {"task": task, "method": method, "seed": seed}
        setup = {"device": "a GPU", "commit": 40 * "a", "changed": False}
        return {"cell": own, "loss": loss, "accuracy": 0.5, "curve": [], "setup": setup}

    softmax = [cell("table1", "softmax", seed, 2.0 + seed) for seed in range(2)]
    baseline = cell("table1", "majority", 0, 1.0)
    del baseline["curve"]
    assert gate_rows([*softmax, baseline]) == ""
    found = gate_rows([*softmax, baseline, cell("table1", "diag", 0, 3.0)])
    assert "| Softmax attention | 2 | 2.500 ± 0.707 | 50.0 ± 0.0 |" in found
    assert "| Block-diagonal attention | 1 | 3.000 | 50.0 |" in found
    assert "majority" not in found
