"""The paper's Figures 5b and 7, drawn from the constants of the data file.

matplotlib is imported inside the functions: fitting does not need it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lln.fitting.fit import Constants, scale
from lln.fitting.measure import (
    gaussians,
    lln_curves,
    lln_log_p,
    softmax_curves,
    softmax_log_p,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _LENGTH = 64, 512
_BINS = 80

# Okabe and Ito's colours, told apart with every common colour blindness; the line styles and
# markers say the same thing again without colour.
_LOOKS: dict[str, dict[str, Any]] = {
    "softmax": {"color": "#000000", "linestyle": "-", "linewidth": 5, "alpha": 0.35},
    "unmatched": {"color": "#009E73", "linestyle": ":", "marker": "x"},
    "paper": {"color": "#E69F00", "linestyle": "-.", "marker": "s"},
    "variance": {"color": "#0072B2", "linestyle": "--", "marker": "o"},
    "entropy": {"color": "#D55E00", "linestyle": "-", "marker": "^"},
}
_NAMES = {
    "softmax": "softmax attention",
    "unmatched": "LLN, α = β = 1",
    "paper": "LLN, paper's constants",
    "variance": "LLN, variance matched",
    "entropy": "LLN, entropy matched",
}
_STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "grid.alpha": 0.25,
    "legend.columnspacing": 1.4,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    # A text in the SVG stays a text, and the same figure gives the same file.
    "svg.fonttype": "none",
    "svg.hashsalt": "lln",
}


def draw_figures(constants: Constants, folder: Path, device: str = "cpu") -> list[Path]:
    """Draws both figures and returns the files, a PNG and an SVG each.

    Args:
        constants: The content of ``constants.json``.
        folder: Where the files go; made if missing.
        device: Where to measure.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figures = {"figure-5b": figure_5b, "figure-7": figure_7}
    written = []
    for name, draw in figures.items():
        with mpl.rc_context(_STYLE):
            # A figure of its own, not pyplot's: no window, no state left behind.
            figure = Figure(figsize=(9.6, 4.0), layout="constrained")
            draw(figure, constants, device)
            for suffix, metadata in ((".png", {}), (".svg", {"Date": None})):
                path = folder / f"{name}{suffix}"
                figure.savefig(path, dpi=160, metadata=metadata)
                written.append(path)
    return written


def figure_5b(figure: Figure, constants: Constants, device: str = "cpu") -> None:
    """Variance of log P against the variance of the scores, and beside it the entropy.

    The paper shows the left half, with the variance of the whole matrix. The right half is what the
    matching is for, and shows that equal variance is not equal entropy.
    """
    p = torch.logspace(math.log10(0.05), math.log10(16), 13, dtype=torch.float64)
    q, k = gaussians(_WIDTH, _LENGTH, seed=7, rows=_LENGTH, draws=2, device=device)
    curves = {"softmax": softmax_curves(q, k, tuple(p.tolist()))}
    for name, s in _scales(constants, p).items():
        curves[name] = lln_curves(q, k, tuple(s.tolist()))
    left, right = figure.subplots(1, 2)
    for name, values in curves.items():
        left.plot(p, values["variance"], label=_NAMES[name], **_LOOKS[name])
        right.plot(p, values["entropy"], **_LOOKS[name])
    left.set(xscale="log", yscale="log", ylabel="variance of log P within a row")
    right.set(xscale="log", ylabel="mean row entropy, bits")
    for axes, letter in ((left, "(a)"), (right, "(b)")):
        axes.set_xlabel(r"variance of the softmax scores, $p = \sigma_q^2 \sigma_k^2$")
        axes.set_title(f"{letter} d = {_WIDTH}, N = {_LENGTH}", loc="left", fontsize=10)
        _plain_ticks(axes)
    figure.legend(loc="outside lower center", ncols=5)


def figure_7(figure: Figure, constants: Constants, device: str = "cpu") -> None:
    """Histograms of log P before and after matching, for two variances of the scores."""
    q, k = gaussians(_WIDTH, _LENGTH, seed=7, rows=_LENGTH, draws=2, device=device)
    panels = figure.subplots(1, 2)
    for axes, variance, letter in zip(panels, (1.0, 4.0), ("(a)", "(b)"), strict=True):
        p = torch.tensor([variance], dtype=torch.float64)
        values = {"softmax": softmax_log_p(q, k, variance)}
        for name, s in _scales(constants, p).items():
            if name != "paper":
                values[name] = lln_log_p(q, k, s.item())
        # A common range that holds all but the thinnest tails of the softmax attention.
        centre, spread = values["softmax"].mean().item(), values["softmax"].std().item()
        low, high = centre - 4.5 * spread, min(0.0, centre + 5 * spread)
        edges = torch.linspace(low, high, _BINS + 1, dtype=torch.float64)
        for name, logs in values.items():
            counts = torch.histc(logs.cpu(), bins=_BINS, min=low, max=high)
            density = counts / (logs.numel() * (edges[1] - edges[0]))
            if name == "softmax":
                axes.stairs(density, edges, label=_NAMES[name], fill=True, color="#CCCCCC")
            else:
                look = {key: _LOOKS[name][key] for key in ("color", "linestyle")}
                axes.stairs(density, edges, label=_NAMES[name], linewidth=1.6, **look)
        axes.set(xlabel="log P", xlim=(low, high))
        title = f"{letter} p = {variance:g}, d = {_WIDTH}, N = {_LENGTH}"
        axes.set_title(title, loc="left", fontsize=10)
    panels[0].set_ylabel("density")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)


def _scales(constants: Constants, p: torch.Tensor) -> dict[str, torch.Tensor]:
    """The s of each LLN curve; unmatched means α = β = 1 on inputs with σq = σk = p^¼."""
    criteria = constants["criteria"]
    matched = {name: scale(values, p, _WIDTH, _LENGTH) for name, values in criteria.items()}
    return {"unmatched": p**0.25, **matched}


def _plain_ticks(axes: Axes) -> None:
    """Writes 0.1, 1, 10 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    plain = FuncFormatter(lambda value, _: f"{value:g}")
    for axis, kind in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        if kind == "log":
            axis.set_major_formatter(plain)
            axis.set_minor_formatter(NullFormatter())
