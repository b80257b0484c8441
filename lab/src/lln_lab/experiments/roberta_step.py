"""Time of one training step of RoBERTa-base with softmax (SDPA) and LLN attention.

    python -m lln_lab.experiments.roberta_step                   # a GPU: bfloat16 autocast
    python -m lln_lab.experiments.roberta_step --cpu --lengths 128 --layers 2

A step is forward, masked-language loss, backward and AdamW, on random weights and tokens, with the
same number of tokens at every length. Medians go to a JSON file as they are measured.
"""

import argparse
import json
import shlex
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import RobertaConfig, RobertaForMaskedLM

from lln.integrations.convert import convert
from lln_lab.bench.command import command_of
from lln_lab.bench.environment import describe
from lln_lab.experiments.cells import read_results

# Name → (implementation, statistics); None = softmax.
ROWS = {
    "sdpa": None,
    "lln fixed": ("lln", "fixed"),
    "lln running": ("lln", "running"),
    "lln sample": ("lln", "sample"),
    "lln_diag fixed": ("lln_diag", "fixed"),
    "lln_diag running": ("lln_diag", "running"),
    "lln_diag sample": ("lln_diag", "sample"),
}


def build(row, tokens, layers, device):
    """RoBERTa-base for that length, converted as the row says, ready to train."""
    torch.manual_seed(0)
    config = RobertaConfig(max_position_embeddings=tokens + 2, num_hidden_layers=layers)
    model = RobertaForMaskedLM(config).to(device)
    if row is not None:
        attention, kind = row
        ids = torch.randint(5, 50_000, (1, min(tokens, 512)), device=device)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        calibrate = {} if kind == "sample" else {"calibrate": batch}
        convert(
            model,
            attention,
            statistics=kind,
            block_size=64,
            batch=batch,
            verbose=False,
            **calibrate,
        )
    return model.train()


def measure(model, ids, repeats, bf16):
    """Seconds of every step after two to warm up, and the peak of memory."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    cuda = ids.is_cuda
    seconds = []
    for _ in range(repeats + 2):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    return seconds[2:], peak


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--tokens", type=int, default=16384, help="in a step")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument(
        "--out", type=Path, default=Path("lab/results/experiments/roberta_step.json")
    )
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    given = {
        name: [shlex.quote(str(one)) for one in value] if isinstance(value, list) else value
        for name, value in vars(options).items()
        if name not in ("out", "cpu") and value != parser.get_default(name)
    }
    program = "python -m lln_lab.experiments.roberta_step" + (" --cpu" if options.cpu else "")
    device = "cuda" if torch.cuda.is_available() and not options.cpu else "cpu"
    results = read_results(options.out, {"rows?": dict})
    results["setup"] = {
        **describe(device, command_of(program, given)),
        "transformers": transformers.__version__,
        "layers": options.layers,
        "tokens": options.tokens,
        "precision": "bfloat16 autocast" if device == "cuda" else "float32",
    }
    rows = results.setdefault("rows", {})
    for length in options.lengths:
        for row in options.rows:
            name = f"{row} N={length}"
            if name in rows:
                continue
            batch = max(options.tokens // length, 1)
            model = build(ROWS[row], length, options.layers, device)
            ids = torch.randint(5, 50_000, (batch, length), device=device)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds, peak = measure(model, ids, options.repeats, device == "cuda")
            rows[name] = {
                "milliseconds": 1e3 * statistics.median(seconds),
                "all": [1e3 * part for part in seconds],
                "batch": batch,
                "peak_gib": peak,
            }
            options.out.parent.mkdir(parents=True, exist_ok=True)
            part = options.out.with_suffix(".part")
            part.write_text(json.dumps(results, indent=1) + "\n")
            part.replace(options.out)
            print(f"{name}: {rows[name]['milliseconds']:.1f} ms a step", flush=True)
            del model


if __name__ == "__main__":
    main()
