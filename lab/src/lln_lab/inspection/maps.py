"""The heat maps of the report: what each shows and how."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lln_lab.inspection.parts import Parts
from lln_lab.inspection.study import Grid, Study
from lln_lab.report.chart import CaptionedChart, Chart
from lln_lab.report.heatmap import heat_map
from lln_lab.report.numbers import number

# Least range of a scale of signed numbers, which are written with two decimals.
_LEAST = 0.05


@dataclass(frozen=True)
class Map:
    """A heat map of the report.

    Attributes:
        name: The value; ``a - b`` = the difference of two values.
        title: Above the map.
        lead: The first words of the caption.
        caption: The rest of it.
        write: How a number is written.
        low: Number of the first colour; None = the smallest that is not an extreme.
        high: Number of the last colour; None = the largest that is not an extreme.
        log: Whether colours follow the logarithm.
        centred: Whether numbers are signed, with zero in the middle of the colour scale.
    """

    name: str
    title: str
    lead: str
    caption: str
    write: Callable[[float], str]
    low: float | None = None
    high: float | None = None
    log: bool = False
    centred: bool = False

    def numbers(self, study: Study) -> Grid:
        """The numbers by layer and head."""
        first, _, second = self.name.partition(" - ")
        if not second:
            return study.grid(first)
        pairs = zip(study.grid(first), study.grid(second), strict=True)
        return [[a - b for a, b in zip(*rows, strict=True)] for rows in pairs]

    def draw(self, study: Study) -> Chart:
        """The chart of the map."""
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


def draw_maps(study: Study, maps: Sequence[Map]) -> list[CaptionedChart]:
    """Every map with a number in it."""
    even = f"{math.log2(max(study.tokens, 1)):.1f}"
    return [
        CaptionedChart(each.draw(study), each.lead, each.caption.replace("{even}", even))
        for each in maps
        if any(math.isfinite(value) for row in each.numbers(study) for value in row)
    ]


def _digits(count: int) -> Callable[[float], str]:
    return lambda value: number(value, f".{count}f")


def _with_sign(value: float) -> str:
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


def _signed(name: str, title: str, lead: str, caption: str) -> Map:
    return Map(name, title, lead, caption, _with_sign, centred=True)


def _logarithmic(name: str, title: str, lead: str, caption: str) -> Map:
    return Map(name, title, lead, f"{caption} Colours are logarithmic.", _short, log=True)


CONCENTRATION = (
    Map(
        "entropy",
        "entropy, bits",
        "Entropy",
        " of a row of P, Eq. (7): 0 = one key, {even} bits = all alike.",
        _digits(1),
        low=0.0,
    ),
    Map(
        "spectral_gap",
        "spectral gap",
        "Spectral gap",
        " 1 − |λ₂|: near 1 every token receives nearly the same average.",
        _digits(2),
        low=0.0,
        high=1.0,
    ),
    _logarithmic(
        "temperature",
        "temperature",
        "Temperature",
        " 1/σ of the scores, Eq. (5): the lower, the sharper.",
    ),
    _logarithmic("variance", "variance of P", "Variance", " of the entries of P (Theorem 3.4)."),
)
NORMALITY = (
    Map(
        "log_normality.ks",
        "distance from normal",
        "Kolmogorov-Smirnov distance",
        " of log P from the normal distribution of its mean and variance, from 0 to 1.",
        _digits(2),
        low=0.0,
    ),
    _signed(
        "log_normality.skew",
        "skew of log P",
        "Skew",
        " of log P: 0 for a normal distribution; positive = a tail of large weights.",
    ),
    _signed(
        "log_normality.kurtosis",
        "excess kurtosis of log P",
        "Excess kurtosis",
        " of log P: 0 for a normal distribution; positive = heavy tails.",
    ),
    _logarithmic(
        "log_normality.row_variance",
        "variance of log P in a row",
        "Variance",
        " of log P inside a row, which is that of the scores: the p that moment matching "
        "reproduces.",
    ),
)
_GAUSSIAN_ENTRIES = ": 0 for Gaussian entries."
_GAUSSIAN_NORMS = ": relative variance of the squared norm, 1 for Gaussian entries."
GAUSSIAN = (
    _signed(
        "gaussianity.query_kurtosis", "excess kurtosis of queries", "Queries", _GAUSSIAN_ENTRIES
    ),
    _signed(
        "gaussianity.key_kurtosis",
        "excess kurtosis of keys",
        "Keys",
        " without their mean" + _GAUSSIAN_ENTRIES,
    ),
    _signed("gaussianity.query_skew", "skew of queries", "Queries", _GAUSSIAN_ENTRIES),
    _signed("gaussianity.key_skew", "skew of keys", "Keys", _GAUSSIAN_ENTRIES),
    _logarithmic(
        "gaussianity.query_norms", "spread of query norms", "Norms of queries", _GAUSSIAN_NORMS
    ),
    _logarithmic("gaussianity.key_norms", "spread of key norms", "Norms of keys", _GAUSSIAN_NORMS),
)
MASSES = (
    Map(
        "mass.block",
        "share in the own block",
        "Own block",
        " of 64 tokens: its share of softmax’s attention.",
        _digits(2),
        low=0.0,
        high=1.0,
    ),
    Map(
        "mass.rest_64",
        "share left to slots",
        "Slots",
        ": the share of attention outside the block and the 64 keys chosen for it.",
        _digits(2),
        low=0.0,
        high=1.0,
    ),
)


def page_maps(parts: Parts) -> list[Map]:
    """Shares of the window, of sinks and of what the usual number of pages leaves out."""
    told = {
        "window": ("Window", ": its share of softmax’s attention."),
        "sinks": ("Sinks", ": the share of the first tokens, where they are not in the window."),
    }
    maps = [
        Map(value, f"share of the {name}", *told[name], _digits(2), low=0.0, high=1.0)
        for name, value in parts.always.items()
    ]
    lead = f" of attention outside all of them: what {parts.usual} pages leave out."
    rest = f"{parts.left_value}_{parts.usual}"
    return [*maps, Map(rest, "share left out", "Rest", lead, _digits(2), low=0.0, high=1.0)]


CROSS = _signed(
    "theory.cross_share",
    "share of C_cross",
    "C_cross",
    " of Eq. (5) as a share of the variance of the scores inside a row: what features of unequal "
    "spread and correlations add to σq²σk²; a negative share reduces it.",
)
LLN = (
    _logarithmic("lln.alpha", "α", "α", " at which LLN attention has the head’s entropy."),
    _logarithmic("lln.beta", "β", "β", " at which LLN attention has the head’s entropy."),
    _signed(
        "lln.entropy - entropy",
        "LLN’s entropy, difference",
        "Entropy",
        " that LLN misses at that α and β, in bits.",
    ),
    _signed(
        "lln.spectral_gap - spectral_gap",
        "LLN’s spectral gap, difference",
        "Spectral gap",
        " of LLN minus that of softmax.",
    ),
    Map(
        "lln.distance",
        "weight that lies elsewhere",
        "Total variation",
        " between rows of LLN and of softmax: 0 = the same weights, 1 = disjoint.",
        _digits(2),
        low=0.0,
        high=1.0,
    ),
    _signed(
        "lln.formula_entropy - entropy",
        "entropy by formula, difference",
        "Without measuring",
        ': entropy at the α, β of matching="entropy", which takes entries to be Gaussian, minus '
        "that of softmax, in bits.",
    ),
)
