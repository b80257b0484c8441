"""Simulate attention over ranks: ``python -m lln_lab.benchmarks.parallel_cost``.

Nothing is measured: the times come from `lln_lab.benchmarks.step_time`, and so do its assumptions.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from lln.errors import InvalidInputError
from lln.files import write_atomically
from lln_lab.benchmarks.step_time import Machine, layer_time
from lln_lab.benchmarks.traffic import KINDS, LayerShape
from lln_lab.compact import compact_json
from lln_lab.drawing import save
from lln_lab.markdown import table

COMMAND = "python -m lln_lab.benchmarks.parallel_cost"
RESULTS = Path("lab/results/benchmarks/parallel-cost.json")
FIGURE = Path("docs/figures/parallel_cost.svg")
RANKS = tuple(2**power for power in range(11))
LENGTHS = (2**16, 2**20, 2**24, 100_000_000)
HEADS, WIDTH = (16, 64), 64
# What the table and the figure show of them.
SHOWN_RANKS, SHOWN_HEADS = (1, 8, 64, 1024), 16
LABELS = {
    "lln": "lln",
    "lln_diag": "lln_diag",
    "lln_keys": "lln_keys",
    "ring": "ring (softmax)",
    "ulysses": "Ulysses (softmax)",
}
LOOKS = {
    "lln": ("#0072B2", "o", "-"),
    "lln_diag": ("#D55E00", "s", "-"),
    "lln_keys": ("#009E73", "^", "-"),
    "ring": ("#000000", "v", "--"),
    "ulysses": ("#CC79A7", "D", "--"),
}


def cases() -> list[dict]:
    """Every method, number of heads, length and number of ranks, with its simulated time."""
    rows = []
    for heads in HEADS:
        for tokens in LENGTHS:
            for ranks in RANKS:
                for kind in KINDS:
                    row = {"kind": kind, "heads": heads, "tokens": tokens, "ranks": ranks}
                    rows.append(row | simulated(kind, heads, tokens, ranks))
    return rows


def simulated(kind: str, heads: int, tokens: int, ranks: int) -> dict:
    """Milliseconds by part, or why there are none."""
    # The first rank has the longest shard, and a number of blocks of it.
    blocks = tokens // 64
    lengths = tuple(64 * (blocks // ranks + (one < blocks % ranks)) for one in range(ranks))
    try:
        found = layer_time(kind, LayerShape(lengths, heads=heads, width=WIDTH, asked=False))
    except InvalidInputError:
        return {"status": "more ranks than heads"}
    parts = {name: float(f"{1e3 * part:.4g}") for name, part in asdict(found).items()}
    return {"status": "fits" if found.fits else "does not fit"} | {
        f"{name}_ms": part for name, part in parts.items() if name != "fits"
    }


def times_table(rows: list[dict]) -> str:
    """Milliseconds over length and ranks."""
    lines = []
    for tokens in LENGTHS:
        for ranks in SHOWN_RANKS:
            place = {"heads": SHOWN_HEADS, "tokens": tokens, "ranks": ranks}
            beside = [row for row in rows if place.items() <= row.items()]
            lines.append([f"{tokens:,}", f"{ranks:,}", *map(_cell, beside)])
    machine = Machine()
    caption = (
        f"**Simulated, not measured**: milliseconds of one layer in a training step, {SHOWN_HEADS} "
        f"heads of {WIDTH} in bfloat16, batch 1. Assumed of a rank: softmax passes at "
        f"{machine.softmax_rate / 1e12:.0f} Tflop/s, ours at {machine.linear_rate / 1e12:.0f}, "
        f"exact keys at {machine.keys_rate / 1e12:.0f}, "
        f"{machine.node_bandwidth / 1e9:.0f} GB/s inside a node of {machine.node_ranks}, "
        f"{machine.network_bandwidth / 1e9:.0f} GB/s between nodes, "
        f"{1e6 * machine.collective_latency:.0f} µs per collective and doubling of the ranks, "
        f"{machine.memory / 1e9:.0f} GB. *too large*: query, key, value, output and their "
        f"gradients do not fit; an empty cell: more ranks than heads. Made by `{COMMAND}`."
    )
    return table(["tokens", "ranks", *LABELS.values()], lines, caption)


def _cell(row: dict) -> str:
    if row["status"] != "fits":
        return "*too large*" if row["status"] == "does not fit" else ""
    found = row["total_ms"]
    return f"{found:,.{2 if found < 10 else 1 if found < 100 else 0}f}"


def draw(rows: list[dict]) -> None:
    """Time over ranks, a panel per length."""
    shown = [row for row in rows if row["heads"] == SHOWN_HEADS and row["status"] == "fits"]

    def panels(figure) -> None:
        grid = figure.subplots(1, len(LENGTHS), sharey=True)
        for axes, tokens in zip(grid, LENGTHS, strict=True):
            for kind, (colour, marker, line) in LOOKS.items():
                own = [row for row in shown if (row["kind"], row["tokens"]) == (kind, tokens)]
                axes.plot(
                    [row["ranks"] for row in own],
                    [row["total_ms"] for row in own],
                    color=colour,
                    marker=marker,
                    linestyle=line,
                    markersize=4,
                    label=LABELS[kind],
                )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlim(0.8, 1300)
            axes.set_xticks(RANKS[::2], [f"{ranks:,}" for ranks in RANKS[::2]], fontsize=8)
            axes.set_title(f"{tokens:,} tokens", fontsize=10)
            axes.set_xlabel("ranks")
        grid[0].set_ylabel("milliseconds per layer and step")
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        figure.suptitle(
            f"Simulated, not measured: attention in a training step, {SHOWN_HEADS} heads of "
            f"{WIDTH}, bfloat16; a line begins where the tokens fit into the ranks' memory",
            fontsize=10,
        )

    save(FIGURE, (12.5, 4.0), panels)


def main() -> None:
    """Simulate, and keep the times."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    rows = cases()
    content = {
        "what": "a simulation, not a measurement",
        "command": COMMAND,
        "assumptions": asdict(Machine()),
        "cases": rows,
    }
    write_atomically(RESULTS, compact_json(content))
    print(times_table(rows))


if __name__ == "__main__":
    main()
