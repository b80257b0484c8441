"""Tables of experiments: how their cells come about."""

import json
from pathlib import Path

from lln_lab.experiments.cells import read_all
from lln_lab.experiments.gates import GATED, gate_of
from lln_lab.experiments.keys_table import conversion
from lln_lab.experiments.recovery_table import NAMES, recovery
from lln_lab.experiments.step_table import training_steps

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab/results/experiments/minilm_recovery.json"


def test_every_attention_that_was_recovered_has_a_name():
    results = json.loads(RESULTS.read_text("utf-8"))
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


def test_gates_are_those_of_their_cells():
    found = json.loads((ROOT / "lab/results/experiments/gates.json").read_text("utf-8"))
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
