"""Ends of an axis or of a colour scale that a few extremes do not affect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import quantiles

# A number this many interquartile ranges outside the quartiles is an extreme.
_REACH = 3.0


def robust_ends(numbers: Sequence[float], *, log: bool = False) -> tuple[float, float]:
    """The smallest and the largest number that is not an extreme.

    Extremes lie outside the quartiles by more than three interquartile ranges. If the quartiles are
    equal, no number is an extreme.

    Args:
        numbers: Those that are not finite are left out, and with ``log`` those that are not
            positive too.
        log: Whether widths are ratios.

    Example:
        >>> robust_ends([1, 2, 3, 4, 5, 6, 100])
        (1, 6)
    """
    kept = [value for value in numbers if math.isfinite(value) and (value > 0 or not log)]
    if not kept:
        return 0.0, 1.0
    places = [math.log(value) if log else value for value in kept]
    if len(kept) > 1:
        low, _, high = quantiles(places, n=4, method="inclusive")
        reach = _REACH * (high - low) or math.inf
        near = [low - reach <= place <= high + reach for place in places]
        kept = [value for value, is_near in zip(kept, near, strict=True) if is_near]
    return min(kept), max(kept)
