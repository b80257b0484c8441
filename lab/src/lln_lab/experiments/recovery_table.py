"""The tables of recovery training in README and docs, from the experiment's results."""

from __future__ import annotations

import statistics
from typing import Any

from lln_lab.markdown import commit_of, table

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
# What README shows of them: title → stage and tokens of the test.
COLUMNS = {
    "converted": ("converted", "512"),
    "trained back": ("output", "512"),
    "at 2,048 tokens": ("output", "2048"),
}
STAGES = ("converted", "layers", "output")


def recovery(results: dict[str, Any]) -> str:
    """Cosine and rank correlation with the original, before, between and after."""
    setup = results["setup"]
    lengths = list(setup["documents"])
    parts = []
    for measure, title in (("cosine", "cosine"), ("spearman", "Spearman")):
        head = [title, "seeds", *(f"{int(tokens):,} tokens" for tokens in lengths)]
        lines = []
        for name, label in NAMES.items():
            found = rows_of(results, name)
            if found:
                cells = [_cell(found, tokens, measure) for tokens in lengths]
                lines.append([label, str(len(found)) if name != "softmax" else "", *cells])
        parts.append(table(head, lines))
    held_out = ", ".join(f"{count} of {tokens}" for tokens, count in setup["documents"].items())
    parts.append(
        "Converted → every layer trained by itself → the whole trained; means over the seeds, ± "
        "their standard deviation at the end. Held-out texts: "
        f"{held_out} tokens. Training: {setup['layer_steps']} + {setup['end_steps']} steps of "
        f"{setup['batch_tokens']:,} tokens, {_per_text(setup)} per text, bfloat16 by "
        f"autocast. {setup['note']} "
        f"{setup['device']}, torch {setup['torch']}, transformers {setup['transformers']}, "
        f"{commit_of(setup)}; made by `{setup['command']}`."
    )
    return "\n\n".join(parts)


def quality(results: dict[str, Any], mixed: dict[str, Any]) -> str:
    """What README shows: cosine with the original, converted and trained back.

    Args:
        results: Trained on texts of 512 tokens.
        mixed: Trained on texts of 512 and of 2,048.
    """
    lines = [
        [NAMES[name], *_quality_cells(rows_of(results, name))]
        for name in SHOWN
        if rows_of(results, name)
    ]
    both = [f"{NAMES['lln_keys']}, trained on both lengths"]
    lines.insert(2, [*both, *_quality_cells(rows_of(mixed, "lln_keys"))])
    setup, seeds = results["setup"], len({key.split()[-1] for key in results["rows"]})
    return (
        f"{table(['attention', *COLUMNS], lines)}\n\nMean cosine of the sentence embeddings with "
        "the original's, all-MiniLM-L6-v2, held-out English Wikipedia, texts of 512 tokens unless "
        f"said otherwise; trained on {setup['layer_steps'] + setup['end_steps']:,} × "
        f"{setup['batch_tokens']:,} tokens without labels, 512 per text unless said otherwise; "
        f"means over {seeds} seeds. Blocks have 64 tokens."
    )


def rows_of(results: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The rows of an attention, one for each seed."""
    return [row for key, row in results["rows"].items() if key.split()[0] == name]


def _quality_cells(found: list[dict[str, Any]]) -> list[str]:
    # The original has one stage: nothing was done to it.
    return [
        _mean(found, stage if stage in found[0] else "converted", tokens, "cosine")
        for stage, tokens in COLUMNS.values()
    ]


def _per_text(setup: dict[str, Any]) -> str:
    # One number, or words where lengths are mixed.
    tokens = setup["train_tokens"]
    return f"{tokens:,}" if isinstance(tokens, int) else tokens


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
