"""Nyströmformer: softmax attention through landmarks (Xiong et al., 2021, arXiv 2102.03902).

Departures from the authors' code, each of which makes it right where theirs is not: the start of
the pseudo-inverse is scaled per sample and head, so that a sample does not depend on its
batch-mates; a length that is no multiple of the landmarks gets a shorter last segment instead of
padding; the iteration runs in float32, where half precision overflows.

Dimension legend: B batch, H heads, N tokens, D head width, E value width, m landmarks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def segment_means(tensor: Tensor, landmarks: int) -> Tensor:
    """Means ``[B, H, m, D]`` of at most ``landmarks`` consecutive segments of the tokens.

    Args:
        tensor: ``[B, H, N, D]``.
        landmarks: Segments asked for; all are ⌈N / landmarks⌉ long but the last.
    """
    tokens = tensor.shape[-2]
    length = -(-tokens // landmarks)
    whole = tokens // length * length
    means = tensor[..., :whole, :].unflatten(-2, (-1, length)).mean(-2)
    if whole == tokens:
        return means
    return torch.cat((means, tensor[..., whole:, :].mean(-2, keepdim=True)), dim=-2)


def pseudo_inverse(matrix: Tensor, iterations: int = 6) -> Tensor:
    """A⁺ of row-stochastic matrices ``[..., m, m]`` by the cubic iteration of section 3.2.

        Z ← Z/4 · (13 I − AZ (15 I − AZ (7 I − AZ))),  Z₀ = Aᵀ / (‖A‖₁ ‖A‖_∞)

    Args:
        matrix: A, in float32 or float64.
        iterations: How many.
    """
    columns = matrix.abs().sum(-2).amax(-1)[..., None, None]
    rows = matrix.abs().sum(-1).amax(-1)[..., None, None]
    inverse = matrix.mT / (columns * rows)
    unit = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        product = matrix @ inverse
        inner = 15 * unit - product @ (7 * unit - product)
        inverse = inverse @ (13 * unit - product @ inner) / 4
    return inverse


def nystrom_attention(
    query: Tensor, key: Tensor, value: Tensor, *, landmarks: int = 64, iterations: int = 6
) -> Tensor:
    """Nyström approximation of softmax attention: softmax(QK̃ᵀ) A⁺ softmax(Q̃Kᵀ) V.

    Args:
        query: ``[B, H, N, D]``.
        key: Like query.
        value: ``[B, H, N, E]``.
        landmarks: Segments whose means stand for all queries and keys.
        iterations: Of `pseudo_inverse`.

    Returns:
        ``[B, H, N, E]`` in the dtype of value.
    """
    scale = query.shape[-1] ** -0.25
    query, key = query * scale, key * scale
    few_queries, few_keys = segment_means(query, landmarks), segment_means(key, landmarks)
    to_landmarks = (query @ few_keys.mT).softmax(-1).to(value.dtype)
    from_landmarks = (few_queries @ key.mT).softmax(-1).to(value.dtype)
    with torch.autocast(query.device.type, enabled=False):
        wide = torch.promote_types(query.dtype, torch.float32)
        between = (few_queries.to(wide) @ few_keys.to(wide).mT).softmax(-1)
        inverse = pseudo_inverse(between, iterations)
        summary = (inverse @ (from_landmarks @ value).to(wide)).to(value.dtype)
        return to_landmarks @ summary


class NystromAttention(nn.Module):
    """`nystrom_attention` and a depthwise convolution of the values over the tokens."""

    def __init__(
        self, heads: int, *, landmarks: int = 64, iterations: int = 6, kernel: int = 33
    ) -> None:
        """Args as in the paper.

        Args:
            heads: H.
            landmarks: m.
            iterations: Of the pseudo-inverse.
            kernel: Tokens under the convolution, an odd number.
        """
        super().__init__()
        self.landmarks, self.iterations = landmarks, iterations
        self.convolution = nn.Conv2d(
            heads, heads, (kernel, 1), padding=(kernel // 2, 0), groups=heads, bias=False
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``[B, H, N, D]`` each → ``[B, H, N, E]``."""
        attended = nystrom_attention(
            query, key, value, landmarks=self.landmarks, iterations=self.iterations
        )
        return attended + self.convolution(value)
