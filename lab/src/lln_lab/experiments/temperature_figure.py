"""Figures 9, 10a and 10b from finished cells: α = β held fixed, and what matching finds instead."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lln_lab.drawing import save
from lln_lab.experiments.methods import Method

SIZE = (13.0, 3.6)
# Method, without its branches → its line across the figure.
LINES = {
    "softmax": ("softmax", "C0", "-"),
    "diag": ("blocks of softmax alone", "C1", "-"),
    "lln@matching=variance": ("LLN, variance matched", "C2", "--"),
    "lln@matching=entropy": ("LLN, entropy matched", "C4", "--"),
}


def fixed_temperature(method: str) -> float | None:
    """α where a method holds α = β fixed; None for others.

    >>> fixed_temperature("lln@statistics=fixed,alpha=1.5,beta=1.5+conv")
    1.5
    """
    ((_, options), *_) = Method.parse(method).systems
    fixed = options.get("statistics") == "fixed" and options["alpha"] == options["beta"]
    return options["alpha"] if fixed else None


def draw_temperatures(cells: list[dict[str, Any]], path: Path) -> list[Path]:
    """Loss and entropy at the end over α = β, with lines for other methods; float16's loss scale.

    Args:
        cells: Finished cells of the experiment *temperature*.
        path: Of the figure, without a suffix.

    Returns:
        The files, an SVG and a PNG.
    """

    def draw(figure: Any) -> None:
        loss, entropy, scale = figure.subplots(1, 3)
        _panel(loss, cells, lambda cell: cell["loss"], "loss on held-out text, nats")
        _panel(entropy, cells, _entropy, "entropy at the end, bits per row")
        _scales(scale, cells)
        handles, labels = loss.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5)

    return save(path, SIZE, draw)


def _entropy(cell: dict[str, Any]) -> float:
    return cell["observed"]["entropy"][-1][1]


def _panel(
    axes: Any, cells: list[dict[str, Any]], value: Callable[[dict[str, Any]], float], label: str
) -> None:
    over: dict[float, list[float]] = {}
    others: dict[str, list[float]] = {}
    for cell in cells:
        method = cell["cell"]["method"]
        alpha = fixed_temperature(method)
        if alpha is not None:
            over.setdefault(alpha, []).append(value(cell))
        else:
            others.setdefault(method.split("+")[0], []).append(value(cell))
    grid = sorted(over)
    axes.plot(grid, [statistics.mean(over[one]) for one in grid], "o-", color="C3", label="LLN")
    # Every seed is a point: three are too few for a bar.
    for one in grid:
        axes.plot([one] * len(over[one]), over[one], ".", color="C3", alpha=0.5)
    for method, (title, colour, style) in LINES.items():
        if method in others:
            mean = statistics.mean(others[method])
            axes.axhline(mean, color=colour, linestyle=style, label=title)
    axes.set_xlabel("α = β")
    axes.set_ylabel(label)


def _scales(axes: Any, cells: list[dict[str, Any]]) -> None:
    """One line per training: a scale that is halved says that a gradient overflowed."""
    for cell in cells:
        method = cell["cell"]["method"]
        known = LINES.get(method.split("+")[0], ("", "0.6", "-"))[1]
        colour = known if fixed_temperature(method) is None else "C3"
        steps, scales = zip(*cell["loss_scale"], strict=True)
        axes.plot(steps, scales, color=colour, linewidth=1)
    axes.set_yscale("log", base=2)
    # So wide that a line which hardly moves does not look as if it did.
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 2**10), max(high, 2**20))
    axes.set_xlabel("training steps")
    axes.set_ylabel(f"loss scale of float16, {len(cells)} trainings")
