"""The norm and the feed-forward network that TransNormer and TNN share.

Dimension legend: B batch, N tokens, W width of the tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln.precision import accumulation_dtype

EPSILON = 1e-8


def srms(x: Tensor) -> Tensor:
    """Root mean square norm without weights: x / (‖x‖/√W + 1e-8) over the last axis."""
    wide = x.to(accumulation_dtype(x.dtype))
    root = torch.linalg.vector_norm(wide, dim=-1, keepdim=True) * x.shape[-1] ** -0.5
    return (wide / (root + EPSILON)).to(x.dtype)


class GatedLinearUnit(nn.Module):
    """W₃(act(W₁x) ⊙ W₂x), ``[B, N, W]`` → the same."""

    def __init__(
        self, width: int, hidden: int, activation: Callable[[Tensor], Tensor] = F.silu
    ) -> None:
        """Args: width is W, hidden the width of the product, activation acts on the gate."""
        super().__init__()
        self.activation = activation
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """The product of gate and value, ``[B, N, W]`` → the same."""
        return self.down(self.activation(self.gate(x)) * self.up(x))
