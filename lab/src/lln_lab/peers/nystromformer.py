"""Nyströmformer: softmax attention through landmarks (Xiong et al., 2021, arXiv 2102.03902).

Dimension legend: B batch, H heads, N tokens, D head width, E value width, m landmarks.
"""

from typing import Literal

import torch
from torch import Tensor

from lln.checks.names import check_choice
from lln.precision import accumulation_dtype, without_autocast
from lln_lab.peers.masked import attend, masked_softmax
from lln_lab.peers.option_checks import check_counts, check_kernel
from lln_lab.peers.peer import Card, Core, Host, Mask, real_tokens, visible, zero_padding
from lln_lab.peers.projected import TokenConvolution


class Nystromformer(Core):
    """O = softmax(QK̃ᵀ/√d) Z softmax(Q̃Kᵀ/√d) V + DWConv(V), Z ≈ softmax(Q̃K̃ᵀ/√d)⁺, Eq. (13).

    Q̃ and K̃ are means over consecutive segments of the real tokens. A sequence whose length is no
    multiple of the landmarks has a shorter last segment and possibly fewer landmarks.

    Args:
        landmarks: m.
        iterations: Of `pseudo_inverse`.
        kernel: Tokens under the depthwise convolution of the values, an odd number; 0 = none.
        compat: ``"original"``: as released, the start of the pseudo-inverse is scaled by the
            largest column sum of the whole batch, so that samples depend on each other.
            ``"released"``: also, landmarks are means over padded tokens too (as zeros), so that
            real tokens see the padding, and with one landmark per token the attention is exact
            softmax. The LRA tables were made this way.
    """

    card = Card(
        name="nystromformer",
        title="Nyströmformer",
        citation="Xiong et al. 2021, arXiv 2102.03902",
        equation="O = softmax(QK̃ᵀ/√d) softmax(Q̃K̃ᵀ/√d)⁺ softmax(Q̃Kᵀ/√d) V + DWConv(V)",
        complexity="O(N m d + m³)",
        causal=False,
        row_stochastic=False,
        repeats_on_gpu=False,
        adds="one filter of 33 tokens per head",
        oracle="transformers NystromformerSelfAttention; nystrom_attention; dense form",
        departures="The pseudo-inverse starts per sample and head (compat='original' couples the "
        "batch). Landmarks are means over real tokens and empty segments are dropped; the authors "
        "average zeroed padding in. One landmark per token is still an approximation; theirs turns "
        "into exact softmax (compat='released' undoes all three).",
    )

    def __init__(
        self,
        host: Host,
        *,
        landmarks: int = 64,
        iterations: int = 6,
        kernel: int = 33,
        compat: Literal["original", "released"] | None = None,
    ) -> None:
        super().__init__(host)
        check_counts(landmarks=landmarks, iterations=iterations)
        check_kernel("kernel", kernel)
        check_choice("compat", compat, (None, "original", "released"))
        self.landmarks, self.iterations = landmarks, iterations
        self.couples_batch, self.is_released = compat is not None, compat == "released"
        self.convolution = TokenConvolution(host.num_heads, kernel) if kernel else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask = None) -> Tensor:
        sizes = {"landmarks": self.landmarks, "iterations": self.iterations}
        compat = {"couples_batch": self.couples_batch, "is_released": self.is_released}
        out = nystrom_attention(query, key, value, key_mask=key_mask, **sizes, **compat)
        return out if self.convolution is None else out + self.convolution(value, key_mask)

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        """The three factors multiplied, plus the convolution as a band."""
        wide = accumulation_dtype(query.dtype)
        query, key = query.to(wide), key.to(wide)
        key_mask = averaged = real_tokens(query, key_mask)
        if self.is_released:
            query, key = zero_padding(query, key_mask), zero_padding(key, key_mask)
            averaged = torch.ones_like(key_mask)
        average, filled = segment_average(averaged, self.landmarks, wide)
        few_queries, few_keys = average[:, None] @ query, average[:, None] @ key
        scale = query.shape[-1] ** -0.5
        columns, rows = filled[:, None, None, :], filled[:, None, :, None]
        first = masked_softmax(scale * query @ few_keys.mT, columns)
        middle = masked_softmax(scale * few_queries @ few_keys.mT, columns) * rows
        last = masked_softmax(scale * few_queries @ key.mT, key_mask[:, None, None, :])
        inverse = pseudo_inverse(middle, self.iterations, couples_batch=self.couples_batch)
        is_exact = self.is_released and self.landmarks == query.shape[-2]
        out = last if is_exact else first @ inverse @ last
        if self.convolution is None:
            return out
        weights = self.convolution.filter.weight[:, 0, :, 0].to(wide)
        tokens, kernel = query.shape[-2], weights.shape[-1]
        places = torch.arange(tokens, device=query.device)
        tap = places - places[:, None] + kernel // 2
        within = (tap >= 0) & (tap < kernel)
        band = torch.where(within, weights[:, tap.clamp(0, kernel - 1)], 0.0)
        return out + band * key_mask[:, None, None, :]


def nystrom_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    landmarks: int = 64,
    iterations: int = 6,
    key_mask: Mask = None,
    couples_batch: bool = False,
    is_released: bool = False,
) -> Tensor:
    """Nyström approximation of softmax attention: softmax(QK̃ᵀ) A⁺ softmax(Q̃Kᵀ) V.

    Args:
        query: ``[B, H, N, D]``.
        key: Like query.
        value: ``[B, H, N, E]``.
        landmarks: Segments; their means stand for all queries and keys.
        iterations: Of `pseudo_inverse`.
        key_mask: bool ``[B, N]``, True = a real token.
        couples_batch: As in `pseudo_inverse`.
        is_released: As ``compat="released"`` of `Nystromformer`.

    Returns:
        ``[B, H, N, E]`` in the dtype of value.
    """
    from_keys = visible(key, key_mask)
    if is_released and landmarks == query.shape[-2]:
        return attend(query, key, value, from_keys)
    with without_autocast(query):
        wide = accumulation_dtype(query.dtype)
        scale = query.shape[-1] ** -0.25
        query, key = query * scale, key * scale
        filled = columns = None
        if is_released:
            query, key = zero_padding(query, key_mask), zero_padding(key, key_mask)
        if key_mask is None or is_released:
            few_queries, few_keys = (segment_means(side, landmarks) for side in (query, key))
        else:
            average, filled = segment_average(key_mask, landmarks, wide)
            few_queries, few_keys = (average[:, None] @ side.to(wide) for side in (query, key))
            columns = filled[:, None, None, :]
        to_landmarks = masked_softmax(query @ few_keys.mT.to(query.dtype), columns)
        from_landmarks = masked_softmax(few_queries.to(key.dtype) @ key.mT, from_keys)
        between = masked_softmax(few_queries.to(wide) @ few_keys.to(wide).mT, columns)
        if filled is not None:
            between = between * filled[:, None, :, None]
        inverse = pseudo_inverse(between, iterations, couples_batch=couples_batch)
        summary = inverse @ (from_landmarks.to(value.dtype) @ value).to(wide)
        return to_landmarks.to(value.dtype) @ summary.to(value.dtype)


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


def segment_average(key_mask: Tensor, landmarks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The matrix that takes tokens to segment means, for samples of different lengths.

    Segments are counted in real tokens, so that padding moves no border.

    Args:
        key_mask: bool ``[B, N]``.
        landmarks: Segments asked for; all are ⌈real tokens / landmarks⌉ long but the last.
        dtype: Of the matrix.

    Returns:
        ``[B, m, N]``, rows that sum to 1 or are zero where a segment is empty, and bool ``[B, m]``,
        True = not empty.
    """
    real = key_mask.sum(-1, keepdim=True)
    length = ((real + landmarks - 1) // landmarks).clamp_min(1)
    segment = torch.where(key_mask, (key_mask.cumsum(-1) - 1) // length, -1)
    names = torch.arange(min(landmarks, key_mask.shape[-1]), device=key_mask.device)
    member = segment[:, None, :] == names[:, None]
    count = member.sum(-1, keepdim=True)
    return member.to(dtype) / count.clamp_min(1), count[..., 0] > 0


def pseudo_inverse(matrix: Tensor, iterations: int = 6, *, couples_batch: bool = False) -> Tensor:
    """A⁺ of non-negative matrices ``[..., m, m]`` by the cubic iteration of section 3.2.

        Z ← Z/4 · (13 I − AZ (15 I − AZ (7 I − AZ))),  Z₀ = Aᵀ / (‖A‖₁ ‖A‖_∞)

    Rows and columns of zeros stay so: the rest is inverted as if they were not there.

    Args:
        matrix: A, in float32 or float64; half precision overflows.
        iterations: How many.
        couples_batch: Whether the norms are the largest of all matrices, and not each one's own.
    """
    columns = matrix.abs().sum(-2).amax(-1)[..., None, None]
    rows = matrix.abs().sum(-1).amax(-1)[..., None, None]
    if couples_batch:
        columns, rows = columns.amax(), rows.amax()
    norms = columns * rows
    return cubic_inverse(matrix, matrix.mT / torch.where(norms > 0, norms, 1.0), iterations)


def cubic_inverse(matrix: Tensor, start: Tensor, iterations: int) -> Tensor:
    """The iteration of `pseudo_inverse` from a given Z₀."""
    unit = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    inverse = start
    for _ in range(iterations):
        product = matrix @ inverse
        inner = 15 * unit - product @ (7 * unit - product)
        inverse = inverse @ (13 * unit - product @ inner) / 4
    return inverse
