"""Figure 2: entropy and spectral gap of attention kernels over the temperature.

The paper concludes that LLN attention with matched moments follows softmax attention and other
kernels do not. Above are the paper's kernels, below the three criteria of matching. Equal variance
of log P does not give equal entropy or gap; matched entropy does.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lln import instruments, match_moments
from lln.instruments import of_matrix
from lln_lab.demo.concentration import factors
from lln_lab.figures.setting import Results, Setting
from lln_lab.figures.style import LOOKS, NAMES, plain_ticks, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (9.6, 7.4)

_PAPER = ("softmax", "paper", "unmatched", "elu", "relu", "quadratic")
_OURS = ("softmax", "paper", "variance", "entropy")
# Kernels with P(aq, bk) = P(q, k): one measurement holds for every temperature.
_SCALE_FREE = ("relu", "quadratic")


def measure(setting: Setting) -> Results:
    """Entropy in bits and spectral gap by kernel and score variance p, medians over the draws."""
    tokens, width, draws = (96, 32, 2) if setting.quick else (512, 64, 5)
    points = range(-4, 5, 2) if setting.quick else [power / 2 for power in range(-8, 9)]
    variances = [2.0**power for power in points]
    unit = setting.gaussians(draws, tokens, width)
    names = list(dict.fromkeys((*_PAPER, *_OURS)))
    entropy: dict[str, list[float]] = {name: [] for name in names}
    gap: dict[str, list[float]] = {name: [] for name in names}
    fixed = {name: concentration(name, unit[0], unit[1]) for name in _SCALE_FREE}
    for p in setting.steps(variances):
        query, key = unit * p**0.25
        for name in names:
            own = fixed[name] if name in fixed else concentration(name, query, key)
            entropy[name].append(own[0].median().item())
            gap[name].append(own[1].median().item())
    return {
        "tokens": tokens,
        "head_width": width,
        "draws": draws,
        "score_variance": variances,
        "temperature": [p**-0.5 for p in variances],
        "entropy_bits": entropy,
        "spectral_gap": gap,
        "distance_to_softmax": {
            name: {"entropy_bits": _distance(entropy, name), "spectral_gap": _distance(gap, name)}
            for name in names
            if name != "softmax"
        },
    }


def concentration(name: str, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy and spectral gap of a kernel, ``[draws]`` each."""
    if name == "softmax":
        return instruments.entropy(query, key)[0], instruments.spectral_gap(query, key)[0]
    if name in ("elu", "relu", "quadratic"):
        if name == "quadratic":
            kernel = (query[0] @ key[0].mT).square()
            matrix = kernel / kernel.sum(-1, keepdim=True)
        else:
            left, right = factors(name, query[0], key[0])
            matrix = left @ right
        return of_matrix.entropy(matrix), of_matrix.spectral_gap(matrix)
    if name == "unmatched":
        alpha = beta = torch.ones(1, 1, 1, 1, dtype=query.dtype, device=query.device)
    else:
        alpha, beta = match_moments(query, key, criterion=name)
    given = {"kind": "lln", "alpha": alpha, "beta": beta}
    return (
        instruments.entropy(query, key, **given)[0],
        instruments.spectral_gap(query, key, **given)[0],
    )


def draw(figure: Figure, results: Results) -> None:
    """The paper's kernels in the upper row, the criteria of matching in the lower."""
    sides = (("entropy_bits", "mean row entropy, bits"), ("spectral_gap", "spectral gap"))
    rows = ((_PAPER, "the paper's Figure 2"), (_OURS, "criteria of moment matching"))
    panels = figure.subplots(2, 2, sharex=True)
    for row, (names, what) in enumerate(rows):
        for column, (side, label) in enumerate(sides):
            axes = panels[row][column]
            for name in names:
                text = NAMES[name]
                if name != "softmax":
                    text += f": {results['distance_to_softmax'][name][side]:.2f}"
                axes.plot(results["temperature"], results[side][name], label=text, **LOOKS[name])
            axes.set(xscale="log", ylabel=label)
            axes.legend(title="mean distance to softmax", title_fontsize=8, fontsize=8)
            title(axes, f"({'abcd'[2 * row + column]}) {what}")
            plain_ticks(axes)
    for axes in panels[1]:
        axes.set_xlabel(r"temperature of softmax attention, $\tau = 1 / \sigma_q \sigma_k$")
    figure.suptitle(
        f"d = {results['head_width']}, N = {results['tokens']}, medians of {results['draws']}",
        fontsize=10,
    )


def _distance(curves: dict[str, list[float]], name: str) -> float:
    """Mean distance to softmax attention over the temperatures."""
    pairs = zip(curves[name], curves["softmax"], strict=True)
    return fmean(abs(own - softmax) for own, softmax in pairs)
