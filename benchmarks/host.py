"""What a call from Python costs the host at batch 1: ``python -m benchmarks.host``.

Short sequences take the GPU less time than Python takes to ask for them, so small batches wait for
the host. Times are those of calls one after the other that nothing waits for, at best, in several
processes; with ``--old SRC`` those of another source tree too, in turn on the same machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.markdown import fill, source, table
from benchmarks.two_trees import host_ms

COMMAND = "python -m benchmarks.host"
RESULTS, PAGE = Path("benchmarks/results/host.json"), Path("docs/benchmarks.md")
LENGTHS = (512, 2048)
HEADS, WIDTH = 12, 64
GIVEN = {"alpha": 2.0, "beta": 2.0}
TITLES = {
    "softmax": "softmax (SDPA)",
    "lln": "LLN",
    "lln matched": "LLN, matched",
    "lln_diag": "LLN + Diag",
    "lln_diag matched": "LLN + Diag, matched",
    "softmax causal": "softmax (SDPA), causal",
    "lln causal": "LLN, causal",
    "lln_diag causal": "LLN + Diag, causal",
}


def calls() -> dict[str, Callable[..., Any]]:
    """Name → the call."""
    from torch.nn.functional import scaled_dot_product_attention as softmax

    import lln

    causal = {"is_causal": True, **GIVEN}
    return {
        "softmax": softmax,
        "lln": lambda *sides: lln.lln_attention(*sides, **GIVEN),
        "lln matched": lln.lln_attention,
        "lln_diag": lambda *sides: lln.lln_diag_attention(*sides, **GIVEN),
        "lln_diag matched": lln.lln_diag_attention,
        "softmax causal": lambda *sides: softmax(*sides, is_causal=True),
        "lln causal": lambda *sides: lln.lln_attention(*sides, **causal),
        "lln_diag causal": lambda *sides: lln.lln_diag_attention(*sides, **causal),
    }


def measure() -> dict[str, list[float]]:
    """Microseconds forward, and forward and backward, of the tree on the path."""
    import torch

    found = {}
    for tokens in LENGTHS:
        for name, attend in calls().items():
            size = (1, HEADS, tokens, WIDTH)
            sides = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
            *inputs, sent = (side.requires_grad_(place < 3) for place, side in enumerate(sides))

            def forward(attend: Any = attend, inputs: Any = inputs) -> Any:
                with torch.no_grad():
                    return attend(*inputs)

            def both(attend: Any = attend, inputs: Any = inputs, sent: Any = sent) -> Any:
                return torch.autograd.grad(attend(*inputs), inputs, sent)

            found[f"{name} {tokens}"] = [1e3 * host_ms(forward), 1e3 * host_ms(both)]
    return found


def in_turn(trees: dict[str, Path], rounds: int) -> dict[str, dict[str, list[float]]]:
    """The best of several rounds for every tree, each in a process of its own."""
    script = "import json, sys; sys.path[:0] = sys.argv[1:3]; from benchmarks import host; "
    script += "json.dump(host.measure(), open(sys.argv[3], 'w'))"
    root = str(Path(__file__).parents[1])
    every: dict[str, list[dict[str, list[float]]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        for _ in range(rounds):
            for name, tree in trees.items():
                words = [str(tree), root, str(out)]
                subprocess.run([sys.executable, "-c", script, *words], check=True)
                every[name].append(json.loads(out.read_text("utf-8")))
    return {
        name: {
            case: [min(one[case][place] for one in found) for place in (0, 1)] for case in found[0]
        }
        for name, found in every.items()
    }


def host_table(content: dict) -> str:
    """Microseconds of every call, and of the older tree where it was timed."""
    times = content["times"]
    olds = times.get("old", {})
    heads = ["µs per call", *(f"N = {tokens:,}" for tokens in LENGTHS)]
    heads += [f"before, N = {tokens:,}" for tokens in LENGTHS] if olds else []
    lines = []
    for name, title in TITLES.items():
        cells = [times["new"].get(f"{name} {tokens}") for tokens in LENGTHS]
        cells += [olds.get(f"{name} {tokens}") for tokens in LENGTHS] if olds else []
        lines.append([title, *(f"{one[0]:.0f} / {one[1]:.0f}" if one else "" for one in cells)])
    setup = content["setup"]
    caption = (
        "Host time of a call from Python, forward / forward and backward; batch 1, "
        f"{HEADS} heads of {WIDTH}, bfloat16. The best of {content['rounds']} processes. "
        f"{setup['device']}, torch {setup['torch']}; {source(setup)}."
    )
    if olds:
        caption += f" *Before* is commit `{content['old']}`, timed in turn on the same machine."
    return table(heads, lines, caption)


def main() -> None:
    """Measure on this machine, or write the table of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, help="the folder src of another version, timed too")
    parser.add_argument("--old-commit", default="", help="its commit, for the table")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help=f"only write the table into {PAGE}")
    given = parser.parse_args()
    if given.report:
        fill(PAGE, "host-times", host_table(json.loads(RESULTS.read_text("utf-8"))))
        return
    from lln.files import compact_json, write_atomically
    from lln.studies.bench.environment import describe

    trees = {"new": Path(__file__).parents[1] / "src"}
    if given.old is not None:
        trees = {"old": given.old, **trees}
    content: dict[str, Any] = {"setup": describe("cuda", COMMAND), "rounds": given.rounds}
    content |= {"old": given.old_commit, "times": in_turn(trees, given.rounds)}
    write_atomically(given.out, compact_json(content))
    print(host_table(content))


if __name__ == "__main__":
    main()
