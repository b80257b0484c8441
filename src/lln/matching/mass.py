"""Mass matching: which offset puts the slots of the summary on the scale of softmax scores.

`lln_keys_attention` weighs exact keys and slots under one normaliser. For Gaussian queries and keys
with score variance p = σq²σk² and spread s = ασq = βσk, the log-normaliser of softmax attention
over N keys is ln N + p/2 in the mean, that of LLN attention ln N + ln D + s². The offset is the
difference. It is right for Gaussian inputs and a start for training; real activations need
`lln.calibrate_keys`.

Dimension legend: B batch, H heads, D head width.
"""

from __future__ import annotations

import math

from torch import Tensor

from lln.eager.run import repeat_temperature
from lln.matching.moments import Moments, temperatures

# Slots that carry only what is left beside exact keys do so best at half the spread that would
# match the entropy of softmax (lab/results/experiments/keys_prototype.json).
REST_FACTOR = 0.5


def keys_temperatures(moments: Moments, head_width: int, matching: str) -> tuple[Tensor, Tensor]:
    """α and β ``[B, H, 1, 1]`` for ``"rest"``, or for a criterion of `match_moments`."""
    if matching != "rest":
        return temperatures(moments, head_width, matching)
    alpha, beta = temperatures(moments, head_width, "entropy")
    return REST_FACTOR * alpha, REST_FACTOR * beta


def mass_offset(
    moments: Moments,
    alpha: float | Tensor,
    beta: float | Tensor,
    head_width: int,
    scale: float | None = None,
) -> Tensor:
    """G = p/2 - ln D - s², ``[B, H, 1, 1]``, without gradient.

    Args:
        moments: σq² and σk².
        alpha: A number, or broadcasts to ``[B, H, 1, 1]``.
        beta: Likewise; one value per key head is repeated for its query heads.
        head_width: D.
        scale: Factor of the softmax scores; None = 1/√D.
    """
    query_variance, key_variance = (
        side[..., None, None] for side in (moments.query_variance, moments.key_variance)
    )
    heads, dtype = query_variance.shape[1], query_variance.dtype
    sides = (side.detach() if isinstance(side, Tensor) else side for side in (alpha, beta))
    alpha, beta = (repeat_temperature(side, heads, dtype) for side in sides)
    factor = 1.0 if scale is None else scale * scale * head_width
    scores = factor * query_variance * key_variance
    spread = (alpha * alpha * query_variance + beta * beta * key_variance) / 2
    return scores / 2 - math.log(head_width) - spread
