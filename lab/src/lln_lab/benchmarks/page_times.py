"""Window, sinks and pages against the best fused softmax attention, on this machine.

    python -m lln_lab.benchmarks.page_times --out lab/results/benchmarks/pages-cuda.json
    python -m lln_lab.benchmarks.page_times --device cpu --out lab/results/benchmarks/pages-cpu.json
    python -m lln_lab.benchmarks.page_times --parts decode --lengths 8192

``training`` is a step (forward and backward) of an encoder's layer: 12 heads of 64, B · N = 65,536,
window 128, 16 pages. ``prefill`` and ``decode`` are a decoder's: a text at once, and one token more
of 1 or 16 texts; window 127, 16 sinks, 32 pages. Pages have 16 tokens and are chosen by 32 channels
that lie ready, as a cache keeps them. bfloat16; times are those of CUDA graphs, choice included;
softmax is the fastest of PyTorch's fused kernels, and in ``decode`` of the heads of a key head
taken as queries of one, too. On a CPU: ``prefill`` and ``decode`` of one text with 9 heads of 64,
float32, wall times, in turn with softmax.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

import lln
from lln.files import write_atomically
from lln_lab.bench.environment import describe
from lln_lab.benchmarks.call_times import graph_ms
from lln_lab.benchmarks.keys import BACKENDS, softmax_times
from lln_lab.benchmarks.turns import forward_and_both

RANK = 32
TRAINED = {"window": 128, "sinks": 0, "pages": 16}
DECODED = {"window": 127, "sinks": 16, "pages": 32, "is_causal": True, "enable_gqa": True}
# Query heads, key heads and their width: of Llama 3's size, and SmolLM2-135M's.
DECODERS = ((32, 8, 128), (9, 3, 64))
LENGTHS = {
    "training": (2048, 4096, 8192, 16384, 65536),
    "prefill": (8192, 32768, 131072),
    "decode": (8192, 32768, 131072),
    "prefill on a CPU": (256, 512, 1024, 2048, 4096, 8192),
    "decode on a CPU": (512, 2048, 8192),
}
TOKENS = 65536


def normal(batch: int, tokens: int, heads: int, width: int) -> Tensor:
    """Numbers as a model has them, ``[B, H, N, D]`` seen through ``[B, N, H, D]``."""
    drawn = torch.randn(batch, tokens, heads, width, device="cuda", dtype=torch.bfloat16)
    return drawn.transpose(1, 2)


def times(call: Callable[[], Any], tokens: int) -> float:
    """Milliseconds of a call; long ones are repeated less often."""
    return graph_ms(call, 20 if tokens < 32768 else 2)


def training(tokens: int) -> Iterator[dict[str, Any]]:
    """A step of an encoder's layer."""
    batch, heads, width = TOKENS // tokens, 12, 64
    inputs = [normal(batch, tokens, heads, width).requires_grad_() for _ in range(3)]
    choice = (normal(batch, tokens, heads, RANK), normal(batch, tokens, heads, RANK))
    attend = partial(lln.page_attention, choice=choice, **TRAINED)
    forward, both = forward_and_both(attend, inputs, torch.randn_like(inputs[0]))
    time_of = partial(times, tokens=tokens)
    softmax = softmax_times(inputs, time_of)
    own = {"forward": time_of(forward), "forward + backward": time_of(both)}
    yield {"batch": batch, "heads": f"{heads} × {width}", "lln": own, "softmax": softmax}


@torch.no_grad()
def prefill(tokens: int) -> Iterator[dict[str, Any]]:
    """A long text at once."""
    heads, shared, width = DECODERS[0]
    sides = [normal(1, tokens, count, width) for count in (heads, shared, shared)]
    choice = (normal(1, tokens, heads, RANK), normal(1, tokens, shared, RANK))
    own = times(lambda: lln.page_attention(*sides, choice=choice, **DECODED), tokens)
    softmax = times_of_softmax(sides, tokens, is_causal=True)
    sizes = f"{heads}/{shared} × {width}"
    yield {"batch": 1, "heads": sizes, "lln": {"forward": own}, "softmax": {"forward": softmax}}


@torch.no_grad()
def decode(tokens: int) -> Iterator[dict[str, Any]]:
    """One token more of 1 and of 16 texts; keys lie as a cache has them."""
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    for heads, shared, width in DECODERS:
        for batch in (1, 16):
            query = torch.randn(batch, heads, 1, width, **kind)
            key, value = (torch.randn(batch, shared, tokens, width, **kind) for _ in range(2))
            index = torch.randn(batch, shared, tokens, RANK, **kind)
            choice = (torch.randn(batch, heads, 1, RANK, **kind), index)
            call = partial(lln.page_attention, query, key, value, choice=choice, **DECODED)
            rows = query.view(batch, shared, heads // shared, width)
            softmax = min(
                times_of_softmax([query, key, value], 1),
                graph_ms(partial(F.scaled_dot_product_attention, rows, key, value)),
            )
            own = graph_ms(call)
            sizes = f"{heads}/{shared} × {width}"
            read = index.nbytes + 2 * batch * shared * (128 + 16 + 32 * 16) * width * 2
            row = {"batch": batch, "heads": sizes, "read": read, "all": key.nbytes + value.nbytes}
            yield row | {"lln": {"forward": own}, "softmax": {"forward": softmax}}


@torch.no_grad()
def on_cpu(tokens: int, queries: int) -> dict[str, Any]:
    """The last queries of one text of SmolLM2's size: medians of rounds."""
    heads, shared, width = DECODERS[1]
    query, chosen_by = (torch.randn(1, heads, queries, size) for size in (width, RANK))
    key, value = (torch.randn(1, shared, tokens, width) for _ in range(2))
    choice = (chosen_by, torch.randn(1, shared, tokens, RANK))
    # What transformers hands over.
    rows = [side.repeat_interleave(heads // shared, 1) for side in (key, value)]
    calls = {
        "lln": partial(lln.page_attention, query, key, value, choice=choice, **DECODED),
        "softmax": partial(F.scaled_dot_product_attention, query, *rows, is_causal=queries > 1),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(max(9, 60_000 // tokens)):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name].append(1e3 * (time.perf_counter() - start))
    # The first two warm up.
    times = {name: {"forward": median(each[2:])} for name, each in found.items()}
    return {"batch": 1, "heads": f"{heads}/{shared} × {width}", **times}


def times_of_softmax(sides: list[Tensor], tokens: int, is_causal: bool = False) -> float:
    """The best of the fused kernels."""
    found = []
    for backend in BACKENDS:
        with sdpa_kernel(backend):
            call = partial(F.scaled_dot_product_attention, *sides, enable_gqa=True)
            found.append(times(partial(call, is_causal=is_causal), tokens))
    return min(found)


PARTS: dict[str, Callable[[int], Iterable[dict[str, Any]]]] = {
    "training": training,
    "prefill": prefill,
    "decode": decode,
    "prefill on a CPU": lambda tokens: [on_cpu(tokens, tokens)],
    "decode on a CPU": lambda tokens: [on_cpu(tokens, 1)],
}


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=("training", "prefill", "decode"))
    parser.add_argument("--lengths", type=int, nargs="+", help="default: as in the tables")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    command = f"python -m lln_lab.benchmarks.page_times --device {given.device}"
    content: dict[str, Any] = {"setup": describe(given.device, command), "rows": []}
    parts = given.parts or ["training", "prefill", "decode"]
    if given.device == "cpu":
        parts = [f"{part} on a CPU" for part in parts if part != "training"]
    for part in parts:
        for tokens in given.lengths or LENGTHS[part]:
            torch.manual_seed(0)
            for row in PARTS[part](tokens):
                content["rows"].append({"part": part.split()[0], "tokens": tokens} | row)
                print(content["rows"][-1], flush=True)
                if given.out:
                    # After every row, so that a run that is stopped leaves what it has measured.
                    write_atomically(given.out, json.dumps(content, indent=1) + "\n")
            if given.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
