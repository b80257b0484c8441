"""Attentions on a CPU in turn with softmax.

    python -m lln_lab.benchmarks.cpu_turns --old OLD/src

On a machine that is shared with others, times change from second to second, and what is timed later
is not comparable. Here the calls of one length take turns in a new order every time, so all of them
see the same machine, and ratios hold although times do not. PyTorch's passes, the compiled ones
and, if given, an older tree have a process each, in rounds.

With ``--example`` they are the calls of README instead, α and β not given, with PyTorch's passes.
Their times are those of the processor on one thread, which other programs change little.

The processes keep what they have freed. By default the C library may return it to the system after
every call and ask for it again page by page; whether it does depends on what else the program has
allocated, and can cost as much as the call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

# Nothing of lln is imported here: the tree on the path may be an old one.
from lln_lab.benchmarks.turns import forward_and_both, in_own_process, in_turn, milliseconds

COMMAND = "python -m lln_lab.benchmarks.cpu_turns"
RESULTS = Path("lab/results/benchmarks/cpu-turns-x86.json")
EXAMPLE = Path("lab/results/benchmarks/cpu-example-x86.json")
LENGTHS, EXAMPLE_LENGTHS = (128, 256, 512, 1024, 2048, 4096), (256, 1024, 4096)
HEADS, WIDTH = 12, 64
PASSES = ("forward", "fwd + bwd")
# What the others are compared with, and what causal ones are.
BASES = ("softmax", "softmax causal")
# What alternated in results that were made before queries chose pages.
OLD_RECIPE = ("diag", "keys by query")
# Turns that a length gets at least, however long they take.
FEWEST = 3
# Times of one round: pass, length and call → milliseconds.
Times = dict[str, float]


def attentions() -> dict[str, Callable[..., Any]]:
    """Name → attention over query, key and value in float32."""
    from torch.nn.functional import scaled_dot_product_attention

    import lln

    given = {"alpha": 2.0, "beta": 2.0}
    return {
        "softmax": scaled_dot_product_attention,
        "lln": partial(lln.lln_attention, **given),
        "lln matched": lln.lln_attention,
        "lln_diag": partial(lln.lln_diag_attention, **given),
        "softmax causal": partial(scaled_dot_product_attention, is_causal=True),
        "lln causal": partial(lln.lln_attention, is_causal=True, **given),
    }


def example() -> dict[str, Callable[..., Any]]:
    """The attentions that README shows and recommends, with the options that it gives."""
    from torch.nn.functional import scaled_dot_product_attention

    import lln

    return {
        "softmax": scaled_dot_product_attention,
        "lln_diag": lln.lln_diag_attention,
        "lln_keys": lln.lln_keys_attention,
        "window": partial(lln.window_attention, window=64),
        "pages": partial(lln.page_attention, window=64, sinks=0, pages=16),
    }


def measure(lengths: list[int], seconds: float, is_example: bool = False) -> Times:
    """One round of the tree and the passes that this process has: the middle of all turns."""
    import torch

    kinds, clock = (example(), time.process_time) if is_example else (attentions(), None)
    found: Times = {}
    for tokens in lengths:
        inputs = [torch.randn(1, HEADS, tokens, WIDTH, requires_grad=True) for _ in range(3)]
        upstream = torch.randn(1, HEADS, tokens, WIDTH)
        both = {name: forward_and_both(attend, inputs, upstream) for name, attend in kinds.items()}
        for place, passes in enumerate(PASSES):
            timed = {
                name: partial(milliseconds, calls[place], clock) for name, calls in both.items()
            }
            for warm_up in timed.values():
                warm_up()
            turns = in_turn(timed, seconds, FEWEST)
            for name in timed:
                middle = median(times[name] for times in turns)
                found[f"{passes} {tokens} {name}"] = middle
    return found


# Beside the older package, which has no laboratory of ours.
LAB = Path(__file__).resolve().parents[2]
# Of the GNU C library: no memory is returned.
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_MMAP_MAX_": "0"}


def ways(old: Path | None) -> dict[str, dict[str, str]]:
    """Which passes compute → the environment of their process."""
    plain = {**KEEPS_MEMORY, "LLN_CPU": "torch"}
    found = (
        {}
        if old is None
        else {"before": {**plain, "PYTHONPATH": f"{old.resolve()}{os.pathsep}{LAB}"}}
    )
    return {**found, "plain": plain, "compiled": KEEPS_MEMORY}


def commit_of(tree: Path) -> str:
    """The commit that an older tree is at."""
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(
            f"{tree} is no tree of a repository; use `git worktree add FOLDER COMMIT`."
        )
    return found.stdout.strip()


def ratio(content: dict[str, Any], way: str, case: str, call: str, base: str) -> float:
    """How many times as long the base takes as a call: the middle of all rounds."""
    rounds = content["ways"][way]
    return median(times[f"{case} {base}"] / times[f"{case} {call}"] for times in rounds)


def turns_table(content: dict[str, Any]) -> str:
    """Times of softmax, and how many times faster the others are, for each kind of passes."""
    from lln_lab.markdown import source, table

    def as_ms(time: float) -> str:
        return f"{time:,.0f}" if time >= 100 else f"{time:.3g}"

    def cell(case: str, call: str, base: str) -> str:
        found = [ratio(content, way, case, call, base) for way in content["ways"]]
        return ", ".join(f"{one:.1f}×" for one in found)

    lines = []
    for name in PASSES:
        for tokens in content["lengths"]:
            case = f"{name} {tokens}"
            every = [times for rounds in content["ways"].values() for times in rounds]
            softmax = [median(one[f"{case} {base}"] for one in every) for base in BASES]
            adds = [ratio(content, way, case, "lln", "lln matched") for way in content["ways"]]
            lines.append(
                [
                    f"{tokens:,}",
                    name,
                    as_ms(softmax[0]),
                    *(cell(case, call, BASES[0]) for call in ("lln", "lln matched", "lln_diag")),
                    ", ".join(f"{100 * (one - 1):.0f} %" for one in adds),
                    as_ms(softmax[1]),
                    cell(case, "lln causal", BASES[1]),
                ]
            )
    heads = ["N", "pass", "SDPA ms", "LLN", "LLN, matched", "LLN + Diag", "matching adds"]
    heads += ["causal SDPA ms", "LLN, causal"]
    setup, named = content["setup"], ", ".join(content["ways"])
    old = f"; *before* is commit `{content['before'][:10]}`" if content["before"] else ""
    caption = (
        f"Times faster than SDPA in turn with it ({named}); *plain*: PyTorch's passes, *compiled*: "
        f"those in C++{old}. Float32, B = 1, H = {HEADS}, D = {WIDTH}, freed memory is "
        f"kept; the middle of {len(content['ways']['plain'])} rounds. {setup['device']}, "
        f"{setup['threads']} threads, torch {setup['torch']}; {source(setup)}."
    )
    return table(heads, lines, caption)


def passes_table(content: dict[str, Any], lengths: Sequence[int]) -> str:
    """Milliseconds of softmax, and how many times faster the compiled passes are: for README."""
    from lln_lab.markdown import source, table

    titles = {"lln": "LLN", "lln matched": "LLN, matched", "lln_diag": "LLN + Diag"}
    lines, heads = [], ["N"]
    for name in PASSES:
        heads += [f"softmax, {name}", *titles.values()]
    for tokens in lengths:
        cells = [f"{tokens:,}"]
        for name in PASSES:
            case = f"{name} {tokens}"
            every = [times[f"{case} softmax"] for times in content["ways"]["compiled"]]
            cells.append(f"{_milliseconds(median(every))} ms")
            cells += [f"{ratio(content, 'compiled', case, call, BASES[0]):.1f}×" for call in titles]
        lines.append(cells)
    setup = content["setup"]
    caption = (
        "Milliseconds of softmax, and times faster than it, in turn with it; compiled passes, α "
        f"and β given where not matched, float32, B = 1, H = {HEADS}, D = {WIDTH}. "
        f"{setup['device']}, {setup['threads']} threads, torch {setup['torch']}; {source(setup)}."
    )
    return table(heads, lines, caption)


def example_table(content: dict[str, Any]) -> str:
    """Milliseconds of what README recommends, and how many times faster than softmax it is."""
    from lln_lab.markdown import source, table

    titles = {"lln_diag": "LLN + Diag", "lln_keys": "exact keys", "scratch": "from scratch"}
    rounds: list[Times] = []
    is_old = any(case.endswith(OLD_RECIPE[1]) for case in content["ways"]["plain"][0])
    for times in content["ways"]["plain"]:
        cases = [f"{name} {tokens}" for name in PASSES for tokens in content["lengths"]]
        # Layers of the two kinds alternate.
        kinds = OLD_RECIPE if is_old else ("window", "pages")
        both = [[times[f"{case} {kind}"] for kind in kinds] for case in cases]
        means = {f"{case} scratch": sum(two) / 2 for case, two in zip(cases, both, strict=True)}
        rounds.append(times | means)
    own = {"ways": {"plain": rounds}}
    gone = f" ({', '.join(OLD_RECIPE)}; made before the latter were removed)" if is_old else ""
    lines = []
    for tokens in content["lengths"]:
        cells = [f"{tokens:,}"]
        for name in PASSES:
            case = f"{name} {tokens}"
            cells.append(_milliseconds(median(times[f"{case} softmax"] for times in rounds)))
            for call in titles:
                spent = _milliseconds(median(times[f"{case} {call}"] for times in rounds))
                cells.append(f"{spent} ({ratio(own, 'plain', case, call, BASES[0]):.1f}×)")
        lines.append(cells)
    heads = ["N"]
    for name in PASSES:
        heads += [f"softmax, {name}", *titles.values()]
    setup = content["setup"]
    caption = (
        "Milliseconds of one processor (times faster than softmax; below 1 it is slower), all "
        "by PyTorch's operations, without compiled passes; α and β matched, float32, B = 1, "
        f"H = {HEADS}, D = {WIDTH}. *From scratch*: the mean of the two layers that alternate"
        f"{gone}. Freed memory is kept. {setup['device']}, torch {setup['torch']}; {source(setup)}."
    )
    return table(heads, lines, caption)


def _milliseconds(time: float) -> str:
    return f"{time:,.{0 if time >= 100 else 1 if time >= 10 else 2}f}"


def main() -> None:
    """Measure in rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, help="folder that holds an older lln package")
    parser.add_argument("--example", action="store_true", help="the calls of README")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--seconds", type=float, default=2.0, help="per length, pass and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    lengths = given.lengths or list(EXAMPLE_LENGTHS if given.example else LENGTHS)
    if given.case is not None:
        times = measure(lengths, given.seconds, given.example)
        given.case.write_text(json.dumps(times), "utf-8")
        return
    from lln.cpu import building
    from lln.files import write_atomically
    from lln_lab.bench.environment import describe
    from lln_lab.compact import compact_json

    found = ways(given.old)
    if given.example:
        found = {"plain": {**found["plain"], "OMP_NUM_THREADS": "1"}}
    if "compiled" in found and not building.LIBRARY.exists():
        raise SystemExit("There are no compiled passes to compare; `make setup` makes them.")
    kind = ["--example"] if given.example else ["--old OLD/src"] if given.old else []
    words = [COMMAND, *kind, f"--seconds {given.seconds:g}"]
    content: dict[str, Any] = {
        "setup": describe("cpu", " ".join([*words, f"--rounds {given.rounds}"]))
        | ({"threads": 1} if given.example else {}),
        "before": commit_of(given.old) if given.old else None,
        "lengths": lengths,
        "ways": {way: [] for way in found},
    }
    options = [*(["--example"] if given.example else []), f"--seconds={given.seconds}"]
    options += ["--lengths", *map(str, lengths)]
    for number in range(given.rounds):
        for way, environment in found.items():
            print(f"round {number + 1} of {given.rounds}: {way}", flush=True)
            words = ["lln_lab.benchmarks.cpu_turns", *options]
            content["ways"][way].append(in_own_process(words, environment))
        write_atomically(
            given.out or (EXAMPLE if given.example else RESULTS), compact_json(content)
        )
    print(example_table(content) if given.example else turns_table(content))


if __name__ == "__main__":
    main()
