"""Tables of pages: what they were chosen by, what they find, and what they take on a GPU."""

from __future__ import annotations

from typing import Any

from lln_lab.experiments.needle import summary
from lln_lab.experiments.page_rules import PAGES, USED
from lln_lab.markdown import source, table


def rules(results: dict[str, Any]) -> str:
    """Perplexity and the loss of copying of every way to choose, at every length."""
    rows = results["rows"]
    lengths = sorted({int(tokens) for cells in rows.values() for tokens in cells})
    titles = ["pages chosen by"]
    for tokens in lengths:
        titles += [f"perplexity, {tokens:,}", f"copy, {tokens:,}"]
    lines = []
    for name, cells in rows.items():
        line = [_called(name)]
        for tokens in lengths:
            cell = cells.get(str(tokens))
            line += [f"{cell['perplexity']:.2f}", f"{cell['copy']:.3f}"] if cell else ["", ""]
        lines.append(line)
    setup = results["setup"]
    many = ", ".join(f"{PAGES[tokens]} pages at {tokens:,} tokens" for tokens in lengths)
    caption = (
        "SmolLM2-135M-Instruct without training, English Wikipedia, window of 128, 16 sinks, pages "
        f"of 16 tokens, {many}; scores of 32 channels, found on other texts of the same length. "
        "*copy*: loss per token on the second half of a text whose halves are the same. Dense "
        f"prototypes, N × N. {setup['device']}, torch {setup['torch']}; {source(setup)}."
    )
    return table(titles, lines, caption)


def _called(name: str) -> str:
    """A rule that is used is marked."""
    if name == USED:
        return f"**{name}** (what `page_attention` does)"
    return name


def times(results: dict[str, Any]) -> str:
    """Milliseconds of pages and of softmax, and the ratio, for steps, long texts and tokens."""
    lines = []
    for row in results["rows"]:
        name = "forward + backward" if row["part"] == "training" else "forward"
        own, softmax = row["lln"][name], row["softmax"][name]
        read = f"{row['all'] / row['read']:.1f}×" if "read" in row else ""
        cells = [row["part"], row["heads"], str(row["batch"]), f"{row['tokens']:,}"]
        lines.append([*cells, f"{own:.3g}", f"{softmax:.3g}", f"{softmax / own:.2f}×", read])
    titles = ["", "heads", "texts", "tokens", "pages, ms", "softmax, ms", "faster", "fewer bytes"]
    setup = results["setup"]
    if "--device cpu" in setup["command"]:
        caption = (
            "One text, forward, float32, in turn with softmax; otherwise as on the GPU. "
            f"{setup['device']}, {setup['threads']} threads, torch {setup['torch']}; "
            f"{source(setup)}."
        )
        return table(titles[:-1], [line[:-1] for line in lines], caption)
    caption = (
        "*training*: forward and backward of an encoder's layer, window ±128 and 16 pages; "
        "*prefill*: a whole text, causal; *decode*: one token after so many. Both with window 127, "
        "16 sinks and 32 pages. Pages of 16 tokens, chosen by 32 channels, choice included. "
        "Softmax is PyTorch's fastest; *fewer bytes*: what softmax reads over what pages read. "
        f"bfloat16, CUDA graphs. {setup['device']}, torch {setup['torch']}; {source(setup)}."
    )
    return table(titles, lines, caption)


def needle(results: dict[str, Any]) -> str:
    """Whether a pass key is found, by row, length and depth."""
    setup = results["setup"]
    texts = sorted({cell["texts"] for cells in results["rows"].values() for cell in cells.values()})
    return (
        f"{summary(results)}\n\nShare of texts whose greedy answer is the pass key, said once at a "
        "depth of the text and asked for at its end; in brackets its log-probability less that "
        "with softmax, text by text, ± standard error. SmolLM2-135M-Instruct without training, "
        f"English Wikipedia, {' or '.join(map(str, texts))} texts per length. {setup['device']}, "
        f"torch {setup['torch']}; {source(setup)}."
    )
