"""One long document, trained over processes on this machine.

    python -m lln_lab.benchmarks.parallel_training --ranks 1 2 3

Runs ``examples/context_parallel.py`` under ``torchrun`` with as many processes as told, each with
one thread, and compares the losses: however the document is divided, they are the same to rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from lln.files import write_atomically
from lln_lab.bench.environment import describe
from lln_lab.compact import compact_json
from lln_lab.markdown import source, table

RESULTS = Path("lab/results/benchmarks/parallel-training.json")
EXAMPLE = "examples/context_parallel.py"
TOKENS, STEPS = 131_072, 3
KINDS = ("lln", "lln_diag")


def train(kind: str, ranks: int) -> dict:
    """Losses by step, and seconds with the start of the processes."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", str(ranks), EXAMPLE, "--attention", kind]
    words += ["--tokens", str(TOKENS), "--batch", "1", "--steps", str(STEPS)]
    begun = time.perf_counter()
    done = subprocess.run(
        words,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{kind} on {ranks} ranks failed:\n{done.stderr[-2000:]}")
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    losses = [one["loss"] for one in told]
    seconds = round(time.perf_counter() - begun, 1)
    return {"kind": kind, "ranks": ranks, "losses": losses, "seconds": seconds}


def losses_table(content: dict) -> str:
    """The losses of every division, beside those of one process."""
    alone = {row["kind"]: row["losses"] for row in content["rows"] if row["ranks"] == 1}
    lines = []
    for row in content["rows"]:
        pairs = zip(row["losses"], alone[row["kind"]], strict=True)
        apart = max(abs(one - other) for one, other in pairs)
        losses = [f"{loss:.6f}" for loss in row["losses"]]
        lines.append([f"`{row['kind']}`", str(row["ranks"]), *losses, f"{apart:.1e}"])
    steps = [f"step {step + 1}" for step in range(content["steps"])]
    caption = (
        f"Loss of every step of a RoBERTa with 2 layers, 32 wide, on one document of "
        f"{content['tokens']:,} tokens, float32, and the largest difference from one process. "
        f"{content['setup']['device']}; {source(content['setup'])}."
    )
    return table(["attention", "ranks", *steps, "apart"], lines, caption)


def main() -> None:
    """Train, and keep the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3], help="1 is needed")
    given = parser.parse_args()
    rows = []
    for kind in KINDS:
        for ranks in given.ranks:
            rows.append(train(kind, ranks))
            print(rows[-1], flush=True)
    ranks = " ".join(map(str, given.ranks))
    command = f"python -m lln_lab.benchmarks.parallel_training --ranks {ranks}"
    content = {"setup": describe("cpu", command), "tokens": TOKENS, "steps": STEPS}
    write_atomically(RESULTS, compact_json({**content, "rows": rows}))


if __name__ == "__main__":
    main()
