"""NaLaFormer: the query's length sets the sharpness of its row."""

import torch
from torch import Tensor

from lln_lab.peers.linear import LEAST_FLOOR, LinearCore
from lln_lab.peers.peer import Card, Mask


class NaLaFormer(LinearCore):
    """Linear attention whose query features are a direction to a power that grows with its length.

    φ(q) = [max(0, q/n)^p ; max(0, −q/n)^p] with n = ‖q‖ and p = 3 (½ + tanh n), and
    φ(k) = [max(0, k)³ ; max(0, −k)³]. The length of the keys cancels: P(q, b k) = P(q, k), b > 0.
    """

    card = Card(
        name="nalaformer",
        title="NaLaFormer",
        citation="Meng et al. 2025, arXiv 2506.21137",
        equation="P_ij ∝ φ(q_i)·φ(k_j), φ(q) = [(q/n)₊^p ; (−q/n)₊^p], p = 3(½ + tanh n), n = ‖q‖, "
        "φ(k) = [k₊³ ; (−k)₊³]",
        complexity="O(N d²)",
        equivariant=True,
        departures="the kernel alone, without the authors' rotary positions, convolution, "
        "LayerNorm and gate; the denominator is clamped at 1e-24, where theirs has 1e-6 added, "
        "which shrinks the rows of small keys",
    )

    floor = LEAST_FLOOR

    def features(self, query: Tensor, key: Tensor, key_mask: Mask) -> tuple[Tensor, Tensor]:
        length = torch.linalg.vector_norm(query, dim=-1, keepdim=True)
        direction = query / length.clamp_min(1e-12)
        power = 3 * (0.5 + length.tanh())
        # One side of every pair is zero; a power of at least 1.5 has no gradient there.
        features_q = torch.cat((direction, -direction), dim=-1).relu() ** power
        return features_q, torch.cat((key, -key), dim=-1).relu() ** 3
