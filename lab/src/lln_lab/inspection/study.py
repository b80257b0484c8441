"""What inspect finds in a model: numbers by layer and head, and the shape of log P.

Dimension legend: B samples, H query heads, Q quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lln.errors import LLNError
from lln.instruments.observed_call import SeenCall
from lln_lab.inspection.gaussianity import gaussianity
from lln_lab.inspection.head_masses import measure_masses, measure_page_masses
from lln_lab.inspection.imitation import REACH, StandIn, imitate

INSTRUMENTS = (
    "temperature",
    "entropy",
    "spectral_gap",
    "variance",
    "log_normality",
    "score_variance",
)

Grid = list[list[float]]


@dataclass
class Shape:
    """The distribution of log P of one head.

    Attributes:
        quantiles: Quantiles of log P.
        normal_quantiles: Those of the fitted normal distribution, at the same probabilities.
        softmax_histogram: Share of the entries in equal bins over mean ± 5 standard deviations.
        lln_histogram: The same of LLN's log P at its α and β, over the same bins.
    """

    quantiles: list[float]
    normal_quantiles: list[float]
    softmax_histogram: list[float]
    lln_histogram: list[float]


@dataclass
class StudiedLayer:
    """One attention layer.

    Attributes:
        name: Path of its module.
        kind: Its kind of attention.
        heads: H.
        width: D.
        queries: T.
        keys: S.
        is_causal: Whether row i sees keys 0 … i only.
        values: By name, one number per head: the median over the samples.
        shapes: Distributions by head, of the first sample.
        problem: Why (part of) it was not measured; empty if all of it was.
        note: Why LLN was not tried in its place; empty if it was tried.
        pages: Sizes of window, sinks and pages that its attention was divided by.
    """

    name: str
    kind: str
    heads: int
    width: int
    queries: int
    keys: int
    is_causal: bool
    values: dict[str, list[float]] = field(default_factory=dict)
    shapes: list[Shape] = field(default_factory=list)
    problem: str = ""
    note: str = ""
    pages: dict[str, int] = field(default_factory=dict)

    def value(self, name: str, head: int) -> float:
        """One number; NaN where there is none."""
        heads = self.values.get(name, [])
        return heads[head] if head < len(heads) else math.nan

    def remarks(self) -> str:
        """Everything that was not measured, and why."""
        return "; ".join(filter(None, (self.problem, self.note and f"no LLN: {self.note}")))


@dataclass
class Study:
    """A model and all its layers."""

    model: str
    architecture: str
    text: str
    tokens: int
    samples: int
    layers: list[StudiedLayer] = field(default_factory=list)
    expected_layers: int = 0
    seconds: float = math.nan
    environment: dict[str, str] = field(default_factory=dict)
    stopped: bool = False

    @property
    def heads(self) -> int:
        """Heads of the widest layer."""
        return max((layer.heads for layer in self.layers), default=0)

    def grid(self, name: str) -> Grid:
        """Values by layer and head; NaN where there is none."""
        return [[layer.value(name, head) for head in range(self.heads)] for layer in self.layers]

    def value_names(self) -> list[str]:
        """Names of everything that was measured in any layer."""
        return sorted({name for layer in self.layers for name in layer.values})

    def cells(self, *names: str) -> list[tuple[int, int, tuple[float, ...]]]:
        """``(layer, head, values)`` of all heads where all these values are finite."""
        found = []
        for index, layer in enumerate(self.layers):
            for head in range(layer.heads):
                values = tuple(layer.value(name, head) for name in names)
                if all(map(math.isfinite, values)):
                    found.append((index, head, values))
        return found


def study_layer(
    seen: SeenCall,
    tick: Callable[[], object] = lambda: None,
    pages: dict[str, int] | None = None,
) -> StudiedLayer:
    """Everything about one call that capture has measured.

    Args:
        seen: The call, with its values.
        tick: Called after each of two steps.
        pages: Sizes of window, sinks and pages that differ from what a conversion would give.
    """
    queries, keys = seen.tokens
    layer = StudiedLayer(
        seen.layer,
        seen.kind,
        seen.query.shape[-3],
        seen.query.shape[-1],
        queries,
        keys,
        bool(seen.options.get("is_causal")),
        problem=seen.problem,
    )
    values = {name: tensor for name, tensor in seen.values.items() if tensor.dim() == 2}
    values |= _theory(values, seen)
    found: StandIn | None = None
    layer.note = _why_not_lln(seen)
    try:
        mask = seen.options.get("key_mask")
        shapes = gaussianity(seen.query, seen.key, key_mask=mask)
        values |= {f"gaussianity.{name}": tensor for name, tensor in shapes._asdict().items()}
        if not layer.note:
            found = imitate(seen, tick)
            for name, tensor in found._asdict().items():
                if tensor.dim() == 2:
                    values[f"lln.{name}"] = tensor
            values |= measure_masses(seen)
            masses, layer.pages = measure_page_masses(seen, pages or {})
            values |= masses
    except (LLNError, RuntimeError, ValueError) as error:
        layer.problem = layer.problem or f"not measured: {str(error).splitlines()[0]}"
    layer.values = {name: _medians(tensor) for name, tensor in values.items()}
    layer.shapes = _shapes(seen, found)
    return layer


def _theory(values: dict[str, Tensor], seen: SeenCall) -> dict[str, Tensor]:
    """What Proposition 3.1 predicts from queries and keys."""
    if "score_variance.within_row" not in values:
        return {}
    p = values["score_variance.within_row"]
    gaussian = values["score_variance.total"] - values["score_variance.cross"]
    log_keys = _mean_log_keys(seen).cpu()
    return {
        "theory.variance": gaussian,
        "theory.mean": -log_keys - p / 2,
        # A log-normal row has Σ P ln P = −ln N + p/2.
        "theory.entropy": (log_keys - p / 2) / math.log(2),
        "theory.cross_share": 1 - gaussian / p,
    }


def _mean_log_keys(seen: SeenCall) -> Tensor:
    """Mean over the rows of the logarithm of how many keys a row sees, ``[B, 1]``."""
    mask = seen.options.get("key_mask")
    if mask is None:
        count = torch.full((seen.query.shape[0], 1), float(seen.tokens[1]), dtype=torch.float64)
    else:
        count = mask.sum(-1, keepdim=True).double()
    if seen.options.get("is_causal"):
        # Row i sees i keys: the mean of ln i is ln(N!)/N.
        return torch.lgamma(count + 1) / count
    return count.log()


def _why_not_lln(seen: SeenCall) -> str:
    if seen.kind != "softmax":
        return "it is not softmax attention"
    if seen.pair_mask is not None:
        return "its mask over pairs of tokens cannot be applied in linear time"
    if "log_normality.mean" not in seen.values or seen.options.get("cu_seqlens") is not None:
        return "its weights do not follow from queries and keys alone"
    return ""


def _shapes(seen: SeenCall, found: StandIn | None) -> list[Shape]:
    """The first sample's distributions, by head."""
    if "log_normality.quantiles" not in seen.values:
        return []
    quantiles = seen.values["log_normality.quantiles"][0]
    normal = seen.values["log_normality.normal_quantiles"][0]
    nothing = torch.full((quantiles.shape[0], 0), torch.nan)
    own = nothing if found is None else found.softmax_histogram[0]
    other = nothing if found is None else found.lln_histogram[0]
    return [
        Shape(*(side[head].tolist() for side in (quantiles, normal, own, other)))
        for head in range(quantiles.shape[0])
    ]


def _medians(tensor: Tensor) -> list[float]:
    """Median over the samples that have a value, ``[B, H]`` → H numbers."""
    return [torch.nanquantile(column.double(), 0.5).item() for column in tensor.mT.cpu()]


def bin_edges(mean: float, variance: float, bins: int) -> list[float]:
    """Edges of a `Shape`'s histograms on the axis of log P."""
    spread = math.sqrt(variance)
    return [mean + spread * REACH * (2 * index / bins - 1) for index in range(bins + 1)]
