"""Sections and figures of the benchmarks, from ``lab/results/benchmarks``.

Results that are not there yet leave their section with the command that makes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from lln_lab.bench.compare import add_ratios
from lln_lab.bench.operations import OPERATIONS
from lln_lab.bench.peers_figure import draw_peers
from lln_lab.bench.roberta_figure import draw_roberta
from lln_lab.bench.speed_figure import draw_speed
from lln_lab.benchmarks import (
    cpu_turns,
    launcher,
    parallel_cost,
    parallel_layer,
    parallel_times,
    parallel_training,
    roberta_turns,
    under_load,
)
from lln_lab.documents import page_tables, peer_tables, window_tables
from lln_lab.documents.speed_tables import (
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
from lln_lab.documents.targets import main_rows, targets_table
from lln_lab.markdown import TABLES, Section, table
from lln_lab.peers import available

RESULTS = Path("lab/results/benchmarks")
FIGURES = Path("docs/figures")
CONSTANTS = Path("src/lln/matching/constants.json")
README, BENCHMARKS, PEERS = Path("README.md"), Path("docs/benchmarks.md"), Path("docs/peers.md")
STUDY, METHOD = (Path(f"docs/{name}.md") for name in ("tutorials/study", "method"))
# What README shows of a CPU and of a GPU.
CPU_LENGTHS = (256, 1024, 4096)
GPU_LENGTHS = (512, 4096, 65536)
# And the summary of the training steps.
STEPS = (512, 4096, 16384)
PARTS = {"batch 1": "roberta", "graph": "roberta-graph", "filled": "roberta-filled"}
# Page, marks, results and table of the benchmarks that have one table each.
SINGLE = (
    (TABLES, "attempts", "attempts", lambda found: attempts_table(found)),
    (TABLES, "cpu-turns-x86", "cpu-turns-x86", cpu_turns.turns_table),
    (TABLES, "launcher", "launcher", launcher.launcher_table),
    (TABLES, "roberta-turns", "roberta-turns", roberta_turns.turns_table),
    (TABLES, "under-load", "under-load", under_load.load_table),
    (TABLES, "under-load-x86", "under-load-x86", under_load.load_table),
    (TABLES, "parallel-times", "parallel-cost", lambda it: parallel_cost.times_table(it["cases"])),
    (TABLES, "parallel-measured", "parallel-times", parallel_times.times_table),
    (TABLES, "parallel-layer", "parallel-layer", parallel_layer.layer_table),
    (TABLES, "parallel-training", "parallel-training", parallel_training.losses_table),
)


def sections() -> Iterator[Section]:
    """What the pages say of every benchmark."""
    yield from of_cpus()
    yield from of_gpu()
    yield from of_windows()
    yield from of_training_steps()
    yield from of_peers()
    for page, name, results, write in SINGLE:
        yield Section(page, name, write(json.loads((RESULTS / f"{results}.json").read_text())))
    constants = json.loads(CONSTANTS.read_text())
    yield Section(METHOD, "validation", validation_table(constants["fit"]))


def of_cpus() -> Iterator[Section]:
    """The tables of both CPUs, and what README shows of one."""
    cpu, example = read("cpu"), read(cpu_turns.EXAMPLE.stem)
    command = missing(f"{cpu_turns.COMMAND} --example", cpu_turns.EXAMPLE.stem)
    text = cpu_turns.example_table(example) if example else command
    yield Section(BENCHMARKS, "cpu-example", text)
    turns = read(cpu_turns.RESULTS.stem)
    command = missing(cpu_turns.COMMAND, cpu_turns.RESULTS.stem)
    text = cpu_turns.passes_table(turns, CPU_LENGTHS) if turns else command
    yield Section(README, "cpu-speed", text)
    for suffix in ("", "-x86"):
        plain, compiled = read(f"cpu{suffix}"), read(f"cpu{suffix}-compiled")
        command = missing("LLN_CPU=torch lln bench --device cpu", f"cpu{suffix}")
        page = TABLES if suffix else BENCHMARKS
        yield Section(page, f"cpu-speed{suffix}", cpu_table(plain) if plain else command)
        command = missing("lln bench --device cpu", f"cpu{suffix}-compiled")
        text = cpu_table(compiled) if compiled else command
        yield Section(TABLES, f"cpu-compiled{suffix}", text)
    compiled = read("cpu-compiled")
    command = missing("lln bench --device cpu", "cpu-compiled")
    causal = causal_cpu_table(cpu, compiled) if cpu and compiled else command
    yield Section(TABLES, "cpu-causal", causal)


def of_gpu() -> Iterator[Section]:
    """All tables of the GPU's operations."""
    gpu, fla, trees = read("cuda"), read("cuda-fla"), read("two_trees")
    summary = command = missing("lln bench --device cuda", "cuda")
    if gpu:
        setting = "bfloat16, H = 12, D = 64, B·N = 65,536; softmax is the better of flash and cuDNN"
        summary = speed_summary(gpu, main_rows(gpu), GPU_LENGTHS, setting)
    yield Section(README, "gpu-speed", summary)
    yield Section(BENCHMARKS, "gpu-speed", gpu_table(gpu) if gpu else command)
    yield Section(TABLES, "gpu-targets", targets_table(gpu, fla) if gpu else command)
    yield Section(TABLES, "gpu-other", gpu_other_table(gpu) if gpu else command)
    # Causal attention against flash-linear-attention, in a run of their own.
    command = missing(
        "lln bench --device cuda --passes forward --operations lln_causal fla_causal_raw",
        "cuda-fla",
    )
    yield Section(TABLES, "gpu-fla", fla_table(fla) if fla else command)
    # The kernels before and after, in turn on one machine.
    command = missing("python -m lln_lab.benchmarks.two_trees OLD/src NEW/src", "two_trees")
    yield Section(TABLES, "two-trees", trees_table(trees) if trees else command)


def of_windows() -> Iterator[Section]:
    """Sliding windows, alone and in an encoder; pages."""
    for name, write, part in (
        ("windows-cuda", window_tables.windows, "attention"),
        ("modernbert-cuda", window_tables.encoder, "encoder"),
        ("modernbert-cpu", window_tables.encoder, "encoder --device cpu"),
        ("minilm-cpu", window_tables.encoder, "minilm --device cpu"),
    ):
        found = read(name)
        command = missing(f"python -m lln_lab.benchmarks.windows {part}", name)
        yield Section(TABLES, name, write(found) if found else command)
    found = read("modernbert-cuda")
    yield Section(README, "modernbert", window_tables.ends(found) if found else "")
    for name, device in (("pages-cuda", "cuda"), ("pages-cpu", "cpu")):
        found = read(name)
        command = missing(f"python -m lln_lab.benchmarks.page_times --device {device}", name)
        yield Section(TABLES, name, page_tables.times(found) if found else command)
    found = read("minilm-cpu")
    lengths = (256, 1024, 4096)
    yield Section(README, "minilm", window_tables.speeds(found, lengths) if found else "")


def of_training_steps() -> Iterator[Section]:
    """Training steps: over the length, as CUDA graphs, and with many sequences in a batch."""
    found = read("roberta")
    command = missing("lln bench roberta --device cuda --tokens 65536", "roberta")
    for part, name in PARTS.items():
        yield Section(TABLES, name, roberta_table(found, part) if found else command)
    summary = roberta_summary([(found, part) for part in PARTS], STEPS) if found else command
    yield Section(BENCHMARKS, "roberta-summary", summary)


def of_peers() -> Iterator[Section]:
    """The page of the attention systems, and their number wherever it stands."""
    for page in (README, STUDY):
        yield Section(page, "systems", str(len(available())))
    yield Section(TABLES, "cards", peer_tables.cards_table())
    yield Section(TABLES, "cards-in-full", peer_tables.cards_in_full())
    for device in ("cuda", "cpu"):
        name = f"peers-{device}"
        results, text = read(name), missing(f"lln bench peers --device {device}", name)
        yield Section(TABLES, name, peer_tables.efficiency(results) if results else text)
    yield Section(PEERS, "summary", peer_tables.summary(read("peers-cuda")))


def draw() -> None:
    """The figures of all results that are there."""
    if cpu := read("cpu"):
        draw_speed(cpu, FIGURES / "cpu_speed.svg")
    if gpu := read("cuda"):
        draw_speed(gpu, FIGURES / "gpu_speed.svg")
        draw_speed(gpu, FIGURES / "gpu_speed_causal.svg", "causal")
    if found := read("roberta"):
        draw_roberta(found, FIGURES / "roberta.svg")
    for device in ("cuda", "cpu"):
        if results := read(f"peers-{device}"):
            for field, end in peer_tables.TITLES.items():
                draw_peers(results, FIGURES / f"peers_{device}_{end}.svg", field)
    parallel_cost.draw(json.loads(parallel_cost.RESULTS.read_text("utf-8"))["cases"])


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
