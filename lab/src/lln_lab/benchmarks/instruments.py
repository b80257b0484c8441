"""Time, memory and accuracy of the instruments: ``python -m lln_lab.benchmarks.instruments``.

Writes ``lab/results/benchmarks/instruments.json``. Spectral gaps are compared with all eigenvalues
of the dense matrix in the same run. Every long sequence runs in a process of its own, so that its
peak memory can be seen.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lln import instruments, match_moments, reference
from lln.files import write_atomically
from lln_lab.bench.environment import describe

RESULTS = Path("lab/results/benchmarks/instruments.json")
LONG = 32768
LONG_CASES = (
    ("spectral_gap", "lln"),
    ("spectral_gap", "lln_diag"),
    ("variance", "lln"),
    ("score_variance", "softmax"),
    ("entropy", "softmax"),
    ("entropy", "lln"),
    ("log_normality", "softmax"),
)


def main() -> None:
    """Run everything, or one case of a long sequence in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs=2, metavar=("INSTRUMENT", "KIND"), help="used internally")
    parser.add_argument("--tokens", type=int, default=LONG, help="of the long sequence")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(long_case(*options.case, options.tokens)))
        return
    # One thread for both sides: a few milliseconds of work gain nothing from more.
    torch.set_num_threads(1)
    environment = describe("cpu", "python -m lln_lab.benchmarks.instruments") | {
        "load_average": os.getloadavg()[0],
        "processors": os.cpu_count(),
    }
    results = {"environment": environment, "gaps": gaps(), "long": []}
    for name, kind in LONG_CASES:
        words = ["-m", "lln_lab.benchmarks.instruments", "--case", name, kind]
        words += ["--tokens", str(options.tokens)]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
        results["long"].append(json.loads(done.stdout))
        print(results["long"][-1], flush=True)
        write_atomically(RESULTS, json.dumps(results, indent=1) + "\n")


def gaps(tokens: int = 2048, width: int = 64) -> list[dict[str, object]]:
    """Spectral gap by our algorithms and by all eigenvalues of the same matrix."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, tokens, width, generator=generator)
    instruments.spectral_gap(query[..., :256, :], key[..., :256, :])
    rows = []
    for kind in ("lln", "softmax", "lln_diag"):
        seconds, found = timed(lambda k=kind: instruments.spectral_gap(query, key, kind=k).item())
        matrix = dense(kind, query, key)
        start = time.perf_counter()
        moduli = torch.linalg.eigvals(matrix).abs().sort(descending=True).values
        dense_seconds = time.perf_counter() - start
        rows.append(
            {
                "kind": kind,
                "tokens": tokens,
                "width": width,
                "gap": found,
                "error": abs(found - (1 - moduli[1].item())),
                "seconds": seconds,
                "dense_seconds": dense_seconds,
                "times_faster": dense_seconds / seconds,
            }
        )
        print(rows[-1], flush=True)
    return rows


def timed(measure: Callable[[], float], repeats: int = 5) -> tuple[float, float]:
    """Median seconds, and the result."""
    seconds = []
    found = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        found = measure()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), found


def dense(kind: str, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """P by the paper's equations, float64."""
    scores = reference.log_softmax_kernel(query, key)[0, 0]
    if kind == "softmax":
        return reference.normalise(scores)
    alpha, beta = (side.double() for side in match_moments(query, key))
    long_range = reference.normalise(reference.log_lln_kernel(query, key, alpha, beta))[0, 0]
    if kind == "lln":
        return long_range
    blocks = reference.block_keep(query.shape[2], query.shape[3])
    return (long_range + reference.normalise(scores, blocks)) / 2


def long_case(name: str, kind: str, tokens: int, width: int = 64) -> dict[str, object]:
    """One head of a long sequence: seconds, and the peak memory of this process."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, tokens, width, generator=generator)
    start = time.perf_counter()
    found = getattr(instruments, name)(query, key, kind=kind)
    seconds = time.perf_counter() - start
    first = found if isinstance(found, torch.Tensor) else found[0]
    return {
        "instrument": name,
        "kind": kind,
        "tokens": tokens,
        "width": width,
        "value": first.item(),
        "seconds": seconds,
        "peak_bytes": peak_bytes(),
    }


def peak_bytes() -> int:
    """Most memory this process has held; getrusage would count that of its parent as well."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not say how much memory a process has held")


if __name__ == "__main__":
    main()
