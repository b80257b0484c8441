"""The tables of recovery training in README and docs, from the experiment's results."""

from __future__ import annotations

import statistics
from typing import Any

from experiments.tables import table

NAMES = {
    "softmax": "softmax (the original)",
    "lln": "LLN",
    "lln_diag": "LLN + Diag",
    "lln_diag_gate": "LLN + Diag, learned gate",
    "diag": "Diag alone",
    "lln_keys": "LLN + 64 exact keys",
    "lln_keys_128": "LLN + 128 exact keys",
    "elu": "ELU + 1",
    "hedgehog": "Hedgehog",
    "hedgehog_diag": "Hedgehog + Diag",
}
# What README shows: the one other linear attention that does best.
SHOWN = ("softmax", "lln_keys", "lln", "lln_diag", "diag", "hedgehog")
STAGES = ("converted", "layers", "output")


def recovery(results: dict[str, Any]) -> str:
    """Cosine and rank correlation with the original, before, between and after."""
    setup, rows = results["setup"], results["rows"]
    lengths = list(setup["documents"])
    parts = []
    for measure, title in (("cosine", "cosine"), ("spearman", "Spearman")):
        head = [title, "seeds", *(f"{int(tokens):,} tokens" for tokens in lengths)]
        lines = []
        for name, label in NAMES.items():
            found = [row for key, row in rows.items() if key.split()[0] == name]
            if found:
                cells = [_cell(found, tokens, measure) for tokens in lengths]
                lines.append([label, str(len(found)) if name != "softmax" else "", *cells])
        parts.append(table(head, lines))
    held_out = ", ".join(f"{count} of {tokens}" for tokens, count in setup["documents"].items())
    parts.append(
        "Converted → every layer trained by itself → the whole trained; means over the seeds, ± "
        "their standard deviation at the end. Held-out texts: "
        f"{held_out} tokens. Training: {setup['layer_steps']} + {setup['end_steps']} steps of "
        f"{setup['batch_tokens']:,} tokens, {setup['train_tokens']:,} per text, bfloat16 by "
        f"autocast. {setup['note']} "
        f"{setup['device']}, torch {setup['torch']}, transformers {setup['transformers']}, commit "
        f"`{setup['commit']}`; made by `{setup['command']}`."
    )
    return "\n\n".join(parts)


def quality(results: dict[str, Any]) -> str:
    """What README shows: cosine with the original, converted and trained back."""
    columns = {
        "converted": ("converted", "512"),
        "trained back": ("output", "512"),
        "at 2,048 tokens": ("output", "2048"),
    }
    lines = []
    for name in SHOWN:
        found = [row for key, row in results["rows"].items() if key.split()[0] == name]
        # The original has one stage: nothing was done to it.
        cells = [
            _mean(found, stage if stage in found[0] else "converted", tokens, "cosine")
            for stage, tokens in columns.values()
        ]
        lines.append([NAMES[name], *cells])
    setup, seeds = results["setup"], len({key.split()[-1] for key in results["rows"]})
    return (
        f"{table(['attention', *columns], lines)}\n\nMean cosine of the sentence embeddings with "
        "the original's, all-MiniLM-L6-v2, held-out English Wikipedia, texts of 512 tokens unless "
        f"said otherwise; trained on {setup['layer_steps'] + setup['end_steps']:,} × "
        f"{setup['batch_tokens']:,} tokens without labels, 512 per text; means over {seeds} seeds. "
        "Exact keys have blocks of 64 tokens, the rows with Diag blocks of 32, the head width."
    )


def _mean(found: list[dict[str, Any]], stage: str, tokens: str, measure: str) -> str:
    return f"{statistics.mean(row[stage][tokens][measure] for row in found):.3f}"


def _cell(found: list[dict[str, Any]], tokens: str, measure: str) -> str:
    stages = []
    for stage in STAGES:
        numbers = [row[stage][tokens][measure] for row in found if stage in row]
        if numbers:
            stages.append(f"{statistics.mean(numbers):.3f}")
    if len(stages) == len(STAGES) and len(found) > 1:
        last = [row["output"][tokens][measure] for row in found]
        stages[-1] += f" ± {statistics.stdev(last):.3f}"
    return " → ".join(stages)
