"""Tables of sliding windows: the attention alone, and the encoder that is made of it."""

from __future__ import annotations

from typing import Any

from lln_lab.markdown import source, table

RIVALS = {"flex": "FlexAttention", "flash": "FlashAttention"}
PASSES = {"forward": "forward", "forward + backward": "fwd + bwd"}


def windows(results: dict[str, Any]) -> str:
    """Milliseconds of ours, and how many times faster than its rivals it is."""
    titles = ["N", "window"]
    for title in PASSES.values():
        titles += [f"lln, {title}", *(f"against {rival}" for rival in RIVALS.values())]
    lines = []
    for row in results["rows"]:
        cells = [f"{row['tokens']:,}", f"±{row['window']}"]
        for name in PASSES:
            own = row["lln"][name]
            cells += [f"{own:.3f}", *(f"{row[rival][name] / own:.2f}×" for rival in RIVALS)]
        lines.append(cells)
    setup = results["setup"]
    caption = (
        "Milliseconds, and times faster than FlexAttention compiled for the window and "
        "FlashAttention's windows as PyTorch has them; bfloat16, H = 12, D = 64, B·N = 65,536, "
        f"as CUDA graphs. {setup['device']}, torch {setup['torch']}; {source(setup)}."
    )
    return table(titles, lines, caption)


def encoder(results: dict[str, Any]) -> str:
    """Milliseconds and GiB of an encoder as it was, and converted."""
    own = results["rows"][0]["sdpa"]
    passes = {"": "forward", "step_": "fwd + bwd"} if "step_ms" in own else {"": "forward"}
    has_memory = "gib" in own
    titles = ["tokens", "texts"]
    for title in passes.values():
        titles += [f"SDPA, {title}", "converted", "times as fast"]
        titles += ["GiB, SDPA", "GiB, converted"] if has_memory else []
    lines = []
    for row in results["rows"]:
        before, after = row["sdpa"], row["lln_keys"]
        cells = [f"{row['tokens']:,}", str(row["batch"])]
        for prefix in passes:
            cells += [f"{side[prefix + 'ms']:,.0f} ms" for side in (before, after)]
            cells.append(f"{before[prefix + 'ms'] / after[prefix + 'ms']:.2f}×")
            if has_memory:
                cells += [f"{side[prefix + 'gib']:.1f}" for side in (before, after)]
        lines.append(cells)
    setup = results["setup"]
    what = "MiniLM's size (6 layers of 12 heads of 32), random weights; 64 exact keys. "
    if "minilm" not in setup["command"]:
        what = (
            "ModernBERT-base, random weights; two layers of three attend within ±64 tokens, "
            "as before, the others with 64 exact keys. "
        )
    machine = f"{setup['device']}, {setup['threads']} threads, torch {setup['torch']}"
    caption = f"{what}{machine}; {source(setup)}."
    return table(titles, lines, caption)


def speeds(results: dict[str, Any], lengths: tuple[int, ...]) -> str:
    """How many times as fast a converted encoder is at some lengths, in a sentence."""
    rows = {row["tokens"]: row for row in results["rows"]}
    found = [rows[tokens]["sdpa"]["ms"] / rows[tokens]["lln_keys"]["ms"] for tokens in lengths]
    first, *others = [f"{speed:.1f}" for speed in found]
    named = [f"{speed} at {tokens:,}" for speed, tokens in zip(others, lengths[1:], strict=True)]
    return (
        f"An encoder of MiniLM's size with 64 exact keys is {first} times as fast as with softmax "
        f"at {lengths[0]:,} tokens, {', '.join(named[:-1])} and {named[-1]} "
        "([table](lab/results/tables.md#on-a-cpu))"
    )


def ends(results: dict[str, Any]) -> str:
    """The rows of the longest and the shortest texts, in a sentence each."""
    rows = sorted(results["rows"], key=lambda one: one["tokens"])
    short, long = rows[0], rows[-1]
    before, after = long["sdpa"], long["lln_keys"]
    was, now = (short[name]["ms"] for name in ("sdpa", "lln_keys"))
    return (
        f"ModernBERT-base, converted, reads {long['tokens']:,} tokens in {after['ms']:.0f} ms and "
        f"{after['gib']:.1f} GiB, where it took {before['ms']:.0f} ms and {before['gib']:.1f} GiB; "
        f"{short['batch']} texts of {short['tokens']} take {now:.0f} ms (before: {was:.0f}) "
        "([both](lab/results/tables.md#sliding-windows))."
    )
