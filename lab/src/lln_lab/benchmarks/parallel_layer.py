"""One context-parallel layer on one device: ``python -m lln_lab.benchmarks.parallel_layer``.

Three ways to the same numbers: the attention of the top level; `lln.parallel` with a group of one
rank, which calls it; and `lln.parallel` as a rank of several goes, whose collectives here go to
itself. The host's speed changes from second to second, so the ways take turns: a round times each
of them for a few calls, and its times are compared with those of the same round. Times are those of
calls one after the other, host included; memory is the peak of a forward and a backward pass.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import lln
import lln.parallel
from lln.files import write_atomically
from lln.parallel import together
from lln_lab.bench.environment import describe
from lln_lab.benchmarks.turns import forward_and_both, in_turn
from lln_lab.compact import compact_json
from lln_lab.markdown import source, table

COMMAND = "python -m lln_lab.benchmarks.parallel_layer"
RESULTS = Path("lab/results/benchmarks/parallel-layer.json")
HEADS, WIDTH = 12, 64
LENGTHS = (65_536, 1_048_576)
KINDS = ("lln", "lln_diag", "lln_keys")
GIVEN = {"alpha": 1.1, "beta": 1.1}
WAYS = {"top level": "top level", "alone": "one rank alone", "several": "as one rank of several"}
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
# Of a round: how often a way is called in its turn.
CALLS = 4
FEWEST_ROUNDS = 5
# Of all rounds of one attention, length and pass, unless told otherwise.
SECONDS = 20.0


@contextmanager
def going(way: str) -> Iterator[None]:
    """Inside, a group of one rank goes the way of several, if that is asked for."""
    several = patch.object(together, "is_alone", lambda *_: False)
    with several if way == "several" else nullcontext():
        yield


def finish(device: str) -> None:
    """Wait until the device has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def turn_of(way: str, call: Callable[[], Any], device: str) -> float:
    """Milliseconds of one call, in the mean of a few that each wait for their result."""
    with going(way):
        finish(device)
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
            finish(device)
        return 1e3 * (time.perf_counter() - start) / CALLS


def compared(rounds: list[dict[str, float]], way: str) -> list[float]:
    """A way's times relative to the top level's of the same round: quartile, median, quartile."""
    return quantiles([times[way] / times["top level"] for times in rounds], n=4)


def attention(kind: str, way: str, tokens: int) -> Callable[..., Tensor]:
    """The call of one row."""
    name = f"{kind}_attention"
    options: dict[str, Any] = dict(GIVEN)
    if kind == "lln_keys":
        options |= {"offset": -5.0, "keys": 64}
    if kind == "lln_diag":
        options["block_size"] = 64
    if way == "top level":
        return lambda *sides: getattr(lln, name)(*sides, **options)
    options |= {"group": dist.group.WORLD, "lengths": [tokens]}
    return lambda *sides: getattr(lln.parallel, name)(*sides, **options)


def peak_gib(call: Callable[[], Any], device: str) -> float | None:
    """The largest memory of a call; None where nobody counts it."""
    if device != "cuda":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def measure(kind: str, tokens: int, given: argparse.Namespace) -> list[dict]:
    """Times and peak memory of all ways of one attention and length."""
    size, dtype = (1, given.heads, tokens, WIDTH), getattr(torch, DTYPES[given.device])
    sides = [torch.randn(size, device=given.device, dtype=dtype) for _ in range(4)]
    *inputs, upstream = (side.requires_grad_(place < 3) for place, side in enumerate(sides))

    calls = {way: forward_and_both(attention(kind, way, tokens), inputs, upstream) for way in WAYS}
    peaks: dict[str, float | None] = {}
    for way, (_, both) in calls.items():
        try:
            with going(way):
                peaks[way] = peak_gib(both, given.device)
        except torch.OutOfMemoryError:
            print(f"{kind}, {tokens:,} tokens, {WAYS[way]}: too large", flush=True)
    timed = {}
    for place, name in enumerate(("forward", "both")):
        turns = {way: partial(turn_of, way, calls[way][place], given.device) for way in peaks}
        for warm_up in turns.values():
            warm_up()
        most = max(given.rounds, 2)
        timed[name] = in_turn(turns, given.seconds, min(FEWEST_ROUNDS, most), most)
    rows = []
    for way, peak in peaks.items():
        row: dict[str, Any] = {"kind": kind, "way": way, "tokens": tokens}
        for name, rounds in timed.items():
            row[f"{name}_ms"] = median(times[way] for times in rounds)
            row[f"{name}_ratio"] = compared(rounds, way)
            row[f"{name}_rounds"] = len(rounds)
        row |= {"peak_gib": peak, "tensors_gib": 8 * inputs[0].nbytes / 2**30}
        rows.append(row)
        times = f"{row['both_ms']:.2f} ms, {ratio_of(row, None)} of the top level's"
        print(f"{kind}, {tokens:,} tokens, {WAYS[way]}: {times}", flush=True)
    return rows


def ratio_of(row: dict, top_level: dict | None) -> str:
    """Forward and backward relative to the top level, with the quartiles of the rounds.

    Args:
        row: Of a way; results from before the ways took turns have no ratio of their own.
        top_level: That of the top level, for those.
    """
    if "both_ratio" not in row:
        assert top_level is not None
        return f"{row['both_ms'] / top_level['both_ms']:.2f}"
    low, middle, high = row["both_ratio"]
    return f"{middle:.2f}" if row["way"] == "top level" else f"{middle:.2f} ({low:.2f}–{high:.2f})"


def layer_table(content: dict) -> str:
    """Every row, with its time relative to the top level."""
    rows = content["rows"]
    plain = {(row["kind"], row["tokens"]): row for row in rows if row["way"] == "top level"}
    lines = []
    for row in rows:
        ratio = ratio_of(row, plain[row["kind"], row["tokens"]])
        times = [f"{row[name]:.2f}" for name in ("forward_ms", "both_ms")]
        memory = ["", ""]
        if row["peak_gib"] is not None:
            memory = [f"{row['peak_gib'] / unit:.2f}" for unit in (1, row["tensors_gib"])]
        name = [f"`{row['kind']}`", f"{row['tokens']:,}", WAYS[row["way"]]]
        lines.append([*name, *times, ratio, *memory])
    turns = (
        "the ratio is the median of rounds in which the ways took turns, with its quartiles; "
        if any("both_ratio" in row for row in rows)
        else ""
    )
    caption = (
        f"Milliseconds of one layer on one {content['setup']['device']}, {content['heads']} heads "
        f"of {content['width']}, {content.get('dtype', 'bfloat16')}, batch 1, α and β given, with "
        f"the host's time; {turns}the peak memory of forward and backward in GiB, and in units of "
        f"query, key, value, output and their gradients; {source(content['setup'])}."
    )
    heads = "attention,tokens,how,forward,+ backward,of the top level's,GiB,of the tensors"
    return table(heads.split(","), lines, caption)


def run(given: argparse.Namespace) -> dict:
    """Measure everything, and write it down after every attention and length."""
    command = COMMAND if given.device == "cuda" else f"{COMMAND} --device {given.device}"
    if given.seconds != SECONDS:
        command += f" --seconds {given.seconds:g}"
    content = {"setup": describe(given.device, command), "heads": given.heads, "width": WIDTH}
    content |= {"dtype": DTYPES[given.device], "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        meeting = {"init_method": f"file://{folder}/meeting", "rank": 0, "world_size": 1}
        dist.init_process_group(BACKENDS[given.device], **meeting)
        for tokens in given.lengths:
            for kind in given.kinds:
                content["rows"] += measure(kind, tokens, given)
                write_atomically(given.out, compact_json(content))
        dist.destroy_process_group()
    return content


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--device", choices=BACKENDS, default="cuda")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--rounds", type=int, default=100, help="of all ways in turn, at most")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="after which no round begins"
    )
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device, or --device cpu")
    if given.device == "cpu" and given.out == RESULTS:
        raise SystemExit("--device cpu needs --out: the results of this file are of a GPU")
    print(layer_table(run(given)))


if __name__ == "__main__":
    main()
