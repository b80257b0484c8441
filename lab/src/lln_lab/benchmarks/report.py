"""Write figures and tables of README and docs: ``python -m lln_lab.benchmarks.report``.

Nothing between their marks is written by hand; this program puts it there. Results that are not
there yet leave their section with the command that makes them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lln_lab.bench.compare import add_ratios
from lln_lab.bench.operations import OPERATIONS
from lln_lab.bench.peers_figure import draw_peers
from lln_lab.bench.roberta_figure import draw_roberta
from lln_lab.bench.speed_figure import draw_speed
from lln_lab.benchmarks import cpu_turns, peers
from lln_lab.benchmarks.markdown import TABLES, fill, table
from lln_lab.benchmarks.speed_tables import (
    causal_cpu_table,
    cpu_table,
    fla_table,
    gpu_other_table,
    gpu_table,
    roberta_summary,
    roberta_table,
    speed_summary,
    trees_table,
)
from lln_lab.benchmarks.targets import main_rows, targets_table
from lln_lab.peers import available

RESULTS = Path("lab/results/benchmarks")
FIGURES = Path("docs/figures")
CONSTANTS = Path("src/lln/matching/constants.json")
README, BENCHMARKS, PEERS = Path("README.md"), Path("docs/benchmarks.md"), Path("docs/peers.md")
STUDY = Path("docs/tutorials/study.md")
# What README shows of a CPU and of a GPU.
CPU_LENGTHS = (256, 1024, 4096)
GPU_LENGTHS = (512, 4096, 65536)
# And the summary of the training steps.
STEPS = (512, 4096, 16384)


def main() -> None:
    """Read the results, write the figures and the marked sections."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    fill_cpu()
    fill_gpu()
    fill_fla()
    fill_trees()
    fill_roberta()
    fill_peers()
    attempts = json.loads((RESULTS / "attempts.json").read_text())
    fill(TABLES, "attempts", attempts_table(attempts))
    constants = json.loads(CONSTANTS.read_text())
    fill(Path("docs/method.md"), "validation", validation_table(constants["fit"]))


def fill_cpu() -> None:
    """The figure and the tables of both CPUs, and what README shows of one."""
    cpu, example = read("cpu"), read(cpu_turns.EXAMPLE.stem)
    command = missing(f"{cpu_turns.COMMAND} --example", cpu_turns.EXAMPLE.stem)
    fill(BENCHMARKS, "cpu-example", cpu_turns.example_table(example) if example else command)
    turns = read(cpu_turns.RESULTS.stem)
    command = missing(cpu_turns.COMMAND, cpu_turns.RESULTS.stem)
    fill(README, "cpu-speed", cpu_turns.passes_table(turns, CPU_LENGTHS) if turns else command)
    if cpu:
        draw_speed(cpu, FIGURES / "cpu_speed.svg")
    for suffix in ("", "-x86"):
        plain, compiled = read(f"cpu{suffix}"), read(f"cpu{suffix}-compiled")
        command = missing("LLN_CPU=torch lln bench --device cpu", f"cpu{suffix}")
        page = TABLES if suffix else BENCHMARKS
        fill(page, f"cpu-speed{suffix}", cpu_table(plain) if plain else command)
        command = missing("lln bench --device cpu", f"cpu{suffix}-compiled")
        fill(TABLES, f"cpu-compiled{suffix}", cpu_table(compiled) if compiled else command)
    compiled = read("cpu-compiled")
    command = missing("lln bench --device cpu", "cpu-compiled")
    causal = causal_cpu_table(cpu, compiled) if cpu and compiled else command
    fill(TABLES, "cpu-causal", causal)


def fill_gpu() -> None:
    """The figures and all tables of the GPU's operations."""
    gpu = read("cuda")
    summary = command = missing("lln bench --device cuda", "cuda")
    if gpu:
        draw_speed(gpu, FIGURES / "gpu_speed.svg")
        draw_speed(gpu, FIGURES / "gpu_speed_causal.svg", "causal")
        setting = "bfloat16, H = 12, D = 64, B·N = 65,536; softmax is the better of flash and cuDNN"
        summary = speed_summary(gpu, main_rows(gpu), GPU_LENGTHS, setting)
    fill(README, "gpu-speed", summary)
    fill(BENCHMARKS, "gpu-speed", gpu_table(gpu) if gpu else command)
    fla = read("cuda-fla")
    fill(TABLES, "gpu-targets", targets_table(gpu, fla) if gpu else command)
    fill(TABLES, "gpu-other", gpu_other_table(gpu) if gpu else command)


def fill_fla() -> None:
    """Causal attention against flash-linear-attention, in a run of their own."""
    run = read("cuda-fla")
    command = missing(
        "lln bench --device cuda --passes forward --operations lln_causal fla_causal_raw",
        "cuda-fla",
    )
    fill(TABLES, "gpu-fla", fla_table(run) if run else command)


def fill_trees() -> None:
    """The kernels before and after, in turn on one machine."""
    trees = read("two_trees")
    command = missing("python -m lln_lab.benchmarks.two_trees OLD/src NEW/src", "two_trees")
    fill(TABLES, "two-trees", trees_table(trees) if trees else command)


def fill_roberta() -> None:
    """Training steps: over the length, as CUDA graphs, and with many sequences in a batch."""
    found = read("roberta")
    command = missing("lln bench roberta --device cuda --tokens 65536", "roberta")
    if found:
        draw_roberta(found, FIGURES / "roberta.svg")
    parts = {"batch 1": "roberta", "graph": "roberta-graph", "filled": "roberta-filled"}
    for part, section in parts.items():
        fill(TABLES, section, roberta_table(found, part) if found else command)
    summary = roberta_summary([(found, part) for part in parts], STEPS) if found else command
    fill(BENCHMARKS, "roberta-summary", summary)


def fill_peers() -> None:
    """The page of the attention systems, and their number wherever it stands."""
    for page in (README, STUDY):
        fill(page, "systems", str(len(available())))
    fill(TABLES, "cards", peers.cards_table())
    fill(TABLES, "cards-in-full", peers.cards_in_full())
    for device in ("cuda", "cpu"):
        name = f"peers-{device}"
        results, section = read(name), missing(f"lln bench peers --device {device}", name)
        if results:
            for field, end in peers.TITLES.items():
                draw_peers(results, FIGURES / f"peers_{device}_{end}.svg", field)
            section = peers.efficiency(results)
        fill(TABLES, name, section)
    fill(PEERS, "summary", peers.summary(read("peers-cuda")))


def read(name: str) -> dict | None:
    """The content of a results file; None if nobody has made it."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return None
    results = json.loads(path.read_text("utf-8"))
    if "cases" in results and name.startswith(("cpu", "cuda")):
        # Older files name operations that are timed no more, and carry no ratios.
        results["cases"] = [row for row in results["cases"] if row["operation"] in OPERATIONS]
        add_ratios(results["cases"])
    return results


def missing(command: str, name: str) -> str:
    """What stands where a table will be."""
    return f"Not measured yet: `{command} --out lab/results/benchmarks/{name}.json`."


def attempts_table(attempts: dict) -> str:
    """Markdown: microseconds of every step, and times their floor in brackets."""
    unit = 65536 * 12 * 64 * 2 / (attempts["environment"]["copy_terabytes_per_second"] * 1e6)
    units = {("lln", 2): (4, 7), ("lln", 4): (2, 2, 3, 4), ("diag", 2): (6, 9)}
    shown = {
        "lln": (
            "LLN: change",
            "N = 4,096 summarise, read, queries, keys",
        ),
        "diag": ("LLN + Diag: change", "N = 4,096 read, joint backward"),
    }
    tables = []
    for kind, (title, middle) in shown.items():
        lines = []
        for number, step in enumerate(attempts["steps"], 1):
            cells = [f"{number}. {step['change']}", step["predicted"]]
            for tokens, times in step[kind].items():
                counts = units[kind, len(times)]
                if kind == "diag" and tokens != "512":
                    counts = (4, 7)
                pairs = zip(times, counts, strict=True)
                cells.append(", ".join(f"{us:.0f} ({us / (n * unit):.2f})" for us, n in pairs))
            lines.append(cells)
        heads = [title, "predicted", "N = 512 forward, backward", middle, "N = 65,536"]
        tables.append(table(heads, lines))
    environment, later = attempts["environment"], attempts["later"]
    tables.append(
        f"Microseconds (times the floor). {environment['device']}, torch {environment['torch']}, "
        f"triton {environment['triton']}, commits {environment['commit']}. Command: "
        f"{environment['command']}"
    )
    environment = later["environment"]
    steps = [
        [f"{number}. {step['change']}", step["predicted"], step["outcome"]]
        for number, step in enumerate(later["steps"], len(attempts["steps"]) + 1)
    ]
    caption = (
        f"{environment['device']}, torch {environment['torch']}, triton {environment['triton']}. "
        f"Command: {environment['command']}."
    )
    tables.append(table(["later: change", "predicted", "outcome"], steps, caption))
    return "\n\n".join(tables)


def validation_table(fit: dict) -> str:
    """Markdown: how well each criterion does on fresh draws."""
    heads = [
        "criterion",
        "relative error of the variance inside a row, mean / max",
        "entropy, distance to SA in bits, mean / max",
    ]
    lines = [
        [
            f"`{name}`",
            *(
                f"{row[f'{side}_mean']:.3f} / {row[f'{side}_max']:.3f}"
                for side in ("variance", "entropy")
            ),
        ]
        for name, row in fit["validation"]["criteria"].items()
    ]
    drawn = fit["validation"]
    width, length, p = (
        f"{drawn[name][0]:,} to {drawn[name][-1]:,}" for name in ("widths", "lengths", "p")
    )
    caption = (
        f"Gaussian queries and keys, fresh draws over head widths {width}, {length} tokens and p "
        f"from {p}, {drawn['seeds']} seeds. Made by `{fit['command']}` on {fit['device']}."
    )
    return table(heads, lines, caption)


if __name__ == "__main__":
    main()
