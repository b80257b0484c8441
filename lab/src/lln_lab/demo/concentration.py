"""How concentrated attention is: entropy and spectral gap against the variance of the scores.

Every linear attention here is a product of two thin matrices, P = A·B with A ``[N, d]`` and B
``[d, N]``. The non-zero eigenvalues of A·B are those of the small B·A, which makes the spectral gap
cheap; softmax attention and the quadratic kernel need the whole matrix.

Dimension legend: N tokens, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from lln import match_moments, reference
from lln_lab.demo.state import Clock, Part, State

KERNELS = ("softmax", "lln", "lln_entropy", "lln_unit", "elu", "relu", "quadratic")
# Kernels with P(aq, bk) = P(q, k): one measurement holds for every spread of the inputs.
SCALE_FREE = ("relu", "quadratic")
MAPPED = ("softmax", "lln", "lln_entropy", "elu")

_CRITERION = {"lln": "variance", "lln_entropy": "entropy"}

Curves = dict[str, dict[float, list[float]]]


def _curves() -> Curves:
    return {name: {} for name in KERNELS}


@dataclass
class Concentration(Part):
    """Entropy in bits and spectral gap, by kernel and score variance p, one value per seed.

    Attributes:
        tokens: N.
        width: d.
        score_variances: The values of p; queries and keys get the spread σ = p^¼ each.
        seeds: Independent draws.
        map_variance: The p whose matrices are kept as pictures.
        entropy: Mean row entropy, Eq. (7).
        gap: 1 − |λ₂|.
        maps: The first ``map_size`` rows and columns of N·P.
        map_size: Rows and columns of a picture.
    """

    tokens: int = 256
    width: int = 64
    score_variances: tuple[float, ...] = tuple(2.0**power for power in range(-4, 5))
    seeds: int = 5
    map_variance: float = 4.0
    entropy: Curves = field(default_factory=_curves)
    gap: Curves = field(default_factory=_curves)
    maps: dict[str, Tensor] = field(default_factory=dict)
    map_size: int = 64

    @property
    def has_results(self) -> bool:
        """Whether one score variance is measured for every kernel."""
        return bool(self.measured())

    def measured(self) -> list[float]:
        """Score variances for which every kernel has a value."""
        return [p for p in self.score_variances if all(p in self.gap[name] for name in KERNELS)]

    def seeds_done(self) -> int:
        """Number of draws that every value is based on."""
        return min((len(self.gap["softmax"][p]) for p in self.measured()), default=0)

    def distance(self, curves: Curves, name: str) -> float:
        """Mean distance to softmax attention over the score variances measured."""
        gaps = [
            abs(self.middle(curves, name, p) - self.middle(curves, "softmax", p))
            for p in self.measured()
        ]
        return sum(gaps) / len(gaps)

    @staticmethod
    def middle(curves: Curves, name: str, p: float) -> float:
        """Median over the draws."""
        return median(curves[name][p])

    @property
    def even_entropy(self) -> float:
        """Entropy in bits of attention with equal weights."""
        return math.log2(self.tokens)

    def measure(self, clock: Clock) -> Iterator[float]:
        """Measure the curves draw by draw; yields the share that is done."""
        self.state = State.RUNNING
        rounds = self.seeds * len(self.score_variances)
        for seed in range(self.seeds):
            if seed and clock.spent * (seed + 1) / seed > clock.seconds:
                break
            generator = torch.Generator().manual_seed(seed)
            shape = (2, 1, 1, self.tokens, self.width)
            draw = torch.randn(shape, generator=generator, dtype=torch.float64)
            scale_free = {name: concentration(name, draw[0], draw[1])[:2] for name in SCALE_FREE}
            for index, p in enumerate(self.score_variances):
                query, key = draw * p**0.25
                for name in KERNELS:
                    if name in SCALE_FREE:
                        self._add(name, p, *scale_free[name])
                        continue
                    entropy, gap, matrix = concentration(name, query, key)
                    self._add(name, p, entropy, gap)
                    if seed == 0 and p == self.map_variance and name in MAPPED:
                        corner = matrix[0, 0, : self.map_size, : self.map_size]
                        self.maps[name] = (corner * self.tokens).float()
                yield (seed * len(self.score_variances) + index + 1) / rounds
        self.state = State.DONE

    def _add(self, name: str, p: float, entropy: float, gap: float) -> None:
        self.entropy[name].setdefault(p, []).append(entropy)
        self.gap[name].setdefault(p, []).append(gap)

    def as_json(self) -> dict[str, object]:
        """Medians over the draws, by kernel."""
        measured = self.measured()
        return {
            "state": self.state.value,
            "tokens": self.tokens,
            "head_width": self.width,
            "seeds": self.seeds_done(),
            "score_variance": measured,
            **{
                key: {name: [self.middle(curves, name, p) for p in measured] for name in KERNELS}
                for key, curves in (("entropy_bits", self.entropy), ("spectral_gap", self.gap))
            },
        }


def concentration(name: str, query: Tensor, key: Tensor) -> tuple[float, float, Tensor]:
    """Entropy, spectral gap and the matrix P of a kernel; query, key ``[1, 1, N, d]`` float64."""
    if name in ("softmax", "quadratic"):
        if name == "softmax":
            matrix = reference.softmax_matrix(query, key)
        else:
            kernel = (query @ key.mT).square()
            matrix = kernel / kernel.sum(-1, keepdim=True)
        small = matrix
    else:
        left, right = factors(name, query, key)
        matrix, small = left @ right, right @ left
    return reference.entropy(matrix).item(), reference.spectral_gap(small).item(), matrix


def factors(name: str, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """A ``[..., N, d]`` and B ``[..., d, N]`` with P = A·B."""
    if name in ("elu", "relu"):
        query, key = (F.elu(t) + 1 if name == "elu" else F.relu(t) for t in (query, key))
        mass = query @ key.sum(-2, keepdim=True).mT
        return query / mass.clamp_min(1e-300), key.mT
    if name == "lln_unit":
        exponent_q, exponent_k = query, key
    else:
        alpha, beta = match_moments(query, key, criterion=_CRITERION[name])
        exponent_q, exponent_k = alpha * query, beta * key
    mass = exponent_k.logsumexp(-2, keepdim=True)
    return (exponent_q + mass).softmax(-1), exponent_k.softmax(-2).mT
