"""RoBERTa-base at batch 1, attentions in turn: ``python -m lln_lab.benchmarks.roberta_turns``.

With batch 1 the host decides, and its speed changes from second to second. So all attentions are
built in one process and take turns of a few steps, and the best turn of each counts; a process for
each launcher (`lln build-launcher` and the one in Python), and one for models under
``torch.compile(mode="reduce-overhead")``, which replays CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from lln_lab.benchmarks.launcher import LAUNCHERS, build, used
from lln_lab.benchmarks.turns import in_own_process, in_turn
from lln_lab.markdown import source
from lln_lab.markdown import table as markdown_table

COMMAND = "python -m lln_lab.benchmarks.roberta_turns"
RESULTS = Path("lab/results/benchmarks/roberta-turns.json")
SYSTEMS = ("softmax_sdpa", "lln", "lln_diag", "diag")
LENGTHS = (512, 2048)
STEPS = 4
COMPILED = "reduce-overhead"
# What is measured: both launchers, and compiled models.
RUNS = (*LAUNCHERS, COMPILED)


def measure(lengths: tuple[int, ...], turns: int, mode: str | None) -> list[dict[str, Any]]:
    """Milliseconds of a step: the best and the middle of all turns.

    Args:
        lengths: N of every table.
        turns: Turns of every attention.
        mode: How models are compiled; None = not.
    """
    import torch

    from lln_lab.bench.roberta import SYSTEMS as ATTENTIONS
    from lln_lab.bench.roberta import RobertaSize, TrainingStep

    def milliseconds(training: Any, steps: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            training.step()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / steps

    rows = []
    for tokens in lengths:
        trainings = {
            name: TrainingStep(RobertaSize(), ATTENTIONS[name][1], 1, tokens, "cuda", mode)
            for name in SYSTEMS
        }
        timed = {
            name: partial(milliseconds, training, STEPS) for name, training in trainings.items()
        }
        # The first turn compiles.
        for warm_up in timed.values():
            warm_up()
        rounds = in_turn(timed, math.inf, most=turns)
        times = {name: [found[name] for found in rounds] for name in SYSTEMS}
        for name, taken in times.items():
            row = {"system": name, "tokens": tokens, "best": min(taken), "median": median(taken)}
            rows.append(row)
            print(f"  {name} {tokens}: best {row['best']:.1f} ms, median {row['median']:.1f} ms")
            sys.stdout.flush()
    return rows


def turns_table(content: dict[str, Any]) -> str:
    """The best turn of every attention in every run, and as a multiple of SDPA's."""
    from lln_lab.bench.roberta import SYSTEMS as ATTENTIONS

    best = {
        (launcher, row["system"], row["tokens"]): row["best"]
        for launcher, run in content["runs"].items()
        for row in run["rows"]
    }
    lengths = sorted({tokens for _, _, tokens in best})
    runs = [name for name in RUNS if name in content["runs"]]
    lines = []
    for system in SYSTEMS:
        cells = []
        for tokens in lengths:
            for launcher in runs:
                own, peer = (best.get((launcher, n, tokens)) for n in (system, SYSTEMS[0]))
                if own is None or peer is None:
                    cells.append("")
                    continue
                ratio = "" if system == SYSTEMS[0] else f" ({own / peer:.2f}×)"
                cells.append(f"{own:.1f}{ratio}")
        lines.append([ATTENTIONS[system][0], *cells])
    heads = [f"{tokens:,} tokens, {name}" for tokens in lengths for name in runs]
    compiled = ""
    if COMPILED in runs:
        compiled = f' *{COMPILED}*: the model under `torch.compile(mode="{COMPILED}")`.'
    setup = content["setup"]
    caption = (
        "Milliseconds of a training step of RoBERTa-base, batch 1, launched one by one: the best "
        f"of {content['turns']} turns of {STEPS} steps, attentions in turn, and how many times "
        f"that is SDPA's beside it. *python* and *compiled* are the launchers.{compiled} "
        f"{setup['device']}, torch {setup['torch']}; {source(setup)}. An empty cell was not run."
    )
    return markdown_table(["ms per step", *heads], lines, caption)


def in_process(name: str, tokens: int, turns: int) -> dict[str, Any]:
    """What a process of its own measures at one length."""
    words = ["lln_lab.benchmarks.roberta_turns", "--turns", str(turns), "--lengths", str(tokens)]
    words += ["--mode", COMPILED] if name == COMPILED else []
    return in_own_process(words, {"LLN_LAUNCHER": "python" if name == "python" else None})


def main() -> None:
    """Measure with both launchers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS)
    parser.add_argument("--case", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case is not None:
        rows = measure(tuple(given.lengths), given.turns, given.mode)
        given.case.write_text(json.dumps({"rows": rows, "launcher": used()}), "utf-8")
        return
    from lln.files import write_atomically
    from lln.kernels.launching import compiled_launcher
    from lln_lab.bench.environment import describe
    from lln_lab.compact import compact_json

    setup = describe("cuda", f"{COMMAND} --turns {given.turns}")
    # Every run has its own.
    del setup["launcher"]
    content: dict[str, Any] = {"setup": setup, "turns": given.turns, "runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        if not compiled_launcher.library().exists():
            content["build"] = build(Path(folder))
        for name in given.runs:
            run = content["runs"].setdefault(name, {"rows": []})
            # A process per length: what was measured is kept if a later one is cut off.
            for tokens in given.lengths:
                print(f"{name}, {tokens:,} tokens", flush=True)
                found = in_process(name, tokens, given.turns)
                run["rows"] += found["rows"]
                run["launcher"] = found["launcher"]
                write_atomically(given.out, compact_json(content))
    print(turns_table(content))


if __name__ == "__main__":
    main()
