"""cosFormer: ReLU features weighted by the cosine of the distance."""

import math

import torch
from torch import Tensor

from lln_lab.peers.linear import LEAST_FLOOR, WHY_LEAST_FLOOR, LinearCore
from lln_lab.peers.peer import Card


class CosFormer(LinearCore):
    """Linear attention with weights max(0, q_i)·max(0, k_j) · cos(π/2 · (i − j)/L), no 1/√d.

    cos(a − b) = cos a cos b + sin a sin b splits the weight, so that the features of token i are
    [φ(x) sin(πi/2L) ; φ(x) cos(πi/2L)] with φ(x) = max(0, x). L is the host's ``max_len``, never
    the length of the batch: padding then changes nothing. A row whose features meet no key's is
    zero. P(a q, b k) = P(q, k) for all a, b > 0.
    """

    card = Card(
        name="cosformer",
        title="cosFormer",
        citation="Qin et al. 2022, arXiv 2202.08791",
        equation="P_ij ∝ max(0, q_i)·max(0, k_j) cos(π(i − j)/2L)",
        complexity="O(N d²)",
        needs_max_len=True,
        departures="L is max_len, where the authors' code takes the length of the batch, which "
        f"makes a sample depend on its padding; {WHY_LEAST_FLOOR}",
    )

    floor = LEAST_FLOOR

    def feature_map(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)
        angle = (position * (math.pi / 2 / self.host.max_len)).unsqueeze(-1)
        x = x.relu()
        return torch.cat((x * angle.sin(), x * angle.cos()), dim=-1)
