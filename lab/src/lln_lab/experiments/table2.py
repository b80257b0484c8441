"""Table 2: memory and time of a training step of RoBERTa-base.

Measured by ``lln bench roberta``, which trains nothing: there are no methods, tasks or seeds to
choose here. Results at the small scale are those of the benchmarks, unless there are others.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lln.checks.reading import read_json
from lln_lab.bench.result_rows import ROW_FORM
from lln_lab.bench.roberta_table import CELL_FORM, tables_of
from lln_lab.markdown import commit_of, table

NAME = "table2"
TITLE = "Table 2: memory and time of a training step of RoBERTa-base"
OPTIONS = {
    "smoke": ["--device", "cpu", "--lengths", "64", "128", "--layers", "2", "--seconds", "0.05"],
    "small": ["--tokens", "65536"],
    "full": [],
}
BENCHMARKS = Path("lab/results/benchmarks/roberta.json")
_FORM = {
    "environment": {"device": str, "commit": str, "command": str},
    "cases": [ROW_FORM | CELL_FORM],
}


def run_table2(scale: str, out: Path) -> int:
    """Measure what is missing; returns the exit status."""
    path = out / NAME / f"{scale}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    words = [
        sys.executable,
        "-m",
        "lln_lab",
        "bench",
        "roberta",
        *OPTIONS[scale],
        "--out",
        str(path),
    ]
    return subprocess.run(words + ["--resume"] * path.exists(), check=False).returncode


def report_table2(scale: str, out: Path) -> str:
    """The tables as Markdown; empty if nothing was measured."""
    own = out / NAME / f"{scale}.json"
    path = own if own.exists() or scale != "small" else BENCHMARKS
    if not path.exists():
        return ""
    results = read_json(path, _FORM, "a file of lln bench roberta", "measure it again")
    about = results["environment"]
    parts = [f"**{title}**\n\n{table(*found)}" for title, found in tables_of(results)]
    made = f"{about['device']}; {commit_of(about)}; made by {about['command']}."
    return f"### {TITLE} ({scale})\n\n" + "\n\n".join([*parts, made])
