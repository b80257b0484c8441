"""Tables of experiments in the docs are those their results give."""

import json
from pathlib import Path

from experiments.recovery_table import NAMES, recovery

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments/results/minilm_recovery.json"


def test_the_published_recovery_table_is_the_one_of_its_results():
    results = json.loads(RESULTS.read_text("utf-8"))
    assert recovery(results) in (ROOT / "docs/huggingface.md").read_text("utf-8")
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
