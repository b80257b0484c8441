"""Tables of experiments in the docs are those their results give."""

import json
from pathlib import Path

from lln_lab.benchmarks.markdown import TABLES
from lln_lab.experiments.cells import read_all
from lln_lab.experiments.gates import GATED, gate_of
from lln_lab.experiments.keys_table import conversion, decoder, selection
from lln_lab.experiments.recovery_table import NAMES, quality, recovery
from lln_lab.experiments.report import gates
from lln_lab.experiments.step_table import training_steps

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab/results/experiments/minilm_recovery.json"


def test_the_published_recovery_table_is_the_one_of_its_results():
    results, mixed, long = (
        json.loads(RESULTS.with_stem(f"minilm_recovery{name}").read_text("utf-8"))
        for name in ("", "_mixed", "_2048")
    )
    page = (ROOT / TABLES).read_text("utf-8")
    assert all(recovery(found) in page for found in (results, mixed, long))
    assert quality(results, mixed) in (ROOT / "README.md").read_text("utf-8")
    assert {name.split()[0] for name in results["rows"]} == NAMES.keys()


def test_cells_are_means_over_the_seeds():
    stages = ("converted", "layers", "output")
    setup = json.loads(RESULTS.read_text("utf-8"))["setup"] | {"documents": {"8": 5}}
    rows = {
        f"lln tokens=8 seed={seed}": {
            stage: {"8": {"cosine": 0.1 * place + 0.02 * seed, "spearman": 0.5}}
            for place, stage in enumerate(stages, 1)
        }
        for seed in (0, 1)
    }
    text = recovery({"setup": setup, "rows": rows})
    assert "| LLN | 2 | 0.110 → 0.210 → 0.310 ± 0.014 |" in text


def test_the_published_table_of_training_steps_is_the_one_of_its_results():
    results = json.loads((ROOT / "lab/results/experiments/roberta_step.json").read_text("utf-8"))
    assert training_steps(results) in (ROOT / "docs/huggingface.md").read_text("utf-8")


def test_training_steps_that_were_not_run_are_empty():
    results = json.loads((ROOT / "lab/results/experiments/roberta_step.json").read_text("utf-8"))
    rows = {
        "sdpa N=512": {"milliseconds": 30.0},
        "lln fixed N=512": {"milliseconds": 20.0},
        "lln fixed N=1024": {"milliseconds": 21.0},
    }
    lines = training_steps(results | {"rows": rows}).splitlines()
    assert lines[2] == "| softmax (SDPA) | 30 |  |"
    assert lines[3] == "| LLN, fixed statistics | 20 (1.50×) | 21 |"
    assert lines[4] == "| LLN, running |  |  |"


def test_the_published_tables_of_exact_keys_are_those_of_their_results():
    for name, write, page in (
        ("keys_prototype", selection, "exact_keys.md"),
        ("keys_conversion", conversion, "exact_keys.md"),
        ("decoder_conversion", decoder, "tutorials/decoder.md"),
    ):
        results = json.loads((ROOT / f"lab/results/experiments/{name}.json").read_text("utf-8"))
        assert write(results) in (ROOT / "docs" / page).read_text("utf-8")


def test_the_published_gates_are_those_of_their_cells():
    found = json.loads((ROOT / "lab/results/experiments/gates.json").read_text("utf-8"))
    assert gates(found) in (ROOT / "docs/experiments.md").read_text("utf-8")
    cells = read_all(ROOT / "lab/results/experiments/cells", "gates", "gpu")
    for name, rule in GATED.items():
        own = [one for one in cells if one["cell"]["task"] == name]
        assert gate_of(rule, own) == found[name]


def test_conversions_that_were_not_run_are_empty():
    cell = {"cosine": 0.5, "error_of_mean": 0.001, "texts": 8}
    setup = {"calibration_texts": 2, "command": "c", "torch": "t", "commit": "x"}
    text = conversion({"setup": setup, "rows": {"keys 64": {"512": cell}}})
    assert "| 64 keys | 0.500 ± 0.001 |" in text
    assert "| 128 keys |  |" in text
