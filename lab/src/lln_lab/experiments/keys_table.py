"""The tables of exact keys: selections on one head, and whole models converted without training."""

from __future__ import annotations

import math
import re
import statistics
from typing import Any

from lln_lab.markdown import commit_of, commits_of, table

# Rows of lab/results/experiments/keys_conversion.json in the order of the table.
CONVERTED = {
    "lln_diag": "LLN + Diag, the paper's average",
    "diag": "Diag alone",
    "keys 0": "block and slots, no keys",
    "keys 32": "32 keys",
    "keys 64": "64 keys",
    "keys 64, half by query": "64 keys, half of them by query",
    "keys 64, groups of 16": "64 keys for every 16 queries",
    "keys 128": "128 keys",
}
# Rows of lab/results/experiments/decoder_conversion.json.
DECODERS = {
    "softmax": "softmax (the original)",
    "lln": "LLN",
    "lln_diag": "LLN + Diag",
    "diag": "blocks of 64 alone",
    "keys 64": "exact keys, 64 per query",
    "keys 128": "exact keys, 128 per query",
    "pages 16": "window of 127, 16 sinks, 16 pages of 16",
    "pages": "… 32 pages (the default)",
    "pages 16, window 255": "… 16 pages, window of 255",
    "window 255": "… 32 pages, window of 255",
}
# In results of a choice that the library had: every query by its two strongest features.
BY_QUERY = ", by query"
SELECTIONS = {
    "none": "none",
    "random": "at random",
    "query": "by a query's strongest features",
    "half": "half by the block's mean query, half by features",
    "group64": "by the block's mean query",
    "group32": "by the mean of 32 queries",
    "group16": "by the mean of 16 queries",
    "group8": "by the mean of 8 queries",
    "oracle": "the largest true mass of a block (oracle)",
}


def conversion(results: dict[str, Any]) -> str:
    """Cosine with the original's embeddings; a cell that was not run is empty."""
    lengths = sorted({tokens for cells in results["rows"].values() for tokens in cells}, key=int)
    rows = [["softmax (the original)", *["1.000"] * len(lengths)]]
    for name, shown in CONVERTED.items():
        cells = results["rows"].get(name, {})
        rows.append([shown, *(_cell(cells.get(tokens)) for tokens in lengths)])
    setup = results["setup"]
    text = table(["attention", *(f"{int(tokens):,} tokens" for tokens in lengths)], rows)
    texts = max(cell["texts"] for cells in results["rows"].values() for cell in cells.values())
    return (
        f"{text}\n\nMean cosine of the sentence embeddings with the original's, all-MiniLM-L6-v2, "
        f"{texts} held-out texts of English Wikipedia, ± standard error; blocks of 64, no "
        f"training; α, β and offset found on {setup['calibration_texts']} other texts. Made by "
        f"`{setup['command']}`, torch {setup['torch']}, {commit_of(setup)}."
    )


def decoder(results: dict[str, Any]) -> str:
    """Perplexity and the loss of copying at every length; a cell that was not run is empty."""
    lengths = sorted({tokens for cells in results["rows"].values() for tokens in cells}, key=int)
    rows = []
    for name, shown in DECODERS.items():
        if name not in results["rows"]:
            continue
        cells = [results["rows"][name].get(tokens) for tokens in lengths]
        row = [
            [f"{cell['perplexity']:,.2f}", f"{cell['copy']:.2f}"] if cell else ["", ""]
            for cell in cells
        ]
        rows.append([shown, *(entry for pair in row for entry in pair)])
    header = [f"{what}, {int(tokens):,}" for tokens in lengths for what in ("perplexity", "copy")]
    setup, softmax = results["setup"], results["rows"]["softmax"]
    texts = " and ".join(
        f"{softmax[tokens]['texts']} of {int(tokens):,} tokens" for tokens in lengths
    )
    return (
        f"{table(['attention', *header], rows)}\n\nSmolLM2-135M-Instruct on texts of English "
        f"Wikipedia, {texts}, no training; α, β and offset found on {setup['calibration_texts']} "
        f"other texts. Made by `{setup['command']}`, {setup['device']}, torch {setup['torch']}, "
        f"commit `{setup['commit'][:10]}`."
    )


def selection(results: dict[str, Any]) -> str:
    """Median error of the heads by selection, 64 keys per group."""
    lengths = sorted(results["errors"], key=int)
    found = {
        tokens: {name.removesuffix(" K=64"): row for name, row in results["errors"][tokens].items()}
        for tokens in lengths
    }
    rows = []
    for name, shown in SELECTIONS.items():
        cells = [found[tokens].get(name) for tokens in lengths]
        rows.append([shown, *("" if cell is None else f"{cell['median']:.3f}" for cell in cells)])
    text = table(["64 keys chosen", *(f"{int(tokens):,} tokens" for tokens in lengths)], rows)
    return (
        f"{text}\n\n‖out - softmax's‖ / ‖softmax's‖, median over the 72 heads of all-MiniLM-L6-v2 "
        "on its own activations; slots of keys that are not centred, offset found on other texts; "
        "3 to 4 texts. Made by `python -m lln_lab.experiments.keys_prototype`, "
        f"{commit_of(results['setup'])}."
    )


def from_scratch(results: list[dict]) -> str:
    """Mean ± standard deviation over the seeds, and how far from diag to diag/softmax that is."""
    groups: dict[tuple, list[dict]] = {}
    for result in results:
        config = result["config"]
        own = re.search(r"\+keys(\d+)", config["variant"])
        keys = int(own[1]) if own else config["sizes"]["keys"]
        place = (config["sizes"]["length"], config["steps"], config["variant"], keys)
        groups.setdefault(place, []).append(result)
    means = {
        place: statistics.mean(one["valid_loss"] for one in group)
        for place, group in groups.items()
    }

    def end(length: int, steps: int, name: str) -> float:
        found = [mean for place, mean in means.items() if place[:3] == (length, steps, name)]
        return found[0] if found else math.nan

    rows = []
    for place in sorted(groups, key=lambda place: (place[:2], means[place])):
        length, steps, name, keys = place
        losses = [one["valid_loss"] for one in groups[place]]
        spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
        diag, softmax = end(length, steps, "diag"), end(length, steps, "diag/softmax")
        way = (diag - means[place]) / (diag - softmax) if diag != softmax else math.nan
        cells = [name, keys, length, steps, len(losses), f"{means[place]:.3f}{spread}"]
        cells.append("" if math.isnan(way) else f"{way:.0%}")
        rows.append([str(cell) for cell in cells])
    head = "layers,K,tokens,steps,seeds,validation loss,diag → diag/softmax"
    first = results[0]
    sizes, setup = first["config"]["sizes"], first["setup"]
    seeds = ", ".join(str(seed) for seed in sorted({one["config"]["seed"] for one in results}))
    return (
        f"{table(head.split(','), rows)}\n\nMasked language model on English Wikipedia, "
        f"{sizes['layers']} layers, {sizes['width']} wide, {sizes['heads']} heads, blocks of "
        f"{sizes['block']}, {first['config']['batch_tokens']:,} tokens per step; validation loss "
        "in nats, mean ± standard deviation over the seeds. *A / B*: layers alternate. "
        f"{setup['device']}, torch {setup['torch']}; seeds {seeds}; "
        f"{commits_of([one['setup'] for one in results])}; made by "
        "`lln_lab.experiments.keys_training` of these commits; `python -m lln_lab.experiments run "
        "keys` trains such models today."
    )


def speed(results: dict[str, Any]) -> str:
    """Milliseconds forward and with backward, and how much faster than softmax the latter is."""
    settings = [name for name in results["rows"][0] if name.startswith("keys ")]
    has_memory = "memory" in results["rows"][0][settings[0]]
    head = ["tokens", "softmax", *(_setting(name) for name in settings), "faster than softmax"]
    rows = []
    for row in results["rows"]:
        times = [_times(row[name]) for name in ("softmax", *settings)]
        both = "forward + backward"
        ratio = row["softmax"][both] / row[settings[0]][both]
        memory = [f"{row[settings[0]]['memory']:.2f}"] if has_memory else []
        rows.append([f"{row['tokens']:,}", *times, f"{ratio:.2f}×", *memory])
    head += ["memory"] if has_memory else []
    setup, gone = results["setup"], ""
    if any(name.endswith(BY_QUERY) for name in settings):
        gone = " Made before keys by query were removed from the library."
    kind = "Medians of CUDA graphs, bfloat16" if has_memory else "Best of seven calls, float32"
    batch = "65,536 tokens in a batch" if has_memory else "batch 1"
    return (
        f"{table(head, rows)}\n\nMilliseconds, forward / forward and backward; the last columns "
        f"are those of {_setting(settings[0])}. {kind}, {batch}, {results['heads']} heads of "
        f"{results['width']}, α, β and offset given, choosing keys included. {setup['device']}, "
        f"torch {setup['torch']}, {commit_of(setup)}; made by `{setup['command']}`.{gone}"
    )


def _setting(name: str) -> str:
    """``keys 64, groups of 16`` in words; groups of a block need none."""
    keys, _, group = name.removeprefix("keys ").partition(", groups of ")
    if keys.endswith(BY_QUERY):
        return f"{keys.removesuffix(BY_QUERY)} keys by query"
    return f"{keys} keys" if group == "64" else f"{keys} keys per {group} queries"


def _times(found: dict[str, float]) -> str:
    return f"{found['forward']:.2f} / {found['forward + backward']:.2f}"


def _cell(cell: dict[str, Any] | None) -> str:
    return "" if cell is None else f"{cell['cosine']:.3f} ± {cell['error_of_mean']:.3f}"
