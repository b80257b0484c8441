"""The compiled launcher against the one in Python: ``python -m lln_lab.benchmarks.launcher``.

Builds the launcher into a temporary folder, runs its tests on this GPU, compares the bits of both
launchers, and measures the host time of calls at batch 1: calls one after the other that nothing
waits for, each launcher in processes of its own, in turn, beside SDPA. What is known so far is
written after every step, so that a run that ends early leaves a file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lln_lab.benchmarks import host_calls
from lln_lab.benchmarks.call_times import host_ms
from lln_lab.benchmarks.turns import forward_and_both, in_own_process
from lln_lab.markdown import source
from lln_lab.markdown import table as markdown_table

COMMAND = "python -m lln_lab.benchmarks.launcher"
RESULTS = Path("lab/results/benchmarks/launcher.json")
ROOT = Path(__file__).parents[4]
LAUNCHERS = ("python", "compiled")
TESTS = ("-m", "pytest", "-q", "-m", "not slow", "tests/kernels/launching/test_launcher.py")


def measure(lengths: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Microseconds forward, and forward and backward, of the launcher that is in use.

    Before that: whether later calls give the bits of the first one, which took the long way.
    """
    import torch

    found: dict[str, dict[str, Any]] = {}
    for tokens in lengths:
        for name, attend in host_calls.calls().items():
            size = (1, host_calls.HEADS, tokens, host_calls.WIDTH)
            generator = torch.Generator("cuda").manual_seed(0)
            how = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
            sides = [torch.randn(size, **how) for _ in range(4)]
            *inputs, sent = (side.requires_grad_(place < 3) for place, side in enumerate(sides))

            both_calls = forward_and_both(attend, inputs, sent)
            equal = []
            for call in both_calls:
                first = call()
                later = [call() for _ in range(3)]
                pairs = [pair for sides in later for pair in zip(sides, first, strict=True)]
                equal.append(all(torch.equal(*pair) for pair in pairs))
            # Nothing else is in memory while calls are timed.
            del first, later, pairs
            case: dict[str, Any] = {"us": [1e3 * host_ms(call) for call in both_calls]}
            if not name.startswith("softmax"):
                # Softmax may add up its gradients in any order.
                case["equal"] = all(equal)
            found[f"{name} {tokens}"] = case
            print(f"  {name} {tokens}: {case}", flush=True)
    return found


def used() -> str:
    """Which launcher this process has used, in words."""
    from lln.kernels.launching import compiled_launcher

    reason = compiled_launcher.why_not()
    return "compiled" if reason is None else f"python: {reason}"


def one_process(out: Path, lengths: tuple[int, ...]) -> None:
    """Measure in this process, with the launcher that the environment asks for."""
    content: dict[str, Any] = {"cases": measure(lengths), "launcher": used()}
    from lln.kernels.launching import compiled_launcher

    module = compiled_launcher._found
    content["kinds"] = module.known() if hasattr(module, "known") else 0
    out.write_text(json.dumps(content), "utf-8")


def build(folder: Path) -> dict[str, Any]:
    """Compile the launcher; how long that took, or why it failed."""
    os.environ["LLN_BUILD_FOLDER"] = str(folder)
    from lln.cli import launcher_build

    start = time.perf_counter()
    try:
        launcher_build.build()
        failure = None
    except Exception as error:  # The rest of the run says what Python takes.
        failure = f"{type(error).__name__}: {error}"
    return {"seconds": round(time.perf_counter() - start, 1), "failure": failure}


def run_tests(seconds: float) -> dict[str, Any]:
    """The launcher's tests: exit code and the end of what they print."""
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *TESTS],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
        code, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        code, text = None, said.decode(errors="replace") if isinstance(said, bytes) else said
    return {"rc": code, "seconds": round(time.perf_counter() - start, 1), "tail": text[-6000:]}


def best_of(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The best times of several processes."""
    return {
        case: [min(run["cases"][case]["us"][place] for run in runs) for place in (0, 1)]
        for case in runs[0]["cases"]
    }


def table(times: dict[str, dict[str, list[float]]]) -> str:
    """Every call with both launchers, and the ratio to SDPA of the same process."""
    lines = []
    for case in next(iter(times.values())):
        cells = []
        for name, found in times.items():
            forward, both = found[case]
            # "softmax 512", or "softmax causal 512".
            words = case.split()
            peer = " ".join(["softmax", *(word for word in words[1:] if word != "matched")])
            ratio = [one / other for one, other in zip(found[case], found[peer], strict=True)]
            cells.append(
                f"{name} {forward:6.1f} / {both:6.1f} µs ({ratio[0]:.2f}× / {ratio[1]:.2f}×)"
            )
        lines.append(f"{case:24s} " + "   ".join(cells))
    return "\n".join(lines)


def launcher_table(content: dict[str, Any]) -> str:
    """Microseconds of every call with both launchers, and as a multiple of SDPA's."""
    times = content["times"]
    (tokens,) = {case.split()[-1] for found in times.values() for case in found}
    lines = []
    for name, title in host_calls.TITLES.items():
        softmax = "softmax causal" if name.endswith("causal") else "softmax"
        # SDPA knows no launcher: its best time in any process counts.
        best = [
            min(found[f"{softmax} {tokens}"][place] for found in times.values()) for place in (0, 1)
        ]
        cells = []
        for launcher in LAUNCHERS:
            both = times[launcher][f"{name} {tokens}"]
            ratios = [one / other for one, other in zip(both, best, strict=True)]
            cells.append(f"{both[0]:.0f} / {both[1]:.0f} ({ratios[0]:.1f}× / {ratios[1]:.1f}×)")
        if name == softmax:
            cells = [f"{best[0]:.0f} / {best[1]:.0f}"] * len(LAUNCHERS)
        lines.append([title, *cells])
    setup = content["setup"]
    # A run that was stopped has fewer rounds than were asked for.
    rounds = min(len(found) for found in content["runs"].values())
    best_of = "One process" if rounds == 1 else f"The best of {rounds} processes"
    caption = (
        "Host time of a call from Python, forward / forward and backward, and how many times that "
        f"is SDPA's; batch 1, {content['heads']} heads of {content['width']}, {tokens} tokens, "
        f"bfloat16. {best_of} with each launcher. "
        f"{content['note'] + ' ' if 'note' in content else ''}"
        f"{setup['device']}, torch {setup['torch']}; {source(setup)}."
    )
    return markdown_table(["µs per call", "from Python", "compiled"], lines, caption)


def main() -> None:
    """Build, test, measure; every step is written as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512])
    parser.add_argument("--no-tests", action="store_true", help="only build and measure")
    parser.add_argument("--test-seconds", type=float, default=80.0, help="at most, for the tests")
    parser.add_argument("--case", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case is not None:
        one_process(given.case, tuple(given.lengths))
        return
    from lln.files import write_atomically
    from lln_lab.bench.environment import describe
    from lln_lab.compact import compact_json

    command = f"{COMMAND} --rounds {given.rounds}"
    setup = describe("cuda", command)
    # Every process has its own.
    del setup["launcher"]
    content: dict[str, Any] = {"setup": setup, "rounds": given.rounds}
    content |= {"heads": host_calls.HEADS, "width": host_calls.WIDTH}

    def keep(**more: Any) -> None:
        content.update(more)
        write_atomically(given.out, compact_json(content))

    with tempfile.TemporaryDirectory() as folder:
        keep(build=build(Path(folder)))
        print(f"build: {content['build']}", flush=True)
        if not given.no_tests:
            keep(tests=run_tests(given.test_seconds))
            tests = content["tests"]
            print(f"{tests['tail']}\ntests: rc {tests['rc']}, {tests['seconds']} s", flush=True)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in LAUNCHERS}
        for turn in range(given.rounds):
            for name in LAUNCHERS:
                print(f"round {turn + 1}, {name}", flush=True)
                words = ["lln_lab.benchmarks.launcher", "--lengths", *map(str, given.lengths)]
                wanted = {"LLN_LAUNCHER": "python" if name == "python" else None}
                try:
                    runs[name].append(in_own_process(words, wanted))
                except subprocess.CalledProcessError as error:
                    keep(failed=f"{name}: exit code {error.returncode}")
                    continue
                keep(runs=runs, times={one: best_of(all_) for one, all_ in runs.items() if all_})
    if not content.get("times"):
        sys.exit(f"nothing was measured; {given.out} says why")
    print(table(content["times"]))
    every = [run for some in runs.values() for run in some]
    equal = all(case.get("equal", True) for run in every for case in run["cases"].values())
    launchers = sorted({run["launcher"] for run in every})
    print(f"the same bits: {equal}; launchers: {launchers}; {given.out}")


if __name__ == "__main__":
    main()
