"""Skyformer: a Gaussian kernel instead of the softmax, through random landmarks.

Dimension legend: B batch, H heads, N tokens, D head width, m landmarks.
"""

from typing import Literal

import torch
from torch import Tensor

from lln.checks import check_count
from lln.checks.names import check_choice
from lln.errors import InvalidInputError
from lln.precision import accumulation_dtype
from lln_lab.peers.nystromformer import cubic_inverse
from lln_lab.peers.option_checks import check_number
from lln_lab.peers.peer import Card, Host, Mask, WideCore, zero_padding
from lln_lab.peers.token_blocks import pick

# A uniform number is kept as a whole number of 2⁻³¹: a cast of the module cannot round it.
BITS = 31


class Skyformer(WideCore):
    """O ≈ GV, G_ij = exp(−‖q_i − k_j‖²/(2√d)), rows not normalised.

    Nyström on the stacked rows [Q; K]: with κ the kernel above and L the landmarks, half of them
    rows of Q and half rows of K,

        O = κ(Q, L) D Z D κ(L, K) V,  Z ≈ (D (κ(L, L) + ridge I) D)⁻¹,

    D = diag(row sums of κ(L, L) + ridge I)^(−½).

    Args:
        landmarks: m, an even number.
        iterations: Of the inverse.
        ridge: Added to the diagonal of κ(L, L).
        compat: ``"original"``: as released, landmarks are drawn anew in evaluation too and the
            inverse starts from a scale of the whole batch, so that samples depend on each other.
    """

    card = Card(
        name="skyformer",
        title="Skyformer",
        citation="Chen et al. 2021, arXiv 2111.00035",
        equation="O = κ(Q,L) [κ(L,L) + 0.1 I]⁻¹ κ(L,K) V, κ(a,b) = exp(−‖a−b‖²/(2√d))",
        complexity="O(N m d + m³)",
        causal=False,
        row_stochastic=False,
        repeats_on_gpu=False,
        random="which tokens are landmarks: at construction and at every training step",
        oracle="dense form; all rows as landmarks give exact GV",
        departures="Evaluation keeps the last landmarks and the inverse starts per sample and head "
        "(compat='original' undoes both). Scale d^(−1/4) at every head width, where the released "
        "code has that of d = 32.",
    )

    def __init__(
        self,
        host: Host,
        *,
        landmarks: int = 128,
        iterations: int = 6,
        ridge: float = 0.1,
        compat: Literal["original"] | None = None,
    ) -> None:
        super().__init__(host)
        check_count("landmarks", landmarks, least=2)
        check_count("iterations", iterations)
        if landmarks % 2:
            raise InvalidInputError(
                f"landmarks must be even, half from queries and half from keys, got {landmarks}."
            )
        check_number("ridge", ridge, lambda number: number >= 0, "at least 0")
        check_choice("compat", compat, (None, "original"))
        self.iterations, self.ridge, self.is_original = iterations, ridge, compat == "original"
        self.uniforms: Tensor
        # Row 0 chooses queries, row 1 keys; one draw for all samples and heads.
        self.register_buffer("uniforms", torch.randint(2**BITS, (2, landmarks // 2)))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask) -> Tensor:
        if self.training or self.is_original:
            self.uniforms.random_(2**BITS)
        scale = query.shape[-1] ** -0.25
        query, key = query * scale, key * scale
        landmarks = self.landmark_rows(query, key, key_mask)
        summary = gaussian(landmarks, key) @ zero_padding(value, key_mask)
        weights, inverse = self._inverse(gaussian(landmarks, landmarks))
        summary = weights * (inverse @ (weights * summary))
        return gaussian(query, landmarks) @ summary

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        """κ(Q, L) D Z D κ(L, K) with distances taken one by one."""
        wide = accumulation_dtype(query.dtype)
        scale = query.shape[-1] ** -0.25
        query, key = query.to(wide) * scale, key.to(wide) * scale
        landmarks = self.landmark_rows(query, key, key_mask)

        def kernel(left: Tensor, right: Tensor) -> Tensor:
            apart = left.unsqueeze(-2) - right.unsqueeze(-3)
            return (-0.5 * apart.square().sum(-1)).exp()

        weights, inverse = self._inverse(kernel(landmarks, landmarks))
        out = kernel(query, landmarks) @ (weights * inverse * weights.mT) @ kernel(landmarks, key)
        return out if key_mask is None else out * key_mask[:, None, None, :]

    def landmark_rows(self, query: Tensor, key: Tensor, key_mask: Mask) -> Tensor:
        """``[B, H, m, D]``: the rows ⌊U · real tokens⌋ among the real ones."""
        batch, tokens = query.shape[0], query.shape[-2]
        if key_mask is None:
            places = (self.uniforms.flatten() * tokens >> BITS).expand(batch, -1)
        else:
            seen = key_mask.cumsum(-1)
            ranks = self.uniforms.flatten() * seen[:, -1:] >> BITS
            # The place of the r-th real token is the first where r + 1 have been seen.
            places = torch.searchsorted(seen, ranks + 1).clamp_max(tokens - 1)
        # Not an index, whose gradient would be added up in any order, on a CPU too.
        of_query, of_key = places.unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((pick(query, of_query), pick(key, of_key)), dim=-2)

    def _inverse(self, between: Tensor) -> tuple[Tensor, Tensor]:
        """The diagonal of D ``[B, H, m, 1]`` and Z ``[B, H, m, m]``."""
        unit = torch.eye(between.shape[-1], dtype=between.dtype, device=between.device)
        between = between + self.ridge * unit
        weights = between.sum(-1, keepdim=True).rsqrt()
        balanced = weights * between * weights.mT
        # The largest eigenvalue of the balanced matrix is 1, so one norm is enough to converge.
        norms = balanced.sum(-2).amax(-1)[..., None, None]
        if self.is_original:
            norms = norms.amax()
        return weights, cubic_inverse(balanced, balanced.mT / norms, self.iterations)


def gaussian(left: Tensor, right: Tensor) -> Tensor:
    """exp(a·b − ‖a‖²/2 − ‖b‖²/2) of all rows of left and right."""
    left_norms, right_norms = (side.square().sum(-1, keepdim=True) for side in (left, right))
    exponent = left @ right.mT - 0.5 * (left_norms + right_norms.mT)
    # Rounding must not make a kernel of distance zero larger than 1.
    return exponent.clamp_max(0.0).exp()
