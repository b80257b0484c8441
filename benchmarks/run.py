"""Time every case on this machine: ``python -m benchmarks.run --help``.

A case whose error exceeds its budget is not timed. Results are written after every case, so Ctrl-C
leaves a valid file, and ``--resume`` goes on from it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch.utils.benchmark import Timer

from benchmarks.environment import describe
from benchmarks.registry import (
    GPU_OPERATIONS,
    OPERATIONS,
    UNITS,
    Case,
    Operation,
    cpu_cases,
    gpu_cases,
    make_inputs,
)
from lln.testing import budget, largest_error

CHECKED_TOKENS = 300


def main() -> None:
    """Parse the options, run, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=device)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DEVICE.json")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--seconds", type=float, default=1.0, help="least time a case, on the CPU")
    parser.add_argument("--lengths", type=int, nargs="+", help="only these sequence lengths")
    parser.add_argument("--resume", action="store_true", help="keep the cases already in --out")
    options = parser.parse_args()
    out = options.out or Path(f"benchmarks/results/{options.device}.json")
    on_gpu = options.device == "cuda"
    operations = GPU_OPERATIONS if on_gpu else OPERATIONS
    if not on_gpu:
        torch.set_num_threads(options.threads)
    cases = gpu_cases() if on_gpu else cpu_cases()
    if options.lengths:
        cases = [case for case in cases if case.tokens in options.lengths]
    results: dict[str, Any] = {"environment": describe(options.device), "cases": []}
    if options.resume and out.exists():
        results["cases"] = json.loads(out.read_text())["cases"]
    done = {row["name"] for row in results["cases"]}
    if on_gpu:
        results["copy_terabytes_per_second"] = copy_bandwidth()
    console = Console()
    errors = {name: check(operations[name], name, options.device) for name in operations}
    try:
        with Progress(console=console) as progress:
            task = progress.add_task("timing", total=len(cases))
            for case in cases:
                progress.update(task, description=case.name, advance=1)
                if case.name in done:
                    continue
                row = {"name": case.name, **asdict(case), **errors[case.operation]}
                if row["error"] <= row["allowed"]:
                    row |= measure(case, operations[case.operation], options)
                if on_gpu and case.operation in UNITS and "milliseconds" in row:
                    row["floors"] = row["milliseconds"] / floor(case, results)
                    if row["graph_milliseconds"] is not None:
                        row["graph_floors"] = row["graph_milliseconds"] / floor(case, results)
                results["cases"].append(row)
                save(out, results)
    except KeyboardInterrupt:
        console.print(f"Stopped; what was measured is in {out}.")
        raise SystemExit(130) from None
    console.print(f"Wrote {out}; python -m benchmarks.report draws it.")


def check(operation: Operation, name: str, device: str) -> dict[str, float]:
    """The operation's error against the float64 reference on a small odd shape."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    case = Case(name, 2, 3, CHECKED_TOKENS, 64, dtype, backward=False)
    inputs = make_inputs(case, device, seed=1)
    found = operation.run(*inputs)
    expected = operation.reference(*(tensor.double() for tensor in inputs))
    eager = expected.to(found.dtype) if device == "cuda" else None
    return {"error": largest_error(found, expected), "allowed": budget(found, expected, eager)}


def measure(case: Case, operation: Operation, options: argparse.Namespace) -> dict[str, Any]:
    """Median milliseconds of a call; on a GPU also the peak of memory beyond the inputs."""
    inputs = make_inputs(case, options.device)
    gradient = torch.randn_like(inputs[2])
    if case.backward:
        for tensor in inputs:
            tensor.requires_grad_()

    def call() -> None:
        if case.backward:
            torch.autograd.grad(operation.run(*inputs), inputs, gradient)
        else:
            with torch.no_grad():
                operation.run(*inputs)

    call()
    if options.device == "cpu":
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        return {"milliseconds": timer.blocked_autorange(min_run_time=options.seconds).median * 1e3}
    from triton.testing import do_bench

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    held = sum(tensor.nbytes for tensor in inputs)
    # What a call cannot do without: inputs and output, and with backward all their gradients.
    needed = held + gradient.nbytes
    if case.backward:
        needed *= 2
        held += gradient.nbytes
    milliseconds = do_bench(call, warmup=20, rep=60, return_mode="median")
    return {
        "milliseconds": milliseconds,
        "graph_milliseconds": time_graph(call),
        "memory_ratio": (peak + held) / needed,
    }


def time_graph(call: Callable[[], None]) -> float | None:
    """The same replayed as a CUDA graph: what the GPU takes, without Python launching it."""
    from triton.testing import do_bench

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        return None
    return do_bench(graph.replay, warmup=20, rep=60, return_mode="median")


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large copy, in TB/s: the measured floor."""
    from triton.testing import do_bench

    source = torch.randn(1 << 28, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    milliseconds = do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * source.nbytes / milliseconds / 1e9


def floor(case: Case, results: dict[str, Any]) -> float:
    """The least milliseconds that moving the case's tensors takes."""
    size = case.batch * case.heads * case.tokens * case.width * 2
    moved = UNITS[case.operation][case.backward] * size
    return moved / (results["copy_terabytes_per_second"] * 1e9)


def save(path: Path, results: dict[str, object]) -> None:
    """Write atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
