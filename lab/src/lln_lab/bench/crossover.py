"""From which length on one curve is below another, as far as noise allows to say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lln_lab.bench.spread import Timed


@dataclass(frozen=True)
class Crossover:
    """Where two curves cross.

    They are within noise where they differ no more than their repeated runs, see
    `lln_lab.bench.spread.Timed.differs_from`.

    Attributes:
        lengths: Where both were measured.
        place: Where the curves cross, if the lengths on both sides are not within noise; else None.
        since: The length from which on the first is below; None if it is not at the longest.
        unclear: The length just below ``since``, or else the longest, if it is within noise there.
    """

    lengths: tuple[int, ...]
    place: float | None = None
    since: int | None = None
    unclear: int | None = None

    def verdict(self, word: str) -> str:
        """In a few words; ``word`` describes the lower curve, such as "faster".

        Example:
            >>> Crossover((128, 256), since=256, unclear=128).verdict("faster")
            'faster from N = 256, within noise at N = 128'
        """
        if self.place is not None:
            return f"{word} from N ≈ {self.place:.0f}"
        if self.since is None:
            not_below = f"not {word}" if self.unclear is None else "within noise"
            return f"{not_below} at N = {self.lengths[-1]}"
        if self.unclear is not None:
            return f"{word} from N = {self.since}, within noise at N = {self.unclear}"
        return f"{word} at every N"


def crossover(slow: Mapping[int, Timed], fast: Mapping[int, Timed]) -> Crossover | None:
    """Where ``fast`` stays below ``slow``; None without a length that both have.

    Medians are interpolated linearly in log-log scale.

    Example:
        >>> slow = {100: Timed(1.0, 1.0, 1.0), 400: Timed(16.0, 15.0, 17.0)}
        >>> fast = {100: Timed(2.0, 2.0, 2.0), 400: Timed(8.0, 7.0, 9.0)}
        >>> round(crossover(slow, fast).place)
        200
    """
    lengths = tuple(sorted(set(slow) & set(fast)))
    if not lengths:
        return None
    clear = [fast[n].differs_from(slow[n]) for n in lengths]
    below = [clear[i] and fast[n].median < slow[n].median for i, n in enumerate(lengths)]
    first = next((i + 1 for i in reversed(range(len(lengths))) if not below[i]), 0)
    since = lengths[first] if first < len(lengths) else None
    if first == 0:
        return Crossover(lengths, since=since)
    unclear = None if clear[first - 1] else lengths[first - 1]
    if since is None or unclear is not None:
        return Crossover(lengths, since=since, unclear=unclear)
    (x0, y0), (x1, y1) = (
        (math.log(n), math.log(slow[n].median / fast[n].median))
        for n in (lengths[first - 1], since)
    )
    return Crossover(lengths, math.exp(x0 + (x1 - x0) * -y0 / (y1 - y0)), since)
