"""The fitted curves of moment matching: s(p, D, S), from constants that ship with the package.

One number s = σ̃/√2 gives α = s/σq and β = s/σk, Eq. (10). It depends on the variance of the
softmax scores p = σq²σk², on the head width D and, for one criterion, on the number of keys S.
``lln fit`` recomputes ``constants.json`` from scratch.
"""

from __future__ import annotations

import json
import math
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_CRITERIA: dict[str, Any] = json.loads(
    resources.files("lln.matching").joinpath("constants.json").read_text("utf-8")
)["criteria"]

# A spread below this, absolutely or relative to the size of the entries, is rounding noise.
SPREAD_FLOOR = 1e-6


def matched_spread(score_variance: Any, head_width: int, keys: Any, criterion: str) -> Any:
    """The matched s = α·σq = β·σk for scores of variance p.

    Args:
        score_variance: p = σq²σk², any shape, a tensor or a NumPy array, as is the result.
        head_width: D.
        keys: S, broadcasts to p.
        criterion: ``"variance"``, ``"entropy"`` or ``"paper"``.

    Example:
        >>> round(matched_spread(torch.tensor(1.0), 64, 1024.0, "entropy").item(), 1)
        1.9
    """
    xp: Any = torch if isinstance(score_variance, Tensor) else np
    if criterion == "paper":
        constants = _CRITERIA[criterion]
        return xp.sqrt((score_variance - constants["b"]) / (2 * constants["a"]))
    curve = spread_curve(head_width, criterion) if xp is torch else _known(head_width, criterion)
    least, most = curve.p_range
    # NumPy's own clip takes five times as long for a few numbers.
    clamped = (
        score_variance.clip(least, most)
        if xp is torch
        else np.minimum(np.maximum(score_variance, least), most)
    )
    coefficients: list[Any] = list(curve.coefficients)
    if any(curve.slopes):
        keys = xp.asarray(keys, dtype=clamped.dtype, device=clamped.device)
        x = xp.log(keys.clip(*curve.n_range) / 1024)
        for power, slope in enumerate(curve.slopes):
            coefficients[power] = coefficients[power] + x * slope
    u = xp.log(clamped)
    log_spread: Any = 0.0
    for coefficient in reversed(coefficients):
        log_spread = log_spread * u + coefficient
    # Outside the fitted range both attentions follow power laws: s grows like √p.
    return xp.exp(log_spread) * xp.sqrt(score_variance / clamped)


class Curve(NamedTuple):
    """log s as a polynomial in u = log p whose coefficients may depend on log(S / 1024).

    Attributes:
        coefficients: Of u⁰ … u⁴ at S = 1024.
        slopes: Change of the coefficients of u⁰ … u³ per unit of log(S / 1024); zeros where S does
            not matter.
        p_range: Where p was fitted; outside, s follows √p.
        n_range: Where S was fitted.
    """

    coefficients: tuple[float, ...]
    slopes: tuple[float, ...]
    p_range: tuple[float, float]
    n_range: tuple[float, float]


def spread_curve(head_width: int, criterion: str) -> Curve:
    """The fitted curve at one head width."""
    constants = _CRITERIA[criterion]
    smallest, largest = constants["d_range"]
    w = math.log(min(max(head_width, smallest), largest) / 64)
    coefficients = tuple(m0 + m1 * w + m2 * w * w for m0, m1, m2 in constants["M"])
    slopes = tuple(constants["X"]) or (0.0,) * (len(coefficients) - 1)
    return Curve(coefficients, slopes, tuple(constants["p_range"]), tuple(constants["n_range"]))


# For NumPy only: a compiler does not trace it.
_known = cache(spread_curve)
