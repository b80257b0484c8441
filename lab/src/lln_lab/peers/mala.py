"""MALA, magnitude-aware linear attention: rows sum to one by scale and offset, not by division."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.precision import accumulation_dtype
from lln_lab.peers.linear import causal_sums, full_sums
from lln_lab.peers.peer import Card, Mask, WideCore, visible, zero_padding

# Row sums below this are raised to it.
_LEAST = 1e-6


class Mala(WideCore):
    """A_ij = (1 + 1/z_i) S_ij − z_i/n, S_ij = φ(q_i)·φ(k_j)/(n√d), z_i = Σ_j S_ij, φ = elu + 1.

    n is the number of real keys a row sees. Rows sum to 1; entries may be negative.
    """

    card = Card(
        name="mala",
        title="MALA",
        citation="Fan et al. 2025, arXiv 2507.00698",
        equation="A_ij = (1 + 1/z_i) S_ij − z_i/n, S_ij = φ(q_i)·φ(k_j)/(n√d), z_i = Σ_j S_ij",
        complexity="O(N d²)",
        row_stochastic=False,
        equivariant=True,
        departures="the kernel alone, without the authors' rotary positions, convolution and "
        "gate; n counts real keys; the causal form takes n as the keys a row sees",
    )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask) -> Tensor:
        features_q = F.elu(query) + 1
        features_k = zero_padding(F.elu(key) + 1, key_mask)
        values = zero_padding(F.pad(value, (0, 1), value=1.0), key_mask)
        if self.host.is_causal:
            products, plain = causal_sums(features_q, features_k, values), values.cumsum(-2)
        else:
            products = full_sums(features_q, features_k, values)
            plain = values.sum(-2, keepdim=True)
        seen = plain[..., -1:].clamp_min(1.0)
        products = products / (seen * math.sqrt(query.shape[-1]))
        z = products[..., -1:].clamp_min(_LEAST)
        return (1 + 1 / z) * products[..., :-1] - z * plain[..., :-1] / seen

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        wide = accumulation_dtype(query.dtype)
        kernel = (F.elu(query.to(wide)) + 1) @ (F.elu(key.to(wide)) + 1).mT
        seen = visible(query, key_mask, self.host.is_causal)
        seen = torch.ones_like(kernel, dtype=torch.bool) if seen is None else seen
        count = seen.sum(-1, keepdim=True).clamp_min(1)
        scores = torch.where(seen, kernel / (count * math.sqrt(query.shape[-1])), 0.0)
        z = scores.sum(-1, keepdim=True).clamp_min(_LEAST)
        return torch.where(seen, (1 + 1 / z) * scores - z / count, 0.0)
