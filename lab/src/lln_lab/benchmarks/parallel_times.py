"""Attention over processes on this machine against the cost model.

    python -m lln_lab.benchmarks.parallel_times --ranks 2

Processes with one thread each talk by Gloo. The machine is described by short measurements: the
rates of three kinds at one length, the time of a small and of a large exchange. From these
`lln_lab.benchmarks.step_time` predicts all others, and the table shows both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import lln.parallel
from lln.files import write_atomically
from lln.parallel.collectives import exchange
from lln.parallel.ranks import find_ranks
from lln_lab.bench.environment import describe
from lln_lab.benchmarks.softmax_over_ranks import ring_attention, ulysses_attention
from lln_lab.benchmarks.step_time import Machine, layer_time
from lln_lab.benchmarks.traffic import KINDS, LayerShape
from lln_lab.compact import compact_json
from lln_lab.markdown import source, table

RESULTS = Path("lab/results/benchmarks/parallel-times.json")
HEADS, WIDTH = 4, 64
LENGTHS = (2048, 4096, 8192, 16_384)
# The rates of the machine come from these kinds at this length.
RATES = {"softmax_rate": "ulysses", "linear_rate": "lln", "keys_rate": "lln_keys"}
KNOWN = 8192
OPTIONS: dict[str, dict[str, Any]] = {
    "lln": {},
    "lln_diag": {"block_size": 64},
    "lln_keys": {"block_size": 64, "keys": 64},
}
LARGE = 16 << 20


def attention(kind: str, lengths: list[int]) -> Callable[..., Tensor]:
    """The call of a kind over all ranks."""
    if kind == "ring":
        return ring_attention
    if kind == "ulysses":
        return ulysses_attention
    attend = getattr(lln.parallel, f"{kind}_attention")
    return lambda *sides: attend(*sides, lengths=lengths, **OPTIONS[kind])


def seconds(call: Callable[[], Any], rounds: int = 5) -> float:
    """The shortest of the rounds, all ranks beginning together; the same on every rank."""
    found = []
    for _ in range(rounds + 1):
        dist.barrier()
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    # The slowest rank decides.
    shortest = torch.tensor(min(found[1:]), dtype=torch.float64)
    dist.all_reduce(shortest, dist.ReduceOp.MAX)
    return shortest.item()


def step(kind: str, tokens: int, ranks: int) -> float:
    """Seconds of a forward and backward pass."""
    sides = [torch.randn(1, HEADS, tokens // ranks, WIDTH, requires_grad=True) for _ in range(3)]
    upstream = torch.randn_like(sides[0])
    attend = attention(kind, [tokens // ranks] * ranks)
    return seconds(lambda: torch.autograd.grad(attend(*sides), sides, upstream))


def exchange_seconds(size: int) -> float:
    """Seconds to send that many bytes to the next rank."""
    ranks = find_ranks(None, "lln_lab.benchmarks.parallel_times")
    rows = torch.zeros(1, size // 4)
    send, receive = [0] * ranks.size, [0] * ranks.size
    send[(ranks.own + 1) % ranks.size] = receive[ranks.own - 1] = 1
    return seconds(lambda: exchange(rows, send, receive, ranks, "measuring the network"))


def shape_of(tokens: int, ranks: int) -> LayerShape:
    sizes: dict[str, Any] = {"heads": HEADS, "width": WIDTH, "dtype": torch.float32}
    return LayerShape((tokens // ranks,) * ranks, asked=False, **sizes)


def measure_network() -> dict[str, float]:
    """Bandwidth and latency, as `Machine` calls them."""
    latency = exchange_seconds(1024)
    bandwidth = LARGE / max(exchange_seconds(LARGE) - latency, 1e-9)
    return {
        "node_bandwidth": bandwidth,
        "collective_latency": latency,
        "send_latency": latency,
    }


def describe_machine(content: dict) -> Machine:
    """The network as measured, and the rates that explain the times at one length."""
    # With rates of 1 the model's time is the number of operations.
    plain = Machine(softmax_rate=1.0, linear_rate=1.0, keys_rate=1.0, **content["network"])
    rates = {}
    for name, kind in RATES.items():
        row = {"kind": kind, "tokens": KNOWN}
        taken = next(one["seconds"] for one in content["rows"] if row.items() <= one.items())
        model = layer_time(kind, shape_of(KNOWN, content["ranks"]), plain)
        rates[name] = model.passes / (taken - model.transfer - model.waiting)
    return Machine(**rates, **content["network"])


def work(rank: int, ranks: int, meeting: str, out: str, command: str) -> None:
    """One process."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    rows = []
    for tokens in LENGTHS:
        for kind in KINDS:
            rows.append({"kind": kind, "tokens": tokens, "seconds": step(kind, tokens, ranks)})
            if rank == 0:
                print(rows[-1], flush=True)
    network = measure_network()
    if rank == 0:
        content = {"setup": describe("cpu", command), "ranks": ranks, "network": network}
        write_atomically(Path(out), compact_json({**content, "rows": rows}))
    dist.destroy_process_group()


def times_table(content: dict) -> str:
    """Milliseconds, measured and predicted."""
    machine = describe_machine(content)
    lines = []
    for tokens in LENGTHS:
        shape = shape_of(tokens, content["ranks"])
        cells = []
        for row in content["rows"]:
            if row["tokens"] == tokens:
                predicted = layer_time(row["kind"], shape, machine).total
                cells.append(f"{1e3 * row['seconds']:,.0f} ({1e3 * predicted:,.0f})")
        lines.append([f"{tokens:,}", *cells])
    rates = ", ".join(f"{getattr(machine, name) / 1e9:.0f}" for name in RATES)
    caption = (
        f"Milliseconds of one layer in a training step over {content['ranks']} processes of one "
        "thread, and in brackets what the model predicts; "
        f"{HEADS} heads of {WIDTH}, float32, blocks of 64, 64 keys. The rates ({rates} Gflop/s of "
        f"{', '.join(RATES.values())}) are those of {KNOWN:,} tokens, where these three agree by "
        f"construction; Gloo sends {machine.node_bandwidth / 1e9:.1f} GB/s and waits "
        f"{1e3 * machine.send_latency:.1f} ms. {content['setup']['device']}; "
        f"{source(content['setup'])}."
    )
    return table(["tokens", *(f"`{kind}`" for kind in KINDS)], lines, caption)


def main() -> None:
    """Measure, and keep the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="how many processes")
    given = parser.parse_args()
    command = f"python -m lln_lab.benchmarks.parallel_times --ranks {given.ranks}"
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        mp.spawn(work, (given.ranks, meeting, str(RESULTS), command), given.ranks)
    print(times_table(json.loads(RESULTS.read_text("utf-8"))))


if __name__ == "__main__":
    main()
