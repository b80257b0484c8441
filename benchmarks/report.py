"""Draw the figure and write the tables of README and docs: ``python -m benchmarks.report``.

Nothing between their marks is written by hand; this program puts it there.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import pairwise
from pathlib import Path

RESULTS = Path("benchmarks/results")
FIGURE = Path("docs/figures/cpu_speed.svg")
CONSTANTS = Path("src/lln/constants.json")

SERIES = {
    "sdpa": ("softmax (SDPA)", "#222222"),
    "lln": ("LLN", "#0072B2"),
    "lln_matched": ("LLN, moments matched", "#56B4E9"),
    "lln_diag": ("LLN + Diag", "#D55E00"),
}


def main() -> None:
    """Read the results, write the figure and the marked sections."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    cpu = json.loads((RESULTS / "cpu.json").read_text())
    times = times_of(cpu)
    draw(times, cpu["environment"])
    fill(Path("README.md"), "cpu-speed", table(times, cpu["environment"]))
    fill(Path("README.md"), "gpu-speed", gpu_table(json.loads((RESULTS / "cuda.json").read_text())))
    attempts = json.loads((RESULTS / "attempts.json").read_text())
    fill(Path("docs/kernels.md"), "attempts", attempts_table(attempts))
    constants = json.loads(CONSTANTS.read_text())
    fill(Path("docs/method.md"), "validation", validation_table(constants["fit"]))


def times_of(results: dict) -> dict:
    """Milliseconds by operation, pass and length."""
    return {
        (row["operation"], row["backward"], row["tokens"]): row.get("milliseconds")
        for row in results["cases"]
    }


def fill(path: Path, name: str, section: str) -> None:
    """Put a section between its marks in a file."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = path.read_text("utf-8").split(begin)
    after = rest.split(end)[1]
    path.write_text(f"{before}{begin}\n{section}\n{end}{after}", "utf-8")


def gpu_table(results: dict) -> str:
    """Markdown: GPU time as a CUDA graph, its floors, and the time of a call from Python."""
    rows = {
        (row["operation"], row["backward"], row["tokens"]): row
        for row in results["cases"]
        if row["width"] == 64 and row["batch"] * row["tokens"] == 65536
    }
    lengths = sorted({tokens for _, _, tokens in rows})
    lines = [
        "| N | pass | best softmax | LLN | floors | LLN + Diag | floors | LLN + Diag from Python |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for backward, what in ((False, "forward"), (True, "fwd + bwd")):
        for tokens in lengths:
            best = min(
                rows[name, backward, tokens]["graph_milliseconds"]
                for name in ("sdpa_flash", "sdpa_cudnn")
            )
            cells = [str(tokens), what, f"{best:.3f}"]
            for name in ("lln", "lln_diag"):
                row = rows[name, backward, tokens]
                cells.append(
                    f"{row['graph_milliseconds']:.3f} ({best / row['graph_milliseconds']:.1f}×)"
                )
                cells.append(f"{row['graph_floors']:.2f}")
            called = rows["lln_diag", backward, tokens]["milliseconds"]
            cells.append(f"{called:.2f} ({best / called:.1f}×)")
            lines.append("| " + " | ".join(cells) + " |")
    environment = results["environment"]
    lines += [
        "",
        "Milliseconds on the GPU, replayed as a CUDA graph (times faster than softmax), α and β "
        "given; last column: called from Python, where launching costs more than the work "
        f"([docs/kernels.md](docs/kernels.md)). {environment['device']}, torch "
        f"{environment['torch']}, triton {environment['triton']}, copy "
        f"{results['copy_terabytes_per_second']:.2f} TB/s; made by `python -m benchmarks.run "
        f"--device cuda`, commit `{environment['commit'][:10]}`. Matching on the fly, other widths "
        "and B = 1 are in `benchmarks/results/cuda.json`.",
    ]
    return "\n".join(lines)


def attempts_table(attempts: dict) -> str:
    """Markdown: microseconds of every step, and times their floor in brackets."""
    unit = 65536 * 12 * 64 * 2 / (attempts["environment"]["copy_terabytes_per_second"] * 1e6)
    units = {("lln", 2): (4, 7), ("lln", 4): (2, 2, 3, 4), ("diag", 2): (6, 9)}
    lines = []
    for kind, columns in (
        (
            "lln",
            "N = 512 forward, backward | N = 4,096 summarise, read, queries, keys | N = 65,536",
        ),
        ("diag", "N = 512 forward, backward | N = 4,096 read, joint backward | N = 65,536"),
    ):
        title = "LLN" if kind == "lln" else "LLN + Diag"
        lines += [f"| {title}: change | predicted | {columns} |", "|---|---|---|---|---|"]
        for number, step in enumerate(attempts["steps"], 1):
            cells = [f"{number}. {step['change']}", step["predicted"]]
            for tokens, times in step[kind].items():
                counts = units[kind, len(times)]
                if kind == "diag" and tokens != "512":
                    counts = (4, 7)
                pairs = zip(times, counts, strict=True)
                cells.append(", ".join(f"{us:.0f} ({us / (n * unit):.2f})" for us, n in pairs))
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    environment = attempts["environment"]
    lines.append(
        f"Microseconds (times the floor). {environment['device']}, torch {environment['torch']}, "
        f"triton {environment['triton']}, commits {environment['commit']}. Command: "
        f"{environment['command']}"
    )
    return "\n".join(lines)


def validation_table(fit: dict) -> str:
    """Markdown: how well each criterion does on fresh draws."""
    lines = [
        "| criterion | relative error of the variance inside a row, mean / max "
        "| entropy, distance to SA in bits, mean / max |",
        "|---|---|---|",
    ]
    for name, row in fit["validation"]["criteria"].items():
        first, second = (
            f"{row[f'{side}_mean']:.3f} / {row[f'{side}_max']:.3f}"
            for side in ("variance", "entropy")
        )
        lines.append(f"| `{name}` | {first} | {second} |")
    lines += ["", f"Made by `{fit['command']}` on {fit['device']}."]
    return "\n".join(lines)


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
