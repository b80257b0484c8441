"""The Linear Transformer: φ(x) = elu(x) + 1."""

from torch import Tensor
from torch.nn import functional as F

from lln_lab.peers.linear import LinearCore
from lln_lab.peers.peer import Card


class Elu(LinearCore):
    """Linear attention with φ(x) = elu(x) + 1, no 1/√d."""

    card = Card(
        name="elu",
        title="Linear Transformer",
        citation="Katharopoulos et al. 2020, arXiv 2006.16236",
        equation="P_ij ∝ φ(q_i)·φ(k_j), φ(x) = elu(x) + 1",
        complexity="O(N d²)",
        equivariant=True,
    )

    def feature_map(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1
