"""Two source trees on one GPU, timed in turn: does a change of the code change its speed?

    python -m lln_lab.benchmarks.two_trees OLD_SRC NEW_SRC --out RESULT.json

Every round is a process of its own per tree. Graph times are those of CUDA graphs (what the GPU
takes by itself); host times are those of calls from Python with batch 1. Each number is the best of
the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# Nothing of lln is imported here: the tree on the path may be an old one.
from lln_lab.benchmarks.turns import forward_and_both, in_own_process

# Beside the trees, which may have no laboratory.
LAB = Path(__file__).resolve().parents[2]
LENGTHS = (512, 2048, 16384)
TOKENS, HEADS, WIDTH = 65536, 12, 64
GIVEN = {"alpha": 2.0, "beta": 2.0}
# Of these the host's time counts, too.
HOST = ("softmax 512", "lln 512", "lln matched 512", "lln_diag 512", "lln_diag matched 512")


def cases() -> dict[str, tuple[dict[str, Any], Callable[..., Any]]]:
    """Name → shape of the inputs, and the call."""
    import torch

    import lln

    mask = torch.ones(TOKENS // 2048, 2048, dtype=torch.bool, device="cuda")
    mask[:, :100] = False
    causal = {"is_causal": True, **GIVEN}
    found: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {}
    for n in LENGTHS:
        shape = {"tokens": n}
        found[f"lln {n}"] = shape, lambda *s: lln.lln_attention(*s, **GIVEN)
        found[f"lln_diag {n}"] = shape, lambda *s: lln.lln_diag_attention(*s, **GIVEN)
        found[f"lln causal {n}"] = shape, lambda *s: lln.lln_attention(*s, **causal)
        found[f"lln_diag causal {n}"] = shape, lambda *s: lln.lln_diag_attention(*s, **causal)
        found[f"lln matched {n}"] = shape, lambda *s: lln.lln_attention(*s)
    shape, wide = {"tokens": 2048}, {"tokens": 2048, "width": 128}
    found |= {
        "diag 2048": (shape, lambda *s: lln.block_diagonal_attention(*s, block_size=64)),
        "lln_diag masked 2048": (
            shape,
            lambda *s: lln.lln_diag_attention(*s, key_mask=mask, **GIVEN),
        ),
        "lln_diag causal masked 2048": (
            shape,
            lambda *s: lln.lln_diag_attention(*s, key_mask=mask, **causal),
        ),
        "lln D = 128 2048": (wide, lambda *s: lln.lln_attention(*s, **GIVEN)),
        "lln_diag_64 D = 128 2048": (
            wide,
            lambda *s: lln.lln_diag_attention(*s, block_size=64, **GIVEN),
        ),
        "lln float32 2048": (
            {"tokens": 2048, "dtype": torch.float32},
            lambda *s: lln.lln_attention(*s, **GIVEN),
        ),
        "lln_diag matched 512": ({"tokens": 512}, lambda *s: lln.lln_diag_attention(*s)),
    }
    for width, n in ((32, 4096), (128, 512), (256, 512)):
        own = {"tokens": n, "width": width}
        found |= {
            f"softmax D = {width} {n}": (own, softmax),
            f"lln D = {width} {n}": (own, partial(lln.lln_attention, **GIVEN)),
            f"lln_diag D = {width} {n}": (own, partial(lln.lln_diag_attention, **GIVEN)),
            f"lln_diag_64 D = {width} {n}": (
                own,
                partial(lln.lln_diag_attention, block_size=64, **GIVEN),
            ),
        }
    for n in LENGTHS:
        found[f"softmax {n}"] = {"tokens": n}, softmax
        found[f"softmax causal {n}"] = {"tokens": n}, partial(softmax, is_causal=True)
    return found


def softmax(*sides: Any, is_causal: bool = False) -> Any:
    """Softmax attention by cuDNN, the fastest on the GPU that these times are from."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(*sides, is_causal=is_causal)


def measure() -> dict[str, float]:
    """All times of the tree on the path."""
    import torch

    from lln_lab.benchmarks.call_times import graph_ms, host_ms

    found = {}
    for name, (shape, attend) in cases().items():
        for kind, time_of in (("graph", graph_ms), ("host", host_ms)):
            if kind == "host" and name not in HOST:
                continue
            tokens = shape["tokens"]
            size = (1 if kind == "host" else TOKENS // tokens, HEADS, tokens)
            size = (*size, shape.get("width", WIDTH))
            dtype = shape.get("dtype", torch.bfloat16)
            inputs = [
                torch.randn(size, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)
            ]
            sent = torch.randn_like(attend(*inputs))

            forward, both = forward_and_both(attend, inputs, sent)
            found[f"{kind} {name} forward"] = time_of(forward)
            found[f"{kind} {name} forward + backward"] = time_of(both)
    return found


def main() -> None:
    """Time both trees in turn, print the ratios, keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="folder that holds the older lln package")
    parser.add_argument("new", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commits", nargs=2, metavar=("OLD", "NEW"), help="recorded with --out")
    parser.add_argument("--case", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case is not None:
        given.case.write_text(json.dumps(measure()), "utf-8")
        return
    rounds: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
    for _ in range(given.rounds):
        for name, found in rounds.items():
            path = f"{getattr(given, name)}{os.pathsep}{LAB}"
            words = ["lln_lab.benchmarks.two_trees", str(given.old), str(given.new)]
            found.append(in_own_process(words, {"PYTHONPATH": path}))
    best = {n: {k: min(r[k] for r in rs) for k in rs[0]} for n, rs in rounds.items()}
    for name, old in best["old"].items():
        new = best["new"][name]
        print(f"{name:48s} {old:8.4f} {new:8.4f} {new / old:6.3f}")
    if given.out:
        import torch

        content = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        # Without the folders, which are those of one machine.
        command = f"python -m lln_lab.benchmarks.two_trees OLD/src NEW/src --rounds {given.rounds}"
        content |= {"commits": given.commits, "command": command}
        content |= {"milliseconds": best}
        given.out.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
