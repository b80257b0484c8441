"""The heat maps of the report: what each shows and how."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lln.studies.inspection.study import Grid, Study
from lln.studies.report.heatmap import heat_map
from lln.studies.report.markup import number

# Ends of a scale of signed numbers, which are written to two digits after the point.
_LEAST = 0.05


@dataclass(frozen=True)
class Map:
    """A heat map of the report.

    Attributes:
        name: The value, or a name of its own if ``grid`` is given.
        title: Above the map.
        caption: Below it.
        write: How a number is written.
        low: Number of the first colour; None = the smallest that is no extreme.
        high: Number of the last colour; None = the largest that is no extreme.
        log: Whether colours follow the logarithm.
        centred: Whether numbers have a sign: zero has the middle of two colours.
        grid: The numbers; None = the value of that name.
    """

    name: str
    title: str
    caption: str
    write: Callable[[float], str]
    low: float | None = None
    high: float | None = None
    log: bool = False
    centred: bool = False
    grid: Callable[[Study], Grid] | None = None

    def numbers(self, study: Study) -> Grid:
        """By layer and head."""
        return study.grid(self.name) if self.grid is None else self.grid(study)

    def draw(self, study: Study) -> str:
        """The map as SVG."""
        return heat_map(
            self.title,
            self.numbers(study),
            low=self.low,
            high=self.high,
            write=self.write,
            log=self.log,
            centred=self.centred,
            least=_LEAST,
        )


def _digits(count: int) -> Callable[[float], str]:
    return lambda value: number(value, f".{count}f")


def _signed(value: float) -> str:
    return number(value, "+.2f" if abs(value) < 9.995 else "+.0f")


def _short(value: float) -> str:
    """At most four characters and a sign, for numbers of any size."""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if size >= 1000 or 0 < size < 0.01:
        digits, power = f"{value:.0e}".split("e")
        return f"{digits}e{int(power)}".replace("-", "−")
    return number(value, ".0f" if size >= 10 else ".1f" if size >= 1 else ".2f")


def _difference(name: str, other: str) -> Callable[[Study], Grid]:
    def grid(study: Study) -> Grid:
        pairs = zip(study.grid(name), study.grid(other), strict=True)
        return [[a - b for a, b in zip(*rows, strict=True)] for rows in pairs]

    return grid


CONCENTRATION = (
    Map(
        "entropy",
        "entropy, bits",
        "<b>Entropy</b> of a row of P, Eq. (7): 0 = one key, {even} bits = all alike.",
        _digits(1),
        low=0.0,
    ),
    Map(
        "spectral_gap",
        "spectral gap",
        "<b>Spectral gap</b> 1 − |λ₂|: near 1 every token receives nearly the same average.",
        _digits(2),
        low=0.0,
        high=1.0,
    ),
    Map(
        "temperature",
        "temperature",
        "<b>Temperature</b> 1/σ of the scores, Eq. (5): the lower, the sharper. Colours are "
        "logarithmic.",
        _short,
        log=True,
    ),
    Map(
        "variance",
        "variance of P",
        "<b>Variance</b> of the entries of P (Theorem 3.4). Colours are logarithmic.",
        _short,
        log=True,
    ),
)
NORMALITY = (
    Map(
        "log_normality.ks",
        "distance from normal",
        "<b>Kolmogorov-Smirnov distance</b> of log P from the normal distribution of its mean and "
        "variance, from 0 to 1.",
        _digits(2),
        low=0.0,
    ),
    Map(
        "log_normality.skew",
        "skew of log P",
        "<b>Skew</b> of log P: 0 for a normal one; positive = a tail of large weights.",
        _signed,
        centred=True,
    ),
    Map(
        "log_normality.kurtosis",
        "excess kurtosis of log P",
        "<b>Excess kurtosis</b> of log P: 0 for a normal one; positive = heavy tails.",
        _signed,
        centred=True,
    ),
    Map(
        "log_normality.row_variance",
        "variance of log P in a row",
        "<b>Variance</b> of log P inside a row, which is that of the scores: the p that moment "
        "matching reproduces. Colours are logarithmic.",
        _short,
        log=True,
    ),
)
GAUSSIAN = (
    Map(
        "gaussianity.query_kurtosis",
        "excess kurtosis of queries",
        "<b>Queries</b>: 0 for Gaussian entries.",
        _signed,
        centred=True,
    ),
    Map(
        "gaussianity.key_kurtosis",
        "excess kurtosis of keys",
        "<b>Keys</b>, their mean taken out: 0 for Gaussian entries.",
        _signed,
        centred=True,
    ),
    Map(
        "gaussianity.query_skew",
        "skew of queries",
        "<b>Queries</b>: 0 for Gaussian entries.",
        _signed,
        centred=True,
    ),
    Map(
        "gaussianity.key_skew",
        "skew of keys",
        "<b>Keys</b>: 0 for Gaussian entries.",
        _signed,
        centred=True,
    ),
    Map(
        "gaussianity.query_norms",
        "spread of query norms",
        "<b>Token norms</b> of queries: relative variance of |q|², 1 for Gaussian entries. Colours "
        "are logarithmic.",
        _short,
        log=True,
    ),
    Map(
        "gaussianity.key_norms",
        "spread of key norms",
        "<b>Token norms</b> of keys: relative variance of |k|², 1 for Gaussian entries. Colours "
        "are logarithmic.",
        _short,
        log=True,
    ),
)
CROSS = Map(
    "theory.cross_share",
    "share of C_cross",
    "<b>C_cross</b> of Eq. (5) as a share of the scores' variance inside a row: what features "
    "of unequal spread and correlations add to σq²σk²; negative = take away.",
    _signed,
    centred=True,
)
LLN = (
    Map(
        "lln.alpha",
        "α",
        "<b>α</b> at which LLN attention has the head’s entropy. Colours are logarithmic.",
        _short,
        log=True,
    ),
    Map(
        "lln.beta",
        "β",
        "<b>β</b> at which LLN attention has the head’s entropy. Colours are logarithmic.",
        _short,
        log=True,
    ),
    Map(
        "lln.entropy_difference",
        "LLN’s entropy, difference",
        "<b>Entropy</b> that LLN misses at that α and β, in bits.",
        _signed,
        centred=True,
        grid=_difference("lln.entropy", "entropy"),
    ),
    Map(
        "lln.gap_difference",
        "LLN’s spectral gap, difference",
        "<b>Spectral gap</b> of LLN less that of softmax.",
        _signed,
        centred=True,
        grid=_difference("lln.spectral_gap", "spectral_gap"),
    ),
    Map(
        "lln.distance",
        "weight that lies elsewhere",
        "<b>Total variation</b> between rows of LLN and of softmax, 0 = the same weights, "
        "1 = disjoint.",
        _digits(2),
        low=0.0,
        high=1.0,
    ),
    Map(
        "lln.formula_difference",
        "entropy by formula, difference",
        '<b>Without measuring</b>: entropy at the α, β of <code>matching="entropy"</code>, which '
        "takes entries to be Gaussian, less softmax’s, in bits.",
        _signed,
        centred=True,
        grid=_difference("lln.formula_entropy", "entropy"),
    ),
)


def draw_maps(study: Study, maps: Sequence[Map]) -> list[tuple[str, str]]:
    """SVG and caption of every map with a number in it."""
    even = f"{math.log2(max(study.tokens, 1)):.1f}"
    return [
        (each.draw(study), each.caption.replace("{even}", even))
        for each in maps
        if any(math.isfinite(value) for row in each.numbers(study) for value in row)
    ]
