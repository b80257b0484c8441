"""Attention inside a sliding window against its rivals, and encoders as they were and converted.

    python -m lln_lab.benchmarks.windows attention --out lab/results/benchmarks/windows-cuda.json
    python -m lln_lab.benchmarks.windows encoder --out lab/results/benchmarks/modernbert-cuda.json
    python -m lln_lab.benchmarks.windows encoder --device cpu --lengths 256 1024 4096
    python -m lln_lab.benchmarks.windows minilm --device cpu

``attention`` compares `lln.window_attention` with FlexAttention, compiled for the window, and with
FlashAttention's windows, as PyTorch has them; times are those of CUDA graphs, B · N = 65,536.
``encoder`` is ModernBERT-base with random weights, two layers of three with a window of 64 tokens
to each side: as transformers runs it with SDPA, and converted to ``lln_keys``. On a GPU in bfloat16
with B · N = 32,768, forward, and forward and backward; on a CPU in float32 with one text, forward.
Both run in turn, the best of some rounds.
``minilm`` is the same of a BERT of MiniLM's size, which has no windows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lln
from lln.files import write_atomically
from lln_lab.bench.environment import describe
from lln_lab.benchmarks.call_times import graph_ms
from lln_lab.benchmarks.keys import both_ways

HEADS, WIDTH, TOKENS = 12, 64, 65536
WINDOWS = (64, 512)
ENCODER_TOKENS = 32768
ROUNDS = {"cuda": 10, "cpu": 3}
VOCABULARY = 50368
MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": VOCABULARY,
}


def flex(window: int, tokens: int) -> Callable[..., Any]:
    """FlexAttention with this window, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def near(_batch: Any, _head: Any, row: Any, key: Any) -> Any:
        return (row - key).abs() <= window

    mask = create_block_mask(near, None, None, tokens, tokens, device="cuda")
    return partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)


class _Flash(torch.autograd.Function):
    """FlashAttention with a window, ``[B, H, T, D]``."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        *sides, window = inputs
        sides = [side.transpose(1, 2) for side in sides]
        ctx.options = {"window_size_left": window, "window_size_right": window}
        ctx.lengths = (None, None, sides[0].shape[1], sides[0].shape[1], 0.0, False)
        found = torch.ops.aten._flash_attention_forward(*sides, *ctx.lengths, False, **ctx.options)
        ctx.save_for_backward(*sides, *found[:4])
        return found[0].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        *sides, out, norm, seed, offset = ctx.saved_tensors
        above = gradients[0].transpose(1, 2)
        given = (above, *sides, out, norm, *ctx.lengths, seed, offset)
        made = torch.ops.aten._flash_attention_backward(*given, **ctx.options)
        return *(side.transpose(1, 2) for side in made), None


def attention(lengths: list[int]) -> Iterator[dict[str, Any]]:
    """A row per length and window: every system forward, and forward and backward."""
    for tokens in lengths:
        # Else the compiler gives up on a function that it has compiled for many masks.
        torch._dynamo.reset()
        shape = (TOKENS // tokens, HEADS, tokens, WIDTH)
        inputs = [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        ]
        for window in WINDOWS:
            systems = {
                "lln": partial(lln.window_attention, window=window),
                "flex": flex(window, tokens),
                "flash": lambda *sides, window=window: _Flash.apply(*sides, window),
            }
            row: dict[str, Any] = {"tokens": tokens, "batch": shape[0], "window": window}
            row |= {name: both_ways(call, inputs, graph_ms) for name, call in systems.items()}
            print(row, flush=True)
            yield row


def encoder(device: str, lengths: list[int], part: str) -> Iterator[dict[str, Any]]:
    """A row per length: milliseconds of a pass; on a GPU peak GiB, too, and those of a step."""
    from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel

    from lln.integrations.convert import convert

    kinds = {"encoder": (ModernBertConfig, ModernBertModel), "minilm": (BertConfig, BertModel)}
    of_config, of_model = kinds[part]
    sizes = MINILM if part == "minilm" else {}

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    models: dict[str, Any] = {}
    for name in ("sdpa", "lln_keys"):
        config = of_config(max_position_embeddings=max(512, *lengths), **sizes)
        config._attn_implementation = "sdpa"
        models[name] = of_model(config).to(device, dtype).eval()
    models["lln_keys"].load_state_dict(models["sdpa"].state_dict())
    sample = {"input_ids": torch.randint(VOCABULARY, (1, 512), device=device)}
    convert(models["lln_keys"], "lln_keys", calibrate=sample)
    for tokens in lengths:
        batch = ENCODER_TOKENS // tokens if device == "cuda" else 1
        ids = torch.randint(VOCABULARY, (batch, tokens), device=device)
        row: dict[str, Any] = {"tokens": tokens, "batch": batch}
        passes = {"": one_pass} | ({"step_": one_step} if device == "cuda" else {})
        for prefix, run in passes.items():
            # The first one warms up.
            found = {name: [run(model, ids)][1:] for name, model in models.items()}
            # The shorter a pass, the more others disturb it.
            for _ in range(max(ROUNDS[device], 16384 // (batch * tokens))):
                for name, model in models.items():
                    found[name].append(run(model, ids))
            for name, made in found.items():
                own = row.setdefault(name, {})
                own[f"{prefix}ms"] = min(ms for ms, _ in made)
                if device == "cuda":
                    own[f"{prefix}gib"] = made[-1][1]
        print(row, flush=True)
        yield row


@torch.no_grad()
def one_pass(model: Any, ids: torch.Tensor) -> tuple[float, float]:
    """Milliseconds and peak GiB of a forward pass."""
    return timed(lambda: model(ids), ids)


def one_step(model: Any, ids: torch.Tensor) -> tuple[float, float]:
    """The same of a forward and a backward pass."""
    model.zero_grad(set_to_none=True)
    found = timed(lambda: model(ids).last_hidden_state.float().square().mean().backward(), ids)
    model.zero_grad(set_to_none=True)
    return found


def timed(work: Callable[[], Any], ids: torch.Tensor) -> tuple[float, float]:
    """Milliseconds of some work, and peak GiB on a GPU."""
    on_gpu = ids.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    ms = 1e3 * (time.perf_counter() - start)
    return ms, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("attention", "encoder", "minilm"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    usual = [512, 2048, 8192, 16384, 32768]
    if given.device == "cpu":
        usual = [256, 512, 1024, 2048, 4096]
        usual = [64, *usual] if given.part == "minilm" else [*usual, 8192]
    command = f"python -m lln_lab.benchmarks.windows {given.part} --device {given.device}"
    content: dict[str, Any] = {"setup": describe(given.device, command), "rows": []}
    lengths = given.lengths or usual
    if given.part == "attention":
        rows = attention(lengths)
    else:
        rows = encoder(given.device, lengths, given.part)
    for row in rows:
        content["rows"].append(row)
        if given.out:
            # After every row, so that a run that is stopped leaves what it has measured.
            write_atomically(given.out, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
