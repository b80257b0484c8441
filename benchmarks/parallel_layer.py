"""One layer of context-parallel attention on one GPU: ``python -m benchmarks.parallel_layer``.

Three ways to the same numbers: the attention of the top level; `lln.parallel` with a group of one
rank, which calls it; and `lln.parallel` as a rank of several goes, whose collectives here go to
itself. Times are those of calls one after the other, host included; memory is the peak of a forward
and a backward pass.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lln
import lln.parallel
from benchmarks.markdown import fill, source, table
from lln.files import compact_json, write_atomically
from lln.parallel import sharded, sharded_keys
from lln.studies.bench.environment import describe

COMMAND = "python -m benchmarks.parallel_layer"
RESULTS, PAGE = Path("benchmarks/results/parallel-layer.json"), Path("docs/parallel.md")
HEADS, WIDTH = 12, 64
LENGTHS = (65_536, 1_048_576)
KINDS = ("lln", "lln_diag", "lln_keys")
GIVEN = {"alpha": 1.1, "beta": 1.1}
WAYS = {"top level": "top level", "alone": "one rank alone", "several": "as one rank of several"}


def milliseconds(call: Callable[[], Any], rounds: int = 12) -> float:
    """The median of the rounds, after three to warm up."""
    times = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[3:])[rounds // 2]


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


def measure(kind: str, way: str, tokens: int) -> dict:
    """Times and peak memory of one row."""
    for module in (sharded, sharded_keys):
        module.is_alone = lambda *_: way != "several"
    size = (1, HEADS, tokens, WIDTH)
    sides = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    *inputs, upstream = (side.requires_grad_(place < 3) for place, side in enumerate(sides))
    attend = attention(kind, way, tokens)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*inputs)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*inputs), inputs, upstream)

    # Short calls wait for the host, whose times vary.
    rounds = 12 if tokens > LENGTHS[0] else 60
    found = {"forward_ms": milliseconds(forward, rounds), "both_ms": milliseconds(both, rounds)}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    both()
    torch.cuda.synchronize()
    found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    found["tensors_gib"] = 8 * inputs[0].nbytes / 2**30
    return {"kind": kind, "way": way, "tokens": tokens, **found}


def all_rows() -> Iterator[dict]:
    """Every attention, length and way."""
    for tokens in LENGTHS:
        for kind in KINDS:
            for way in WAYS:
                row = measure(kind, way, tokens)
                print(row, flush=True)
                yield row


def layer_table(content: dict) -> str:
    """Every row, with its time relative to the top level."""
    rows = content["rows"]
    plain = {(row["kind"], row["tokens"]): row for row in rows if row["way"] == "top level"}
    lines = []
    for row in rows:
        than = plain[row["kind"], row["tokens"]]["both_ms"]
        numbers = (row["forward_ms"], row["both_ms"], row["both_ms"] / than)
        memory = (row["peak_gib"], row["peak_gib"] / row["tensors_gib"])
        cells = [f"{number:.2f}" for number in (*numbers, *memory)]
        lines.append([f"`{row['kind']}`", f"{row['tokens']:,}", WAYS[row["way"]], *cells])
    caption = (
        f"Milliseconds of one layer on one {content['setup']['device']}, {HEADS} heads of {WIDTH}, "
        "bfloat16, batch 1, α and β given, with the host's time; the peak memory of forward and "
        "backward in GiB, and in units of query, key, value, output and their gradients; "
        f"{source(content['setup'])}."
    )
    heads = "attention,tokens,how,forward,+ backward,of the top level's,GiB,of the tensors"
    return table(heads.split(","), lines, caption)


def main() -> None:
    """Measure, or with --report write the table of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="only write the table")
    given = parser.parse_args()
    if not given.report:
        if not torch.cuda.is_available():
            raise SystemExit("needs a CUDA device; --report writes the table of the last results")
        with tempfile.TemporaryDirectory() as folder:
            meeting = f"file://{folder}/meeting"
            dist.init_process_group("nccl", init_method=meeting, rank=0, world_size=1)
            content = {"setup": describe("cuda", COMMAND), "heads": HEADS, "width": WIDTH}
            content["rows"] = []
            for row in all_rows():
                content["rows"].append(row)
                # After every row, so that a run that is stopped leaves what it has measured.
                write_atomically(given.out, compact_json(content))
            dist.destroy_process_group()
    if given.out == RESULTS:
        fill(PAGE, "parallel-layer", layer_table(json.loads(RESULTS.read_text("utf-8"))))


if __name__ == "__main__":
    main()
