"""Draw the README's speed figure and table from results: ``python -m benchmarks.report``.

Nothing in the README's marked section is written by hand; this program puts it there.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import pairwise
from pathlib import Path

RESULTS = Path("benchmarks/results/cpu.json")
FIGURE = Path("docs/figures/cpu_speed.svg")
README = Path("README.md")
BEGIN, END = "<!-- cpu-speed: begin -->", "<!-- cpu-speed: end -->"

SERIES = {
    "sdpa": ("softmax (SDPA)", "#222222"),
    "lln": ("LLN", "#0072B2"),
    "lln_matched": ("LLN, moments matched", "#56B4E9"),
    "lln_diag": ("LLN + Diag", "#D55E00"),
}


def main() -> None:
    """Read the results, write the figure and the README's section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = json.loads(options.results.read_text())
    times = {
        (row["operation"], row["backward"], row["tokens"]): row.get("milliseconds")
        for row in results["cases"]
    }
    draw(times, results["environment"])
    text = README.read_text("utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    section = table(times, results["environment"])
    README.write_text(f"{before}{BEGIN}\n{section}\n{END}{after}", "utf-8")


def table(times: dict, environment: dict) -> str:
    """Markdown: milliseconds, and how many times faster than SDPA."""
    lengths = sorted({tokens for _, _, tokens in times})
    lines = [
        "| N | SDPA | LLN | LLN matched | LLN + Diag "
        "| SDPA fwd+bwd | LLN | LLN matched | LLN + Diag |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for tokens in lengths:
        cells = [str(tokens)]
        for backward in (False, True):
            base = times.get(("sdpa", backward, tokens))
            for operation in SERIES:
                found = times.get((operation, backward, tokens))
                if found is None:
                    cells.append("")
                elif operation == "sdpa":
                    cells.append(f"{found:.1f}")
                else:
                    cells.append(f"{found:.1f} ({base / found:.1f}×)" if base else f"{found:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    lines.append(
        f"Milliseconds (times faster than SDPA) on {environment['device']}, "
        f"{environment['threads']} threads, float32, B = 1, H = 12, D = 64, torch "
        f"{environment['torch']}; made by `{environment['command']}`, commit "
        f"`{environment['commit'][:10]}`."
    )
    return "\n".join(lines)


def draw(times: dict, environment: dict) -> None:
    """Time over N, log-log, with the crossover marked."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "lln"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.8), sharey=True, layout="constrained")
    for axis, backward in zip(axes, (False, True), strict=True):
        for operation, (label, colour) in SERIES.items():
            points = sorted(
                (tokens, found)
                for (name, back, tokens), found in times.items()
                if name == operation and back == backward and found is not None
            )
            axis.plot(*zip(*points, strict=True), "o-", color=colour, label=label, markersize=4)
        cross = crossover(times, "lln_matched", backward)
        if cross:
            axis.axvline(cross, color="#888888", linewidth=1, linestyle=":")
            axis.annotate(
                f"matched LLN is faster\nfrom N ≈ {cross:.0f}",
                (cross, axis.get_ylim()[1]),
                xytext=(5, -4),
                textcoords="offset points",
                va="top",
                fontsize=8,
                color="#555555",
            )
        axis.set(xscale="log", yscale="log", xlabel="tokens N")
        axis.set_title("forward + backward" if backward else "forward", fontsize=10)
        ticks = sorted({tokens for _, _, tokens in times})
        axis.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("milliseconds")
    axes[0].legend(fontsize=8, loc="lower right")
    figure.suptitle(
        f"{environment['device']}, {environment['threads']} threads, float32, H = 12, D = 64, "
        f"torch {environment['torch']}",
        fontsize=9,
    )
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, metadata={"Date": None})
    figure.savefig(FIGURE.with_suffix(".png"), dpi=130)
    plt.close(figure)


def crossover(times: dict, operation: str, backward: bool) -> float | None:
    """Where the operation becomes faster than SDPA, by interpolation on the log-log line."""
    lengths = sorted({tokens for _, _, tokens in times})
    ratios = []
    for tokens in lengths:
        base, found = (times.get((name, backward, tokens)) for name in ("sdpa", operation))
        if base and found:
            ratios.append((math.log(tokens), math.log(base / found)))
    for (x0, y0), (x1, y1) in pairwise(ratios):
        if y0 <= 0 < y1:
            return math.exp(x0 + (x1 - x0) * -y0 / (y1 - y0))
    return None


if __name__ == "__main__":
    main()
