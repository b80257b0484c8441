"""Quadratic attention: squares as features, or the exact square of the score."""

import torch
from torch import Tensor

from lln_lab.peers.linear import LEAST_FLOOR, WHY_LEAST_FLOOR, LinearCore
from lln_lab.peers.peer import Card, Host


class Quadratic(LinearCore):
    """Linear attention with φ(x) = x² elementwise, no 1/√d.

    The kernel is positively homogeneous: P(a q, b k) = P(q, k) for all a, b > 0.

    Args:
        exact: Whether the kernel is (q·k)², through its feature map of d(d + 1)/2 products
            x_a x_b, those with a < b weighted by √2.
    """

    card = Card(
        name="quadratic",
        title="Quadratic attention",
        citation="Figure 2 of Nahshan et al. 2023, arXiv 2311.13541",
        equation="P_ij ∝ φ(q_i)·φ(k_j), φ(x) = x²; exact=True: P_ij ∝ (q_i·k_j)²",
        complexity="O(N d²); O(N d³) with exact=True",
        equivariant=True,
        oracle="dense form; invariance to scale",
        departures=WHY_LEAST_FLOOR,
    )

    floor = LEAST_FLOOR

    def __init__(self, host: Host, *, exact: bool = False) -> None:
        super().__init__(host)
        self.exact = exact

    def feature_map(self, x: Tensor) -> Tensor:
        return outer_features(x) if self.exact else x.square()


def outer_features(x: Tensor) -> Tensor:
    """``[..., D]`` → ``[..., D(D + 1)/2]`` with φ(q)·φ(k) = (q·k)²."""
    first, second = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    weights = (1 + (first != second).to(x.dtype)).sqrt()
    return x[..., first] * x[..., second] * weights
