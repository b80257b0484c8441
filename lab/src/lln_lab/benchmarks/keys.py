"""Attention with exact keys against the best fused softmax attention, on this machine.

    python -m lln_lab.benchmarks.keys --device cuda --out lab/results/benchmarks/keys-cuda.json
    python -m lln_lab.benchmarks.keys --device cpu --out lab/results/benchmarks/keys-cpu.json

On a GPU times are those of CUDA graphs, with a fixed number of tokens in a batch; softmax is the
fastest of PyTorch's fused kernels. On a CPU they are wall times with batch 1. Memory is the peak of
a forward and backward pass over the size of query, key, value, output and their gradients.

``--packed`` takes packed sequences, alternately half as long and one and a half times as long, and
wall times, because such calls read the lengths; softmax has the same sequences padded, unmasked.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import lln
from lln.files import write_atomically
from lln_lab.bench.environment import describe
from lln_lab.benchmarks.call_times import graph_ms
from lln_lab.benchmarks.turns import forward_and_both

HEADS, WIDTH, TOKENS = 12, 64, 65536
GIVEN = {"alpha": 1.1, "beta": 1.1, "offset": -5.0}
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)


def wall_ms(call: Callable[[], Any]) -> float:
    """Milliseconds of a call on the host: the best of seven."""
    call()
    times = []
    for _ in range(7):
        _wait()
        start = time.perf_counter()
        call()
        _wait()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def both_ways(
    attend: Callable[..., Any], inputs: list[torch.Tensor], time_of: Callable[..., float]
) -> dict[str, float]:
    """Times of the forward alone, and of forward and backward."""
    forward, both = forward_and_both(attend, inputs, torch.randn_like(inputs[0]))
    return {"forward": time_of(forward), "forward + backward": time_of(both)}


def peak_ratio(attend: Callable[..., Any], inputs: list[torch.Tensor]) -> float:
    """Peak memory of a forward and backward pass, in units of the tensors themselves."""
    upstream = torch.randn_like(inputs[0])
    torch.autograd.grad(attend(*inputs), inputs, upstream)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(attend(*inputs), inputs, upstream)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / (8 * inputs[0].nbytes)


def softmax_times(inputs: list[torch.Tensor], time_of: Callable[..., float]) -> dict[str, float]:
    """The best of the fused kernels, separately for both columns."""
    if inputs[0].device.type == "cpu":
        return both_ways(F.scaled_dot_product_attention, inputs, time_of)
    found = []
    for backend in BACKENDS:
        with sdpa_kernel(backend):
            found.append(both_ways(F.scaled_dot_product_attention, inputs, time_of))
    return {name: min(times[name] for times in found) for name in found[0]}


def read_setting(setting: str) -> tuple[str, dict[str, Any]]:
    """``64:16`` is 64 keys for every 16 queries."""
    keys, group = setting.split(":")
    return f"keys {keys}, groups of {group}", {"keys": int(keys), "group_size": int(group)}


def measure(
    device: str, lengths: list[int], settings: list[str], packed: bool
) -> Iterator[dict[str, Any]]:
    """One row per length: softmax, and every setting."""
    time_of = graph_ms if device == "cuda" and not packed else wall_ms
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for tokens in lengths:
        batch = TOKENS // tokens if device == "cuda" else 1
        parts = [tokens] * batch
        if packed:
            parts = [tokens // 2, 3 * tokens // 2] * max(1, batch // 2)

        def sides(*size: int) -> list[torch.Tensor]:
            kind: dict[str, Any] = {"device": device, "dtype": dtype, "requires_grad": True}
            return [torch.randn(size, **kind) for _ in range(3)]

        inputs = sides(len(parts), HEADS, max(parts), WIDTH)
        row: dict[str, Any] = {"tokens": tokens, "batch": len(parts)}
        row["softmax"] = softmax_times(inputs, time_of)
        call = lln.lln_keys_attention
        if packed:
            inputs = sides(sum(parts), HEADS, WIDTH)
            bounds = torch.tensor([0, *accumulate(parts)], device=device)
            call = partial(lln.lln_keys_attention_varlen, cu_seqlens=bounds)
        for name, choice in map(read_setting, settings):
            attend = partial(call, **GIVEN, **choice)
            found = both_ways(attend, inputs, time_of)
            if device == "cuda":
                found["memory"] = peak_ratio(attend, inputs)
            row[name] = found
            speed = row["softmax"]["forward + backward"] / found["forward + backward"]
            print(f"{tokens:6d} tokens, {name}: {speed:.2f} × softmax")
        yield row


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument(
        "--settings",
        nargs="+",
        default=["64:64"],
        metavar="KEYS:GROUP",
        help="64:16 = 64 keys for every 16 queries",
    )
    parser.add_argument("--packed", action="store_true", help="packed sequences of two lengths")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    usual = [512, 1024, 4096, 16384, 65536] if given.device == "cuda" else [512, 1024, 2048, 4096]
    # Without the output's folder, which is that of one machine.
    chosen = " ".join(given.settings)
    command = f"python -m lln_lab.benchmarks.keys --device {given.device} --settings {chosen}"
    command += " --packed" if given.packed else ""
    content: dict[str, Any] = {"setup": describe(given.device, command)}
    content |= {"heads": HEADS, "width": WIDTH, "rows": []}
    for row in measure(given.device, given.lengths or usual, given.settings, given.packed):
        content["rows"].append(row)
        if given.out:
            # After every row, so that a run that is stopped leaves what it has measured.
            write_atomically(given.out, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
