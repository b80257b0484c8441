"""The report: every finished cell as tables and curves, in one Markdown and one HTML file."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lln.files import write_atomically
from lln_lab.experiments.cell_table import Baselines, cell_grid, cell_table
from lln_lab.experiments.cells import PUBLISHED, read_all
from lln_lab.experiments.claims import captions
from lln_lab.experiments.experiment import Experiment
from lln_lab.experiments.methods import Method
from lln_lab.markdown import commit_of, commits_of
from lln_lab.report import plot_area
from lln_lab.report.chart import Chart, inline_svg
from lln_lab.report.rendering import render_text
from lln_lab.report.theme import colour

if TYPE_CHECKING:
    from lln_lab.report.chart import AnyFigure

# Written by `lln_lab.experiments.baselines`.
BASELINES = PUBLISHED / "baselines.json"
# What is not called by its own name.
NAMES = {"f1": "F1", "matthews": "Matthews' correlation", "score": "masked tokens found"}
TEMPLATE = Path(__file__).with_name("page.html")
# Curves in one chart. These methods keep their colours; others share the rest.
MOST_CURVES = 8
OWN_COLOURS = ("softmax", "diag", "lln", "lln_diag", "lln_keys", "elu")
OTHER_COLOURS = ("relu", "quadratic", "lln_entropy", "lln_unit")


def markdown(experiment: Experiment, scale: str, cells: list[dict[str, Any]]) -> str:
    """The table of an experiment with its title and where its numbers come from."""
    return f"### {experiment.title} ({scale})\n\n{section(experiment, scale, cells)}\n"


def section(experiment: Experiment, scale: str, cells: list[dict[str, Any]]) -> str:
    """The table, what it does not claim, and where it comes from."""
    baselines = baselines_of(experiment, scale)
    parts = [cell_table(cells, experiment.columns(scale), baselines)]
    found = captions(experiment, scale, cells, baselines)
    parts += [f"**{label}**: {text}" for label, text in found]
    return "\n\n".join([*parts, made_by(experiment, scale, cells)])


def baselines_of(experiment: Experiment, scale: str) -> Baselines:
    """What the tasks give without attention, by task; known at the scale ``small`` alone."""
    if scale != "small" or not BASELINES.exists():
        return {}
    rows = json.loads(BASELINES.read_text("utf-8"))["rows"]
    found = {task: rows.get(f"{experiment.name}/{task}", {}) for task in experiment.plans[scale]}
    return {task: known for task, known in found.items() if known}


def made_by(experiment: Experiment, scale: str, cells: list[dict[str, Any]]) -> str:
    """Measure, devices, seeds, commits, and the command that makes it."""
    devices = sorted({cell["setup"]["device"] for cell in cells})
    seconds = sum(cell["seconds"] for cell in cells)
    losses = all(column.is_loss for column in experiment.columns(scale))
    ran = {cell["cell"]["task"] for cell in cells}
    shown = dict.fromkeys(one.measure for one in experiment.columns(scale) if one.task in ran)
    seeds = sorted({cell["cell"]["seed"] for cell in cells})
    text = (
        f"{', '.join(NAMES.get(one, one) for one in shown)}, in {'nats' if losses else 'percent'}; "
        f"{len(cells)} cells, {seconds / 60:,.0f} minutes of training in all. "
        f"{', '.join(devices)}; seeds {', '.join(map(str, seeds))}; "
        f"{commits_of([cell['setup'] for cell in cells])}; made by python -m lln_lab.experiments "
        f"run {experiment.name} --scale {scale}."
    )
    if not baselines_of(experiment, scale):
        return text
    setup = json.loads(BASELINES.read_text("utf-8"))["setup"]
    return f"{text} Rows in italics: {commit_of(setup)}; made by {setup['command']}."


class Curves(NamedTuple):
    """What cells have by step.

    Attributes:
        entry: Where it is in a result.
        title: For the caption.
        axis: What is drawn, with its unit.
        lower: Whether the lowest at the end come first, when not all fit.
    """

    entry: tuple[str, ...]
    title: str
    axis: str
    lower: bool = True


CURVES = (
    Curves(("curve",), "Training loss", "loss, nats"),
    Curves(("loss_scale",), "Loss scale of float16", "log2 of the loss scale", lower=False),
    Curves(("observed", "temperature"), "Temperature", "temperature, median of all heads"),
    Curves(("observed", "entropy"), "Entropy", "bits per row, median of all heads"),
    Curves(("observed", "spectral_gap"), "Spectral gap", "gap, median of all heads"),
)


def points_of(cell: dict[str, Any], kind: Curves) -> list[tuple[int, float]]:
    """Steps and values of a cell; empty if it has none. A value that is missing is left out."""
    found: Any = cell
    for name in kind.entry:
        found = found.get(name, {})
    points = [(step, value) for step, value in found or () if value is not None]
    if kind.entry == ("loss_scale",):
        return [(step, math.log2(value)) for step, value in points if value > 0]
    return points


def mean_curve(
    cells: Iterable[dict[str, Any]], kind: Curves = CURVES[0]
) -> list[tuple[int, float]]:
    """Values by step, the mean over the seeds that have the step."""
    values: dict[int, list[float]] = {}
    for cell in cells:
        for step, value in points_of(cell, kind):
            values.setdefault(step, []).append(value)
    return [(step, statistics.mean(found)) for step, found in sorted(values.items())]


def curves_chart(task: str, cells: list[dict[str, Any]], kind: Curves = CURVES[0]) -> Chart | None:
    """Values against steps, one line per method; None if no cell has any."""
    methods = sorted({cell["cell"]["method"] for cell in cells})
    curves = {
        method: mean_curve((cell for cell in cells if cell["cell"]["method"] == method), kind)
        for method in methods
    }
    curves = {method: curve for method, curve in curves.items() if curve}
    if not curves:
        return None
    sign = 1 if kind.lower else -1
    shown = sorted(curves, key=lambda method: sign * curves[method][-1][1])[:MOST_CURVES]
    names = colours_of(shown)
    every = [value for method in shown for _, value in curves[method]]

    def draw(figure: AnyFigure) -> None:
        axes = plot_area.plot_area(figure, "training steps", kind.axis, len(shown))
        # A little more, or the number below the last tick is cut off.
        last = max(curves[method][-1][0] for method in shown)
        plot_area.linear_axis(axes.xaxis, 0, 1.04 * last)
        margin = 0.05 * (max(every) - min(every)) + 1e-3
        plot_area.linear_axis(axes.yaxis, min(every) - margin, max(every) + margin)
        for method in shown:
            label, (name, dashes) = Method.parse(method).title, names[method]
            points = zip(*curves[method], strict=True)
            axes.plot(*points, color=colour(name), linestyle=dashes, label=label)
        plot_area.legend_below(figure, axes, columns=1)

    height = plot_area.HEIGHT + plot_area.LEGEND_LINE * len(shown)
    return Chart(f"{kind.title.lower()} of {task} against steps", height, draw)


def charts_of(by_task: dict[str, list[dict[str, Any]]]) -> list[dict[str, str]]:
    """Every chart that the cells of the tasks have points for, in the order of the tasks."""
    return [
        {"task": task, "title": kind.title, "svg": inline_svg(chart)}
        for task, cells in by_task.items()
        for kind in CURVES
        if (chart := curves_chart(task, cells, kind)) is not None
    ]


def colours_of(methods: list[str]) -> dict[str, tuple[str, str]]:
    """A colour and a line style for every method; the same for a main method in every chart."""
    others = [method for method in methods if method not in OWN_COLOURS]
    found = {method: (method, "-") for method in methods if method in OWN_COLOURS}
    for place, method in enumerate(others):
        turn = place // len(OTHER_COLOURS)
        style = ("-", "--", ":")[turn % 3]
        found[method] = (OTHER_COLOURS[place % len(OTHER_COLOURS)], style)
    return found


def write_report(experiments: list[Experiment], scale: str, cells_folder: Path, page: Path) -> None:
    """Write the page, and the tables beside it as Markdown.

    Args:
        experiments: Those to show; without results they are left out.
        scale: Of the cells.
        cells_folder: Where the results are.
        page: An ``.html`` file; the Markdown has the same name.
    """
    sections, texts = [], []
    for experiment in experiments:
        cells = read_all(cells_folder, experiment.name, scale)
        if not cells:
            continue
        baselines = baselines_of(experiment, scale)
        by_task: dict[str, list[dict[str, Any]]] = {task: [] for task in experiment.plans[scale]}
        for cell in cells:
            by_task.setdefault(cell["cell"]["task"], []).append(cell)
        sections.append(
            {
                "name": experiment.name,
                "title": experiment.title,
                "scale": scale,
                "grid": cell_grid(cells, experiment.columns(scale), baselines),
                "claims": captions(experiment, scale, cells, baselines),
                "made_by": made_by(experiment, scale, cells),
                "charts": charts_of(by_task),
            }
        )
        texts.append(markdown(experiment, scale, cells))
    html = render_text(
        TEMPLATE.read_text("utf-8"), title="LLN experiments", running=False, sections=sections
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, html)
    write_atomically(page.with_suffix(".md"), "\n".join(texts))
