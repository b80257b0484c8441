"""Converted encoders in short calls: as they were, with exact keys, with softmax, and by default.

    python -m lln_lab.benchmarks.short_calls measure --out lab/results/benchmarks/short-cuda.json
    python -m lln_lab.benchmarks.short_calls measure --device cpu --lengths 64 128 256 512 1024
    python -m lln_lab.benchmarks.short_calls fill lab/results/benchmarks/short-cuda.json

Encoders of RoBERTa-base's and MiniLM's size with random weights (bfloat16 on a GPU, float32 on a
CPU), batches of 1 and 16: milliseconds of a forward pass, the host's work included. The four run in
turn. Kept are medians, and medians of the ratios to the original of the same turn.

``fill`` writes the table of crossings that ships with the library, for the device of a file. For
every number of channels (texts times the model's width): the most tokens up to which softmax, at
every measured length, took at most 1.02 times what exact keys took. A row counts up to the
geometric mean of its number of channels and the next; the last one counts for any number.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lln.files import write_atomically
from lln.functional import softmax_way
from lln_lab.bench.environment import describe

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
BATCHES = (1, 16)
VOCABULARY = 30522
SIZES = {
    "minilm": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
    "roberta": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
}
SYSTEMS = ("sdpa", "exact keys", "softmax", "default")
ALWAYS = {"compiled": [[None, 1 << 40]], "plain": [[None, 1 << 40]]}
TABLE = Path(softmax_way.__file__).with_name("crossings.json")
# Softmax is the original's: where both take as long, it is what should run.
MARGIN = 1.02


def models(name: str, device: str, longest: int) -> dict[str, Any]:
    """The encoder as it was, and converted once for every other of `SYSTEMS`."""
    from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

    from lln.integrations.convert import convert

    kinds = {"minilm": (BertConfig, BertModel), "roberta": (RobertaConfig, RobertaModel)}
    of_config, of_model = kinds[name]
    torch.manual_seed(0)
    # RoBERTa counts its places from the padding's.
    sizes = {"max_position_embeddings": max(longest, 512) + 8, "vocab_size": VOCABULARY}
    config = of_config(**SIZES[name], **sizes)
    config._attn_implementation = "sdpa"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    original = of_model(config).to(device, dtype).eval()
    found = {system: copy.deepcopy(original) for system in SYSTEMS}
    sample = {"input_ids": torch.randint(5, VOCABULARY, (1, 512), device=device)}
    for system in SYSTEMS[1:]:
        convert(found[system], calibrate=sample, or_softmax=system != "exact keys")
    return found


@contextmanager
def always() -> Iterator[None]:
    """Softmax in calls of any length; every layer keeps what it decided here."""
    tables = dict(softmax_way.CROSSINGS)
    softmax_way.CROSSINGS.clear()
    softmax_way.CROSSINGS.update({"cpu": ALWAYS, "cuda": ALWAYS})
    try:
        yield
    finally:
        softmax_way.CROSSINGS.clear()
        softmax_way.CROSSINGS.update(tables)


@torch.no_grad()
def one_pass(model: Any, ids: torch.Tensor) -> float:
    """Milliseconds of a forward pass."""
    on_gpu = ids.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    model(ids)
    if on_gpu:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def measure(
    device: str, lengths: list[int], names: list[str], batches: list[int], seconds: float
) -> Iterator[dict[str, Any]]:
    """A row per encoder, batch and length.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        lengths: Tokens.
        names: Of `SIZES`.
        batches: Texts.
        seconds: What the turns of a row may take; at least five are made.
    """
    for name in names:
        systems = models(name, device, max(lengths))
        for batch in batches:
            for tokens in lengths:
                ids = torch.randint(5, VOCABULARY, (batch, tokens), device=device)
                times: dict[str, list[float]] = {system: [] for system in SYSTEMS}
                start, turn = time.perf_counter(), 0
                # The first two turns warm up, and may compile kernels.
                while turn < 7 or (time.perf_counter() - start < seconds and turn < 200):
                    start = time.perf_counter() if turn == 2 else start
                    # Who runs first has other caches.
                    for system in SYSTEMS[turn % 4 :] + SYSTEMS[: turn % 4]:
                        with always() if system == "softmax" else nullcontext():
                            times[system].append(one_pass(systems[system], ids))
                    turn += 1
                kept = {system: found[2:] for system, found in times.items()}
                row: dict[str, Any] = {"model": name, "batch": batch, "tokens": tokens}
                row["turns"] = len(kept["sdpa"])
                for system, found in kept.items():
                    pairs = zip(found, kept["sdpa"], strict=True)
                    ratio = median(own / sdpa for own, sdpa in pairs)
                    row[system] = {"ms": median(found), "best": min(found), "ratio": ratio}
                shown = "  ".join(
                    f"{s} {row[s]['ms']:.2f} ({row[s]['ratio']:.3f})" for s in SYSTEMS
                )
                print(f"{name} {batch} x {tokens}: {shown}", flush=True)
                yield row


def crossings(rows: list[dict[str, Any]]) -> list[list[int | None]]:
    """The rows of the table for passes and kernels: most channels, most tokens."""
    counts = sorted({channels_of(row) for row in rows})
    found: list[list[int | None]] = []
    for count, after in zip(counts, [*counts[1:], None], strict=True):
        most = 0
        for row in sorted(rows, key=itemgetter("tokens")):
            if channels_of(row) != count:
                continue
            if row["softmax"]["ms"] > MARGIN * row["exact keys"]["ms"]:
                break
            most = row["tokens"]
        bound = None if after is None else int((count * after) ** 0.5)
        if found and found[-1][1] == most:
            found.pop()
        found.append([bound, most])
    return found


def channels_of(row: dict[str, Any]) -> int:
    """Texts times the width of the model."""
    return row["batch"] * SIZES[row["model"]]["hidden_size"]


def fill(file: Path) -> None:
    """Put what a file of `measure` says into the table that ships."""
    measured = json.loads(file.read_text("utf-8"))
    table = json.loads(TABLE.read_text("utf-8"))
    device = measured["device"]
    table["crossings"][device]["compiled"] = crossings(measured["rows"])
    table["measured_on"][device] = measured["machine"]
    write_atomically(TABLE, shown(table))


def shown(table: dict[str, Any]) -> str:
    """The table as its file has it, a list per line."""
    lines = []
    for device, kinds in table["crossings"].items():
        own = [f'   "{kind}": {json.dumps(rows)}' for kind, rows in kinds.items()]
        lines.append(f'  "{device}": {{\n' + ",\n".join(own) + "\n  }")
    head = json.dumps({key: table[key] for key in ("rule", "measured_on")}, indent=1)
    return head[:-2] + ',\n "crossings": {\n' + ",\n".join(lines) + "\n }\n}\n"


def main() -> None:
    """Measure, print and keep; or fill the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    run = parts.add_parser("measure")
    run.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    run.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    run.add_argument("--models", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    run.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    run.add_argument("--seconds", type=float, default=1.5)
    run.add_argument("--out", type=Path)
    parts.add_parser("fill").add_argument("file", type=Path)
    given = parser.parse_args()
    if given.part == "fill":
        fill(given.file)
        return
    command = f"python -m lln_lab.benchmarks.short_calls measure --device {given.device}"
    content: dict[str, Any] = {"setup": describe(given.device, command), "device": given.device}
    on_gpu = given.device == "cuda"
    content["machine"] = (
        torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} threads"
    )
    content["rows"] = []
    options = (given.device, given.lengths, given.models, given.batches, given.seconds)
    for row in measure(*options):
        content["rows"].append(row)
        if given.out:
            # After every row, so that a run that is stopped leaves what it has measured.
            write_atomically(given.out, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
