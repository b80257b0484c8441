"""Linear attention with any feature map: O_i = φ(q_i)ᵀ Σ φ(k_j) v_jᵀ / φ(q_i)·Σ φ(k_j).

Dimension legend: B batch, H heads, N tokens, D head width, M features, C tokens of a chunk.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from lln.precision import accumulation_dtype
from lln_lab.peers.peer import Mask, WideCore, zero_padding
from lln_lab.peers.token_blocks import cut

# Tokens whose N×N part is formed at once in the causal form.
CHUNK = 64

# What released code clamps denominators at.
PUBLISHED_FLOOR = 1e-6

# Keeps the gradients of zero rows finite and touches no other row. For kernels with
# κ(a q, b k) = aʳ bˢ κ(q, k): their rows do not depend on a and b, but would shrink where small q
# and k reach the floor.
LEAST_FLOOR = 1e-24
WHY_LEAST_FLOOR = (
    "the denominator is clamped at 1e-24, because 1e-6 would shrink the rows of small q and k"
)


class LinearCore(WideCore):
    """A core that is a feature map: a subclass writes `feature_map`, or `features` as a whole."""

    # Denominators below this are raised to it, so that a row of zeros stays zeros.
    floor: float = PUBLISHED_FLOOR

    def feature_map(self, x: Tensor) -> Tensor:
        """φ where it is the same for queries and keys: ``[B, H, N, D]`` → ``[B, H, N, M]``."""
        raise NotImplementedError

    def features(self, query: Tensor, key: Tensor, key_mask: Mask) -> tuple[Tensor, Tensor]:
        """φ(q), φ(k), each ``[B, H, N, M]``.

        Args:
            query: ``[B, H, N, D]`` in the accumulation dtype.
            key: Like query.
            key_mask: bool ``[B, N]``, for maps that look at all keys; features of masked keys are
                zeroed by the caller.
        """
        return self.feature_map(query), self.feature_map(key)

    def normalise(self, total: Tensor, mass: Tensor) -> Tensor:
        """Row totals over row masses.

        Args:
            total: ``[B, H, N, D]``, or rows of the unnormalised matrix.
            mass: ``[B, H, N, 1]``.
        """
        return total / mass.clamp_min(self.floor)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask) -> Tensor:
        """Two products; causal: by chunks."""
        features_q, features_k = self._masked(query, key, key_mask)
        # The column of ones makes the same products deliver the denominator.
        values = F.pad(value, (0, 1), value=1.0)
        sums = causal_sums if self.host.is_causal else full_sums
        out = sums(features_q, features_k, values)
        return self.normalise(out[..., :-1], out[..., -1:])

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        """P_ij = φ(q_i)·φ(k_j) / Σ_l φ(q_i)·φ(k_l)."""
        wide = accumulation_dtype(query.dtype)
        features_q, features_k = self._masked(query.to(wide), key.to(wide), key_mask)
        weights = features_q @ features_k.mT
        if self.host.is_causal:
            weights = weights.tril()
        return self.normalise(weights, weights.sum(-1, keepdim=True))

    def _masked(self, query: Tensor, key: Tensor, key_mask: Mask) -> tuple[Tensor, Tensor]:
        features_q, features_k = self.features(query, key, key_mask)
        # After the map, because φ(0) ≠ 0.
        return features_q, zero_padding(features_k, key_mask)


def full_sums(features_q: Tensor, features_k: Tensor, values: Tensor) -> Tensor:
    """φ(Q) (φ(K)ᵀ V): ``[B, H, N, M]`` twice and ``[B, H, N, E]`` → ``[B, H, N, E]``."""
    return features_q @ (features_k.mT @ values)


def causal_sums(features_q: Tensor, features_k: Tensor, values: Tensor) -> Tensor:
    """tril(φ(Q) φ(K)ᵀ) V by chunks: earlier chunks through their sum, the own one directly."""
    chunks_q, chunks_k, chunks_v = (cut(side, CHUNK) for side in (features_q, features_k, values))
    before = earlier_sums(chunks_k.mT @ chunks_v, -3)
    own = (chunks_q @ chunks_k.mT).tril() @ chunks_v
    return (chunks_q @ before + own).flatten(-3, -2)[..., : values.shape[-2], :]


def earlier_sums(states: Tensor, dim: int) -> Tensor:
    """Sums along an axis without the own entry.

    Not ``cumsum − states``: what a large entry rounds away from its sum would be missing from the
    rows before it, which must not notice it.
    """
    sums = states.cumsum(dim)
    none = torch.zeros_like(sums.narrow(dim, 0, 1))
    return torch.cat((none, sums.narrow(dim, 0, sums.shape[dim] - 1)), dim)
