"""The attention systems in the documentation: from their cards and from results files."""

from __future__ import annotations

import re

from lln_lab import peers
from lln_lab.bench.peers_cells import ALONE, FILLED, FRAME
from lln_lab.bench.peers_table import TABLES, batch_of, systems_of, table_of
from lln_lab.markdown import source, table
from lln_lab.peers import listing

TITLES = {"milliseconds": "time", "peak_bytes": "memory"}


def cards_table() -> str:
    """Markdown: a line per system, as ``lln peers`` prints it."""
    heads, lines = listing.table()
    marked = [[f"[`{line[0]}`](#{line[0]})", *line[1:]] for line in lines]
    notes = " ".join(listing.notes()).replace("*", r"\*")
    return f"{table(heads, marked)}\n\n{notes}"


def cards_in_full() -> str:
    """Markdown: equation, paper, options, departures and oracle of every system, by family."""
    parts = []
    for family, names in peers.FAMILIES.items():
        shown = [name for name in names if name in peers.available()]
        if shown:
            parts.append(f"### {family[0].upper()}{family[1:]}")
            parts += [_card_in_full(name) for name in shown]
    return "\n\n".join(parts)


def summary(results: dict | None) -> str:
    """Markdown for README: the names by family, and the fastest of each where measured."""
    heads = ["family", "systems"]
    lengths = _timed_lengths(results) if results else []
    if results and lengths:
        heads.append(f"fastest at N = {lengths[-1]:,}")
    lines = []
    for family, names in peers.FAMILIES.items():
        shown = [name for name in names if name in peers.available()]
        if not shown:
            continue
        line = [family, ", ".join(f"`{name}`" for name in shown)]
        if results and lengths:
            line.append(_fastest(results, shown, lengths[-1]))
        lines.append(line)
    text = table(heads, lines)
    if results and lengths:
        text += f"\n\nForward + backward of one layer, batch 1, {_setting(results)}."
    return text


def efficiency(results: dict) -> str:
    """Markdown: the tables of one results file of ``lln bench peers``."""
    parts = []
    for part in (ALONE, FILLED):
        lines = _wide_table(results, part)
        if lines:
            batch = batch_of(results, part)
            parts += [f"**{batch[0].upper()}{batch[1:]}**", lines]
    limit = results["limit_seconds"]
    parts.append(
        f"{_setting(results)[0].upper()}{_setting(results)[1:]}; "
        f"{source(results['environment'])}. "
        f"*over {limit:g} s*: one call takes longer, or would by the growth of the shorter ones. "
        "Columns: N. An empty cell was not run."
    )
    return "\n\n".join(parts)


def _wide_table(results: dict, part: str) -> str:
    """Time and memory of one part side by side: a line per system."""
    heads, columns = ["system"], {}
    shown = [measure for measure in TABLES if measure.part == part]
    for measure in shown:
        lengths, lines = table_of(results, measure)
        unit = "ms" if measure.field == "milliseconds" else "MB"
        passes = "forward" if measure.passes == "forward" else "fwd + bwd"
        for index, length in enumerate(lengths[1:], 1):
            heads.append(f"{passes} {unit}, {length}" if index == 1 else length)
            for line in lines:
                columns[line[0], len(heads)] = line[index]
    names = [name for name in systems_of(results) if any(key[0] == name for key in columns)]
    if not names:
        return ""
    wide = [
        [f"`{name}`", *(columns.get((name, place), "") for place in range(2, len(heads) + 1))]
        for name in names
    ]
    return table(heads, wide)


def _card_in_full(name: str) -> str:
    card = peers.card(name)
    # A heading of its own, for the links of the table.
    lines = [f'#### <a id="{name}"></a>`{name}`: {card.title}', ""]
    lines.append(f"{_linked(card.citation)}. {card.kind.capitalize()}, {card.complexity}.")
    lines += ["", f"> `{card.equation}`", ""]
    facts = {
        "Options": ", ".join(
            f"`{one.name}={one.default!r}`"
            for one in peers.options_of(name)
            if one.name not in ("diagonal", "convolution")
        ),
        "Causal": card.causal_limit,
        "Random": card.random,
        "On a GPU": "" if card.repeats_on_gpu else listing.GPU_REPEATS,
        "Adds": "" if card.adds == "none" else card.adds,
        "Checked with": card.oracle,
        "Departures": card.departures,
    }
    lines += [f"- {label}: {text.rstrip('.')}." for label, text in facts.items() if text]
    return "\n".join(lines)


def _linked(citation: str) -> str:
    return re.sub(
        r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", citation
    ).rstrip(".")


def _timed_lengths(results: dict) -> list[int]:
    return sorted({row["tokens"] for row in _alone(results)})


def _alone(results: dict) -> list[dict]:
    return [
        row
        for row in results["cases"]
        if (row["part"], row["passes"], row["status"]) == (ALONE, "both", "timed")
        and row["system"] != FRAME
    ]


def _fastest(results: dict, names: list[str], tokens: int) -> str:
    rows = [row for row in _alone(results) if row["system"] in names and row["tokens"] == tokens]
    if not rows:
        return ""
    best = min(rows, key=lambda row: row["milliseconds"])
    return f"`{best['system']}`, {best['milliseconds']:.2f} ms"


def _setting(results: dict) -> str:
    environment, layer = results["environment"], results["layer"]
    threads = "" if environment.get("triton") else f", {environment['threads']} threads"
    return (
        f"{layer['width']} wide, {layer['heads']} heads, weights and tokens in {layer['dtype']}, "
        f"no padding, {environment['device']}{threads}, torch {environment['torch']}"
    )
