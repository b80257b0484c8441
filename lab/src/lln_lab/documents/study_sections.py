"""Sections and figures of the experiments, from ``lab/results/experiments``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lln_lab.documents import page_tables, theory_tables
from lln_lab.experiments.catalogue import EXPERIMENTS
from lln_lab.experiments.cell_table import cell_table
from lln_lab.experiments.cells import read_all
from lln_lab.experiments.cost import cost_table
from lln_lab.experiments.curve_figure import draw_curves
from lln_lab.experiments.experiment import Column
from lln_lab.experiments.keys_table import conversion, decoder, from_scratch, selection, speed
from lln_lab.experiments.recovery_table import quality, recovery
from lln_lab.experiments.report_page import section
from lln_lab.experiments.step_table import training_steps
from lln_lab.experiments.temperature_figure import draw_temperatures
from lln_lab.markdown import TABLES, Section, commits_of, table

RESULTS = Path("lab/results/experiments")
FIGURES = Path("docs/figures")
README, DOCS = Path("README.md"), Path("docs")
PAGES = DOCS / "pages.md"
# Marks → the table of what `lln figure theory` found.
CLAIMS = {
    "theorem-3-3": theory_tables.theorem_3_3,
    "proposition-3-1": theory_tables.proposition_3_1,
    "equation-28": theory_tables.equation_28,
    "equation-32": theory_tables.equation_32,
    "shape": theory_tables.shape,
    "equation-5": theory_tables.temperature,
    "small-print": theory_tables.small_print,
}


def sections() -> Iterator[Section]:
    """What the pages say of every experiment."""
    yield Section(TABLES, "figure-1", theory_tables.training(read("figure-1")))
    yield Section(TABLES, "figure-2", theory_tables.distances(read("figure-2")))
    theory = read("figure-theory")
    for name, write in CLAIMS.items():
        made = theory_tables.made_by(theory, name != "proposition-3-1")
        yield Section(TABLES, name, f"{write(theory)}\n\n{made}")
    costs = theory_tables.costs(read("../benchmarks/instruments"))
    yield Section(DOCS / "instruments.md", "costs", costs)
    yield from recoveries()
    yield from exact_keys()
    yield Section(DOCS / "experiments.md", "gates", gates(read("gates")))
    cells = read_all(RESULTS / "cells", "gates", "gpu")
    rotary = [one for one in cells if one["cell"]["task"] == "table1-rope"]
    for page, name, own in ((TABLES, "gate-rows", cells), (PAGES, "page-training", rotary)):
        yield Section(page, name, gate_rows(own) or "*Not run yet.*")
    yield from findings()


def recoveries() -> Iterator[Section]:
    """Models that were trained back, and their steps through transformers."""
    found, mixed = read("minilm_recovery"), read("minilm_recovery_mixed")
    yield Section(README, "quality", quality(found, mixed))
    yield Section(TABLES, "recovery", recovery(found))
    yield Section(TABLES, "recovery-mixed", recovery(mixed))
    yield Section(TABLES, "recovery-long", recovery(read("minilm_recovery_2048")))
    yield Section(DOCS / "huggingface.md", "steps", training_steps(read("roberta_step")))


def exact_keys() -> Iterator[Section]:
    """How exact keys are chosen, what they give, and what they cost."""
    page = DOCS / "exact_keys.md"
    yield Section(page, "key-selection", selection(read("keys_prototype")))
    yield Section(page, "key-conversion", conversion(read("keys_conversion")))
    trained = [
        read(f"keys_training/{p.stem}") for p in sorted((RESULTS / "keys_training").glob("*.json"))
    ]
    yield Section(TABLES, "key-training", from_scratch(trained))
    yield Section(TABLES, "page-rules", page_tables.rules(read("page_rules")))
    yield Section(TABLES, "needle", page_tables.needle(read("needle")))
    decoders = decoder(read("decoder_conversion"))
    yield Section(DOCS / "tutorials/decoder.md", "key-decoder", decoders)
    for device in ("cuda", "query-cuda", "cpu", "cpu-x86"):
        times = speed(read(f"../benchmarks/keys-{device}"))
        yield Section(TABLES, f"key-speed-{device}", times)


def findings() -> Iterator[Section]:
    """Tables of the experiments that were run; the first run had another recipe."""
    for name, experiment in EXPERIMENTS.items():
        cells = read_all(RESULTS / "cells", name, "small")
        text = section(experiment, "small", cells) if cells else "*Not run yet.*"
        yield Section(TABLES, name, text)
    costs = cost_table(EXPERIMENTS["lra"], "small", RESULTS / "cells")
    yield Section(TABLES, "lra-costs", costs or "*Not run yet.*")
    for name in ("table3", "lra"):
        cells = read_all(RESULTS / "first_cells", name, "small")
        yield Section(TABLES, f"first-{name}", section(EXPERIMENTS[name], "small", cells))


def draw() -> None:
    """Curves of a few tasks, and the temperatures."""
    for name, task in (
        ("table1", "mlm"),
        ("distance", "recall-512"),
        ("distance", "repeated-2048"),
    ):
        cells = read_all(RESULTS / "cells", name, "small")
        drawn = [one for one in cells if one["cell"]["task"] == task]
        draw_curves(drawn, FIGURES / f"{name}_{task}")
    draw_temperatures(read_all(RESULTS / "cells", "temperature", "small"), FIGURES / "temperature")


def read(name: str) -> dict[str, Any]:
    """The content of a results file."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def gates(found: dict[str, Any]) -> str:
    """Whether softmax has learned what a table asks, per table; a number per seed."""
    rows = [
        [
            *(name, one["measure"], one["needed"]),
            ", ".join(f"{value:.3g}" for value in one["of_seeds"]),
            "yes" if one["met"] else "no",
        ]
        for name, one in found.items()
    ]
    setups = [one["setup"] for one in read_all(RESULTS / "cells", "gates", "gpu")]
    devices = ", ".join(sorted({setup["device"] for setup in setups}))
    return (
        f"{table(['recipe', 'measured', 'needed', 'reached, per seed', 'met'], rows)}\n\n"
        f"{devices}; {commits_of(setups)}; made by `python -m lln_lab.experiments.gates run`, "
        "`baselines` and `summary`."
    )


def gate_rows(cells: list[dict[str, Any]]) -> str:
    """Every row of the recipes in which others than softmax were trained; empty without any."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        # Baselines are not trained and have no curve.
        if "curve" in cell:
            rows.setdefault(cell["cell"]["task"], []).append(cell)
    shown = {
        task: own
        for task, own in rows.items()
        if {one["cell"]["method"] for one in own} - {"softmax"}
    }
    if not shown:
        return ""
    columns = [
        column
        for task in shown
        for column in (
            Column(task, "loss", f"{task}: loss, nats"),
            Column(task, "accuracy", f"{task}: accuracy, %"),
        )
    ]
    trained = [one for own in shown.values() for one in own]
    setups = [one["setup"] for one in trained]
    devices = ", ".join(sorted({setup["device"] for setup in setups}))
    # Two or three seeds: too few to call a row the best.
    found = cell_table(trained, columns).replace("**", "")
    return (
        f"{found}\n\nMean ± standard deviation over the seeds; {devices}; "
        f"{commits_of(setups)}; made by `python -m lln_lab.experiments.gates run {' '.join(shown)} "
        "--method METHOD`."
    )
