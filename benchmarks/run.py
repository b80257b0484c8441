"""Time every case on this machine: ``python -m benchmarks.run --help``.

A case whose error exceeds its budget is not timed. Results are written after every case, so Ctrl-C
leaves a valid file, and ``--resume`` goes on from it.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from torch.utils.benchmark import Timer

from benchmarks.environment import describe
from benchmarks.registry import OPERATIONS, Case, cpu_cases, make_inputs
from lln.testing import budget, largest_error

CHECKED_TOKENS = 300


def main() -> None:
    """Parse the options, run, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu.json"))
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--seconds", type=float, default=1.0, help="least time a case")
    parser.add_argument("--lengths", type=int, nargs="+", help="sequence lengths")
    parser.add_argument("--resume", action="store_true", help="keep the cases already in --out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases = cpu_cases(tuple(options.lengths)) if options.lengths else cpu_cases()
    results: dict[str, object] = {"environment": describe("cpu"), "cases": []}
    if options.resume and options.out.exists():
        results["cases"] = json.loads(options.out.read_text())["cases"]
    done = {row["name"]: row for row in results["cases"]}
    console = Console()
    errors = {name: check(name) for name in OPERATIONS}
    try:
        with Progress(console=console) as progress:
            task = progress.add_task("timing", total=len(cases))
            for case in cases:
                progress.update(task, description=case.name, advance=1)
                if case.name in done:
                    continue
                row = {"name": case.name, **asdict(case), **errors[case.operation]}
                if row["error"] <= row["allowed"]:
                    row["milliseconds"] = time_case(case, options.seconds)
                results["cases"].append(row)
                save(options.out, results)
    except KeyboardInterrupt:
        console.print(f"Stopped; what was measured is in {options.out}.")
        raise SystemExit(130) from None
    console.print(f"Wrote {options.out}; python -m benchmarks.report draws it.")


def check(operation: str) -> dict[str, float]:
    """The operation's error against the float64 reference on a small odd shape."""
    case = Case(operation, 2, 3, CHECKED_TOKENS, 64, "float32", backward=False)
    inputs = make_inputs(case, seed=1)
    found = OPERATIONS[operation].run(*inputs)
    expected = OPERATIONS[operation].reference(*(tensor.double() for tensor in inputs))
    return {"error": largest_error(found, expected), "allowed": budget(found, expected)}


def time_case(case: Case, seconds: float) -> float:
    """Median milliseconds of a call."""
    inputs = make_inputs(case)
    run = OPERATIONS[case.operation].run
    if case.backward:
        for tensor in inputs:
            tensor.requires_grad_()
        gradient = torch.randn_like(inputs[2])

        def call() -> None:
            torch.autograd.grad(run(*inputs), inputs, gradient)

    else:

        def call() -> None:
            with torch.no_grad():
                run(*inputs)

    call()
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=seconds).median * 1e3


def save(path: Path, results: dict[str, object]) -> None:
    """Write atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
