"""The Linear Transformer: φ(x) = elu(x) + 1."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lln.peers.card import Card
from lln.peers.linear import LinearCore


class Elu(LinearCore):
    """Linear attention with φ(x) = elu(x) + 1, no 1/√d."""

    card = Card(
        name="elu",
        title="Linear Transformer",
        kind="core",
        citation="Katharopoulos et al. 2020, arXiv 2006.16236",
        equation="P_ij ∝ φ(q_i)·φ(k_j), φ(x) = elu(x) + 1",
        complexity="O(N d²)",
        is_linear=True,
        causal=True,
        padding="longer",
        row_stochastic=True,
        equivariant=True,
        oracle="dense form",
    )

    def features(
        self, query: Tensor, key: Tensor, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `LinearCore.features`."""
        return F.elu(query) + 1, F.elu(key) + 1
