"""RFA, random feature attention: sines and cosines of random projections.

Dimension legend: B batch, H heads, N tokens, D head width, M random directions.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from lln.checks.names import check_choice
from lln.errors import InvalidInputError
from lln_lab.peers.linear import LEAST_FLOOR, LinearCore
from lln_lab.peers.option_checks import check_counts, check_number
from lln_lab.peers.peer import Card, Host, Mask


class RandomFeatureAttention(LinearCore):
    """Linear attention with φ(x) = M^(−½) [sin(W x̂) ; cos(W x̂)], x̂ = x/(‖x‖ + 10⁻³).

    Rows of W are N(0, diag(σ²)/τ²), σ learned. For unit vectors E[φ(q)·φ(k)] = e^{−1/τ²}
    exp(q·k/τ²). Weights may be negative; the denominator is the absolute row sum, raised to at
    least e^{−2/τ²}, below which the true sum cannot fall while σ = 1 and one key is real.

    Args:
        features: M, random directions per head; the feature size is 2M.
        temperature: τ.
        pool: Matrices drawn at construction. Every training call takes one per head at random; eval
            mode the first H.
        compat: ``"released"`` for the factor 0.1 instead of M^(−½) and a denominator of at least
            1, which shrinks the rows of short sequences.
    """

    card = Card(
        name="rfa",
        title="RFA",
        citation="Peng et al. 2021, arXiv 2103.02143",
        equation="P_ij = φ(q_i)·φ(k_j)/|Σ_l φ(q_i)·φ(k_l)|, φ(x) = M^(−½)[sin Wx̂ ; cos Wx̂]",
        complexity="O(N M d)",
        row_stochastic=False,
        equivariant=True,
        random="a pool of W at construction; which of them, at every training call",
        adds="H d (σ, started at 1)",
        oracle="dense form; Monte-Carlo mean of the kernel",
        departures="W Gaussian, not the released 'orf', whose rows are not orthogonal; φ scaled as "
        "in the paper and a denominator of at least e^{−2/τ²}: compat='released' is 0.1 and 1; "
        "no gate of the causal variant",
    )

    pool: Tensor

    def __init__(
        self,
        host: Host,
        *,
        features: int = 64,
        temperature: float = 1.0,
        pool: int = 500,
        compat: Literal["released"] | None = None,
    ) -> None:
        super().__init__(host)
        check_counts(features=features, pool=pool)
        if pool < host.num_heads:
            raise InvalidInputError(
                f"pool must hold a matrix for each of the {host.num_heads} heads, got {pool}."
            )
        check_number("temperature", temperature, lambda number: number > 0, "positive")
        check_choice("compat", compat, (None, "released"))
        self.temperature, self.compat = temperature, compat
        self.sigma = nn.Parameter(torch.ones(host.num_heads, 1, host.head_dim))
        self.register_buffer("pool", torch.randn(pool, features, host.head_dim))

    def features(self, query: Tensor, key: Tensor, key_mask: Mask) -> tuple[Tensor, Tensor]:
        heads, drawn = query.shape[1], self.pool[: query.shape[1]]
        if self.training:
            drawn = self.pool[torch.randint(len(self.pool), (heads,), device=self.pool.device)]
        weights = drawn.to(query.dtype) * self.sigma.to(query.dtype) / self.temperature
        scale = 0.1 if self.compat == "released" else weights.shape[-2] ** -0.5
        return _waves(query, weights, scale), _waves(key, weights, scale)

    def normalise(self, total: Tensor, mass: Tensor) -> Tensor:
        least = 1.0 if self.compat else max(math.exp(-2 / self.temperature**2), LEAST_FLOOR)
        return total / mass.abs().clamp_min(least)


def _waves(x: Tensor, weights: Tensor, scale: float) -> Tensor:
    unit = x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-3)
    angle = unit @ weights.mT
    return scale * torch.cat((angle.sin(), angle.cos()), dim=-1)
