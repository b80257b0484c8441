"""Figures 5b and 7: what moment matching does to the variance and distribution of log P."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lln_lab.drawing import save
from lln_lab.figures.setting import Results, Setting
from lln_lab.figures.style import LOOKS, NAMES, plain_ticks, title
from lln_lab.fitting.fit import Constants, scale
from lln_lab.fitting.injection import (
    gaussians,
    lln_curves,
    lln_log_p,
    softmax_curves,
    softmax_log_p,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

SIZE = (13.2, 4.0)

_BINS = 80
_PAPER = ("softmax", "unmatched", "paper")
_OURS = ("softmax", "unmatched", "variance", "entropy")


def draw_figures(constants: Constants, folder: Path, device: str = "cpu") -> list[Path]:
    """Draws both figures for these constants and returns the files, an SVG and a PNG each.

    Args:
        constants: The content of ``constants.json``.
        folder: Where the files go; made if missing.
        device: Where to measure.
    """
    setting = Setting(device=device, constants=constants)
    plans = {"figure-5b": (measure_5b, draw_5b), "figure-7": (measure_7, draw_7)}
    written = []
    for name, (measure, draw) in plans.items():
        results = measure(setting)
        written += save(folder / name, SIZE, lambda figure, d=draw, r=results: d(figure, r))
    return written


def measure_5b(setting: Setting) -> Results:
    """Variance of log P, whole and within a row, and entropy, by attention and score variance."""
    width, length = (32, 64) if setting.quick else (64, 512)
    points = 5 if setting.quick else 13
    p = torch.logspace(math.log10(0.05), math.log10(16), points, dtype=torch.float64)
    q, k = gaussians(width, length, seed=7, rows=length, draws=2, device=setting.device)
    curves = {"softmax": softmax_curves(q, k, tuple(p.tolist()))}
    scales = _scales(setting.constants, p, width, length)
    for name in setting.steps(list(scales)):
        curves[name] = lln_curves(q, k, tuple(scales[name].tolist()))
    return {"head_width": width, "tokens": length, "score_variance": p.tolist(), "curves": curves}


def draw_5b(figure: Figure, results: Results) -> None:
    """The paper's figure, then the variance that matching makes equal, then the entropy.

    The paper shows the variance of the whole matrix. The right panel shows the aim of matching, and
    that equal variance does not give equal entropy.
    """
    p, curves = results["score_variance"], results["curves"]
    panels = figure.subplots(1, 3)
    sides = (
        ("total", _PAPER, "variance of log P, whole matrix", "(a) the paper's Figure 5b"),
        ("variance", LOOKS, "variance of log P within a row", "(b) ours"),
        ("entropy", LOOKS, "mean row entropy, bits", "(c) ours"),
    )
    for axes, (side, names, label, text) in zip(panels, sides, strict=True):
        for name in names:
            if name in curves:
                axes.plot(p, curves[name][side], label=NAMES[name], **LOOKS[name])
        axes.set(ylabel=label)
        axes.set_xlabel(r"variance of the softmax scores, $p = \sigma_q^2 \sigma_k^2$")
        title(axes, f"{text}, d = {results['head_width']}, N = {results['tokens']}")
    panels[1].set(xscale="log", yscale="log")
    panels[2].set(xscale="log")
    for axes in panels:
        plain_ticks(axes)
    handles = panels[1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=5)


def measure_7(setting: Setting) -> Results:
    """Histograms of log P before and after matching, for two variances of the scores."""
    width, length = (32, 64) if setting.quick else (64, 512)
    q, k = gaussians(width, length, seed=7, rows=length, draws=2, device=setting.device)
    panels = []
    for variance in setting.steps((1.0, 4.0)):
        p = torch.tensor([variance], dtype=torch.float64)
        logs = {"softmax": softmax_log_p(q, k, variance)}
        for name, s in _scales(setting.constants, p, width, length).items():
            logs[name] = lln_log_p(q, k, s.item())
        # A common range that covers softmax attention except its extreme tails.
        centre, spread = logs["softmax"].mean().item(), logs["softmax"].std().item()
        low, high = centre - 4.5 * spread, min(0.0, centre + 5 * spread)
        panels.append(
            {
                "score_variance": variance,
                "range": [low, high],
                "density": {name: _density(own, low, high) for name, own in logs.items()},
            }
        )
    return {"head_width": width, "tokens": length, "panels": panels}


def draw_7(figure: Figure, results: Results) -> None:
    """The paper's histogram, then the criteria for two variances of the scores."""
    low, high = results["panels"]
    plan = ((low, _PAPER, "the paper's Figure 7"), (low, _OURS, "ours"), (high, _OURS, "ours"))
    panels = figure.subplots(1, 3)
    shown: dict[str, Artist] = {}
    for axes, (panel, names, what), letter in zip(panels, plan, "abc", strict=True):
        start, end = panel["range"]
        edges = torch.linspace(start, end, _BINS + 1, dtype=torch.float64)
        for name in names:
            density = panel["density"][name]
            if name == "softmax":
                drawn = axes.stairs(density, edges, fill=True, color="#CCCCCC")
            else:
                look = {key: LOOKS[name][key] for key in ("color", "linestyle")}
                drawn = axes.stairs(density, edges, linewidth=1.6, **look)
            shown.setdefault(NAMES[name], drawn)
        axes.set(xlabel="log P", xlim=(start, end))
        size = f"d = {results['head_width']}, N = {results['tokens']}"
        title(axes, f"({letter}) {what}: p = {panel['score_variance']:g}, {size}")
    panels[0].set_ylabel("density")
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=5)


def _density(logs: Tensor, low: float, high: float) -> list[float]:
    counts = torch.histc(logs.cpu(), bins=_BINS, min=low, max=high)
    return (counts / (logs.numel() * (high - low) / _BINS)).tolist()


def _scales(constants: Constants, p: Tensor, width: int, length: int) -> dict[str, Tensor]:
    """The s of each LLN curve; unmatched means α = β = 1 on inputs with σq = σk = p^¼."""
    criteria = constants["criteria"]
    matched = {name: scale(values, p, width, length) for name, values in criteria.items()}
    return {"unmatched": p**0.25, **matched}
