"""Figures 6a and 6b: the variance of the logarithm of a sum of log-normals.

(a) The moderate case, where Fenton's formula, Eq. (28), should hold. (b) The broad case, where the
paper fits a line, Eq. (30), and where LLN attention operates: σ̃² from 7 to 30.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import torch

from lln_lab.figures import theory
from lln_lab.figures.setting import Results, Setting
from lln_lab.figures.style import plain_ticks, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (9.6, 4.0)

# σ̃² = 2s² of the matched s for p from 0.25 to 16 at d = 64.
WORKING_RANGE = (7.0, 30.0)
_LINE_FROM = 10.0
_TERMS = (16, 64, 256)
_LOOKS = (("#0072B2", "o"), ("#D55E00", "^"), ("#009E73", "s"))


def measure_moderate(setting: Setting) -> Results:
    """σ² from 0.2 to 1.2."""
    return _measure(setting, [round(0.2 + 0.1 * step, 1) for step in range(11)])


def measure_broad(setting: Setting) -> Results:
    """σ² from 1 to 40, and the line through the part beyond 10."""
    variances = [1.0, 2.0, 4.0, 7.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0]
    results = _measure(setting, variances)
    for own in results["terms"].values():
        own["line"] = dict(
            zip(("slope", "intercept"), _line(variances, own["measured"]), strict=True)
        )
    return results


def _measure(setting: Setting, variances: list[float]) -> Results:
    draws = 1 << (11 if setting.quick else 16)
    options = {"draws": draws, "device": setting.device}
    found: dict[str, Results] = {str(terms): {"measured": [], "fenton": []} for terms in _TERMS}
    for terms, variance in setting.steps(list(product(_TERMS, variances))):
        own = found[str(terms)]
        own["measured"].append(theory.sample_sum_variance(variance, terms, **options))
        own["fenton"].append(theory.fenton_variance(variance, terms))
    return {"draws": draws, "variance": variances, "terms": found}


def _line(variances: list[float], measured: list[float]) -> tuple[float, float]:
    """Slope and intercept of Eq. (30), least squares over the broad part."""
    pairs = [pair for pair in zip(variances, measured, strict=True) if pair[0] >= _LINE_FROM]
    x, y = torch.tensor(pairs, dtype=torch.float64).T
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    return slope.item(), (y.mean() - slope * x.mean()).item()


def draw_moderate(figure: Figure, results: Results) -> None:
    """The measured variance, Fenton's variance, and their ratio."""
    left, right = figure.subplots(1, 2)
    x = results["variance"]
    for (terms, own), (colour, marker) in zip(results["terms"].items(), _LOOKS, strict=True):
        left.plot(x, own["measured"], marker, color=colour, label=f"measured, {terms} terms")
        left.plot(x, own["fenton"], "--", color=colour)
        ratio = [f / m for f, m in zip(own["fenton"], own["measured"], strict=True)]
        right.plot(x, ratio, marker=marker, color=colour)
    left.plot([], [], "k--", label="Fenton, Eq. (28)")
    left.set(yscale="log", ylabel="variance of the logarithm of the sum")
    left.legend()
    plain_ticks(left)
    right.axhline(1, color="k", linewidth=0.8)
    right.set(ylabel="Fenton / measured")
    title(left, "(a) the paper's Figure 6a")
    title(right, "(b) how far off")
    for axes in (left, right):
        axes.set_xlabel(r"variance of the terms' logarithms, $\sigma^2$")


def draw_broad(figure: Figure, results: Results) -> None:
    """The line of Eq. (30), and what Fenton's formula gives here."""
    left, right = figure.subplots(1, 2)
    x = results["variance"]
    for (terms, own), (colour, marker) in zip(results["terms"].items(), _LOOKS, strict=True):
        line = own["line"]
        left.plot(x, own["measured"], marker, color=colour, label=f"measured, {terms} terms")
        fitted = [line["slope"] * value + line["intercept"] for value in x]
        left.plot(x, fitted, "--", color=colour, linewidth=1)
        right.plot(x, own["measured"], marker=marker, color=colour)
        right.plot(x, own["fenton"], "--", color=colour)
    left.plot([], [], "k--", linewidth=1, label=f"line, Eq. (30), from σ² = {_LINE_FROM:g}")
    left.set(ylabel="variance of the logarithm of the sum", ylim=(0, None))
    left.legend()
    right.axvspan(*WORKING_RANGE, color="#000000", alpha=0.06, linewidth=0)
    right.plot([], [], "k--", label="Fenton, Eq. (28)")
    right.set(yscale="log")
    right.legend(loc="lower right")
    plain_ticks(right)
    title(left, "(a) the paper's Figure 6b")
    title(right, "(b) with Fenton; grey: where LLN attention works")
    for axes in (left, right):
        axes.set_xlabel(r"variance of the terms' logarithms, $\sigma^2$")
