"""The table of training steps through transformers in docs/huggingface.md, from its results."""

from __future__ import annotations

from typing import Any

from lln_lab.markdown import commit_of, table

NAMES = {
    "sdpa": "softmax (SDPA)",
    "lln fixed": "LLN, fixed statistics",
    "lln running": "LLN, running",
    "lln sample": "LLN, of each sample",
    "lln_diag fixed": "LLN + Diag, fixed",
    "lln_diag running": "LLN + Diag, running",
    "lln_diag sample": "LLN + Diag, of each sample",
}


def training_steps(results: dict[str, Any]) -> str:
    """Milliseconds per step, and how many times faster than softmax; what was not run is empty."""
    setup, rows = results["setup"], results["rows"]
    lengths = sorted({int(name.split("N=")[1]) for name in rows})
    lines = []
    for key, label in NAMES.items():
        cells = []
        for tokens in lengths:
            own, base = (rows.get(f"{name} N={tokens}") for name in (key, "sdpa"))
            cells.append("" if own is None else f"{own['milliseconds']:.0f}")
            if own is not None and base is not None and key != "sdpa":
                cells[-1] += f" ({base['milliseconds'] / own['milliseconds']:.2f}×)"
        lines.append([label, *cells])
    heads = ["ms per step", *(f"N = {tokens:,}" for tokens in lengths)]
    return (
        f"{table(heads, lines)}\n\nMedians (times faster than SDPA): forward, masked-word loss, "
        f"backward and AdamW, {setup['layers']} layers, {setup['tokens']:,} tokens per batch, "
        f"{setup['precision']}, random weights and tokens. An empty cell was not run. "
        f"{setup['device']}, torch {setup['torch']}, transformers {setup['transformers']}, "
        f"{commit_of(setup)}; made by `{setup['command']}`."
    )
