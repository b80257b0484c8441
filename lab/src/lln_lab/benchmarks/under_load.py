"""Calls on a CPU beside other programs: ``python -m lln_lab.benchmarks.under_load``.

Quiet phases and phases with busy programs alternate; within a phase the calls take turns in a new
order every round, so that all of them see the same load: a scheduler gives less time to a program
that has just had much, so it matters which call comes before. A slow-down is the mean time of a
busy phase over that of the quiet phase before it, and the middle one of all pairs counts. PyTorch's
passes and the compiled ones have a process each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from lln_lab.benchmarks.turns import in_own_process, in_turn, milliseconds
from lln_lab.markdown import source, table

COMMAND = "python -m lln_lab.benchmarks.under_load"
RESULTS = Path("lab/results/benchmarks/under-load.json")
LENGTHS, HEADS, WIDTH = (256, 512, 2048), 12, 64
# Which passes compute: the environment variable that decides it.
PASSES = {"plain": {"LLN_CPU": "torch"}, "compiled": {}}
TITLES = {
    "softmax": "softmax (SDPA)",
    "lln": "LLN",
    "lln_diag": "LLN + Diag",
    "softmax causal": "softmax (SDPA), causal",
    "lln causal": "LLN, causal",
}


def calls() -> dict[str, Callable[[], Any]]:
    """Name → a forward pass in float32, α and β given."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    import lln

    given, found = {"alpha": 2.0, "beta": 2.0}, {}
    for tokens in LENGTHS:
        sides = torch.randn(3, 1, HEADS, tokens, WIDTH).unbind()
        found |= {
            f"softmax {tokens}": partial(scaled_dot_product_attention, *sides),
            f"lln {tokens}": partial(lln.lln_attention, *sides, **given),
            f"lln_diag {tokens}": partial(lln.lln_diag_attention, *sides, **given),
            f"softmax causal {tokens}": partial(
                scaled_dot_product_attention, *sides, is_causal=True
            ),
            f"lln causal {tokens}": partial(lln.lln_attention, *sides, is_causal=True, **given),
        }
    return found


def phase(attentions: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Mean milliseconds of every call, in turns."""
    timed = {name: partial(milliseconds, call) for name, call in attentions.items()}
    rounds = in_turn(timed, seconds)
    return {name: mean(times[name] for times in rounds) for name in timed}


def measure(programs: int, seconds: float, pairs: int) -> list[dict[str, dict[str, float]]]:
    """Pairs of a quiet and a busy phase.

    Args:
        programs: How many busy programs.
        seconds: Length of a phase.
        pairs: How many pairs.
    """
    import torch

    found, attentions = [], calls()
    with torch.no_grad():
        phase(attentions, 1.0)
        for _ in range(pairs):
            quiet = phase(attentions, seconds)
            with ExitStack() as stack:
                for _ in range(programs):
                    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                    stack.callback(busy.wait)
                    stack.callback(busy.kill)
                # Until they are at work.
                time.sleep(0.5)
                found.append({"quiet": quiet, "busy": phase(attentions, seconds)})
    return found


def slow_downs(pairs: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """The middle slow-down of every call."""
    return {
        name: median(pair["busy"][name] / pair["quiet"][name] for pair in pairs)
        for name in pairs[0]["quiet"]
    }


def load_table(content: dict[str, Any]) -> str:
    """Quiet time and slow-down of every call, with both kinds of passes."""
    lines, runs = [], content["runs"].values()
    known = {case for run in runs for pair in run["pairs"] for case in pair["quiet"]}
    for tokens in sorted({int(case.split()[-1]) for case in known}):
        for name, title in TITLES.items():
            cells, case = [], f"{name} {tokens}"
            for run in runs:
                quiet = median(pair["quiet"][case] for pair in run["pairs"])
                cells += [f"{quiet:.1f}", f"{slow_downs(run['pairs'])[case]:.2f}"]
            lines.append([f"{title}, N = {tokens:,}", *cells])
    setup = content["setup"]
    heads = [f"{head}, {name}" for name in content["runs"] for head in ("quiet ms", "slow-down")]
    caption = (
        f"A forward pass, float32, B = 1, H = {HEADS}, D = {WIDTH}, α and β given: "
        "milliseconds when nothing else runs, and how many times as long it takes beside "
        f"{content['programs']} programs that never rest. {content['pairs']} pairs of phases of "
        f"{content['seconds']:g} s. {setup['device']}, {setup['threads']} threads, torch "
        f"{setup['torch']}; {source(setup)}."
    )
    return table(["call", *heads], lines, caption)


def main() -> None:
    """Measure with both kinds of passes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, help="busy programs; default: one per core")
    parser.add_argument("--seconds", type=float, default=12.0, help="length of a phase")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of a quiet and a busy phase")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--case", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    programs = given.programs or len(os.sched_getaffinity(0))
    if given.case is not None:
        found = measure(programs, given.seconds, given.pairs)
        from lln.cpu import library

        used = library.why_not() or "compiled"
        given.case.write_text(json.dumps({"pairs": found, "passes": used}), "utf-8")
        return
    from lln.cpu import building
    from lln.files import write_atomically
    from lln_lab.bench.environment import describe
    from lln_lab.compact import compact_json

    words = [f"--{name} {getattr(given, name):g}" for name in ("seconds", "pairs")]
    setup = describe("cpu", " ".join([COMMAND, *words]))
    sizes = {"programs": programs, "seconds": given.seconds, "pairs": given.pairs}
    content: dict[str, Any] = {"setup": setup, **sizes, "runs": {}}
    has_both = building.LIBRARY.exists()
    for name, environment in PASSES.items():
        if name == "compiled" and not has_both:
            print("Without compiled passes: `make setup` makes them.")
            continue
        options = [f"--{option}={number}" for option, number in sizes.items()]
        words = ["lln_lab.benchmarks.under_load", *options]
        content["runs"][name] = in_own_process(words, environment)
        write_atomically(given.out, compact_json(content))
        for call, ratio in slow_downs(content["runs"][name]["pairs"]).items():
            print(f"{name:10s} {call:16s} {ratio:.2f} times as long")


if __name__ == "__main__":
    main()
