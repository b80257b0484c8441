"""Figure 5a: mean and variance of log P of softmax attention against Proposition 3.1."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lln import instruments
from lln_lab.figures import theory
from lln_lab.figures.setting import Results, Setting
from lln_lab.figures.style import title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (9.6, 4.0)

# For p beyond this multiple of ln N a row's normaliser is no longer close to its expectation.
MEAN_LIMIT = 0.7
_COLOURS = ("#0072B2", "#D55E00", "#009E73")


def measure(setting: Setting) -> Results:
    """Moments of log P by length and score variance p, and what Proposition 3.1 predicts."""
    width, draws = (32, 1) if setting.quick else (64, 3)
    lengths = (64, 256) if setting.quick else (128, 512, 2048)
    variances = [0.5, 2.0, 8.0] if setting.quick else [0.25, 0.5, 1, 2, 3, 4, 6, 8, 10, 12, 14, 16]
    found: dict[str, Results] = {}
    for tokens in setting.steps(lengths):
        unit = setting.gaussians(draws, tokens, width, seed=tokens)
        own: dict[str, list[float]] = {"mean": [], "variance": [], "row_variance": []}
        for p in variances:
            shape = instruments.log_normality(*(unit * p**0.25))
            for name, values in own.items():
                values.append(getattr(shape, name).mean().item())
        predicted = [theory.proposition_3_1(p, tokens) for p in variances]
        found[str(tokens)] = own | {
            "predicted_mean": [float(side.mean) for side in predicted],
            "predicted_variance": [float(side.variance) for side in predicted],
        }
    return {
        "head_width": width,
        "draws": draws,
        "score_variance": variances,
        "lengths": found,
        "predicted_total_variance": [theory.softmax_total_variance(p, width) for p in variances],
    }


def draw(figure: Figure, results: Results) -> None:
    """Left: variance; right: mean; dashed: Proposition 3.1."""
    p, width = results["score_variance"], results["head_width"]
    left, right = figure.subplots(1, 2)
    tokens, own = list(results["lengths"].items())[len(results["lengths"]) // 2]
    left.plot(p, own["variance"], "o", color="#0072B2", label="measured, whole matrix")
    left.plot(p, own["row_variance"], "^", color="#D55E00", label="measured, within a row")
    left.plot(p, own["predicted_variance"], "k--", label="Proposition 3.1: p")
    left.plot(p, results["predicted_total_variance"], "k:", label="p + p²/2d")
    left.set(ylabel="variance of log P")
    title(left, f"(a) d = {width}, N = {tokens}")
    left.legend()
    for (tokens, own), colour in zip(results["lengths"].items(), _COLOURS, strict=False):
        shift = math.log(int(tokens))
        means = [mean + shift for mean in own["mean"]]
        right.plot(p, means, "o", color=colour, label=f"measured, N = {tokens}")
        limit = MEAN_LIMIT * shift
        if limit < max(p):
            right.axvline(limit, color=colour, linewidth=0.8, linestyle=":")
    right.plot(p, [-value / 2 for value in p], "k--", label="Proposition 3.1: −p/2")
    right.set(ylabel="mean of log P, plus ln N")
    title(right, f"(b) d = {width}; dotted: p = {MEAN_LIMIT:g} ln N")
    right.legend()
    for axes in (left, right):
        axes.set_xlabel(r"variance of the scores, $p = \sigma_q^2 \sigma_k^2$")
