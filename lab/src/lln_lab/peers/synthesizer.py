"""Synthesizer: attention weights that no pair of tokens decides.

Dimension legend: B batch, H heads, N tokens, L max_len, D head width, r rank.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln.checks import check_count
from lln.checks.names import check_choice
from lln.errors import InvalidInputError
from lln.precision import accumulation_dtype, without_autocast
from lln_lab.peers.masked import attend, masked_softmax
from lln_lab.peers.peer import Card, Host, Mask, Peer, visible
from lln_lab.peers.projections import join_heads, split_heads, square_maps

VARIANTS = ("dense", "random", "factorised_dense", "factorised_random")


class Synthesizer(Peer):
    """O = softmax(B) V with B from each token alone, or from no token at all.

        dense:              B_i = W₂ relu(W₁ x_i + b₁) + b₂                       in Rᴸ
        random:             B = R                                                 in Rᴸˣᴸ, learned
        factorised_dense:   B_ij = a_i[j // s] · c_i[j mod s], a_i and c_i as dense B_i, s = ⌈√L⌉
        factorised_random:  B = R₁ R₂ᵀ,  R₁, R₂                                   in Rᴸˣʳ

    each for every head. A shorter sequence uses the first N rows and columns; the softmax is over
    real columns.

    Args:
        variant: One of the four.
        rank: r of ``"factorised_random"``.
        learned: Whether the matrices of the random variants are trained (the paper's Random) or
            stay as drawn (its Fixed Random).
    """

    table: Tensor
    left: Tensor
    right: Tensor

    card = Card(
        name="synthesizer",
        title="Synthesizer",
        kind="mixer",
        citation="Tay et al. 2020, arXiv 2005.00743",
        equation="O = softmax(B) V, B_i = W₂ relu(W₁ x_i) (dense), R (random), R₁R₂ᵀ (factorised)",
        complexity="O(N² d)",
        is_linear=False,
        repeats_on_gpu=False,
        needs_max_len=True,
        random="with learned=False the matrices of the random variants, once, at construction",
        adds="value and output projections; per head d·L + d·D (dense), L² (random), "
        "2·L·r (factorised random), 2·d·√L + 2·d·D (factorised dense)",
        departures="W₁ maps the whole token to H slices, W₂ each head's slice to its row.",
    )

    def __init__(
        self, host: Host, *, variant: str = "dense", rank: int = 8, learned: bool = True
    ) -> None:
        super().__init__(host)
        check_choice("variant", variant, VARIANTS)
        check_count("rank", rank)
        if not learned and not variant.endswith("random"):
            raise InvalidInputError(
                f"learned=False fixes the matrices of the random variants; {variant} has none."
            )
        self.variant = variant
        self.value, self.out = square_maps(host.embed_dim, 2)
        # Columns of the fine factor; the coarse one has max_len divided by it.
        self.columns = math.isqrt(host.max_len - 1) + 1
        for name, shape, deviation in self._tables(rank):
            table = torch.randn(shape) * deviation
            if learned:
                self.register_parameter(name, nn.Parameter(table))
            else:
                self.register_buffer(name, table)
        if variant == "dense":
            self.synthesis = _Synthesis(host, host.max_len)
        elif variant == "factorised_dense":
            self.coarse = _Synthesis(host, -(-host.max_len // self.columns))
            self.fine = _Synthesis(host, self.columns)

    def mix(self, x: Tensor, key_mask: Mask) -> Tensor:
        value = split_heads(self.value(x), self.host.num_heads)
        if self.variant in ("dense", "factorised_random"):
            out = self._fused(x, value, key_mask)
        else:
            weights = self.matrix(x, key_mask)
            with without_autocast(x):
                out = (weights @ value.to(weights.dtype)).to(value.dtype)
        return self.out(join_heads(out))

    def _fused(self, x: Tensor, value: Tensor, key_mask: Mask) -> Tensor:
        """O ``[B, H, N, D]`` where B is a product: softmax attention without 1/√d, no N×N kept."""
        length, width = x.shape[1], value.shape[-1]
        if self.variant == "dense":
            query, key = self.synthesis.factors(x, length)
        else:
            query, key = self.left[:, :length].unsqueeze(0), self.right[:, :length].unsqueeze(0)
        # Kernels want one width, a multiple of eight.
        wide = -(-max(query.shape[-1], width) // 8) * 8
        query, key, padded = (
            F.pad(side.to(value.dtype), (0, wide - side.shape[-1])).expand(*value.shape[:3], -1)
            for side in (query, key, value)
        )
        allowed = visible(value, key_mask, self.host.is_causal)
        return attend(query, key, padded, allowed, scale=1.0)[..., :width]

    def matrix(self, x: Tensor, key_mask: Mask = None) -> Tensor:
        """The attention matrix ``[B or 1, H, N, N]`` in the accumulation dtype."""
        allowed = visible(x.unsqueeze(1), key_mask, self.host.is_causal)
        return masked_softmax(self.scores(x), allowed)

    def scores(self, x: Tensor) -> Tensor:
        """B ``[B or 1, H, N, N]`` of tokens ``[B, N, embed_dim]``, before masks."""
        length, wide = x.shape[1], accumulation_dtype(x.dtype)
        if self.variant == "dense":
            return self.synthesis(x, length)
        if self.variant == "factorised_dense":
            coarse = self.coarse(x).unsqueeze(-1)
            return (coarse * self.fine(x).unsqueeze(-2)).flatten(-2)[..., :length]
        if self.variant == "random":
            return self.table[:, :length, :length].to(wide).unsqueeze(0)
        left, right = self.left[:, :length].to(wide), self.right[:, :length].to(wide)
        with without_autocast(x):
            return (left @ right.mT).unsqueeze(0)

    def _tables(self, rank: int) -> list[tuple[str, tuple[int, ...], float]]:
        """Name, shape and standard deviation of the random variants' matrices."""
        heads, length = self.host.num_heads, self.host.max_len
        if self.variant == "random":
            return [("table", (heads, length, length), 1.0)]
        if self.variant == "factorised_random":
            # So that the entries of the product have variance 1, as those of the whole matrix.
            return [(name, (heads, length, rank), rank**-0.25) for name in ("left", "right")]
        return []


class _Synthesis(nn.Module):
    """``[B, N, embed_dim]`` → ``[B, H, N, size]``: two layers, the second per head."""

    def __init__(self, host: Host, size: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(host.embed_dim, host.embed_dim)
        bound = 1.0 / math.sqrt(host.head_dim)
        self.weight = nn.Parameter(
            torch.empty(host.num_heads, host.head_dim, size).uniform_(-bound, bound)
        )
        self.bias = nn.Parameter(torch.empty(host.num_heads, 1, size).uniform_(-bound, bound))

    def forward(self, x: Tensor, size: int | None = None) -> Tensor:
        wide = accumulation_dtype(x.dtype)
        hidden = split_heads(F.relu(self.hidden(x)).to(wide), len(self.weight))
        weight, bias = self.weight[..., :size].to(wide), self.bias[..., :size].to(wide)
        with without_autocast(x):
            return hidden @ weight + bias

    def factors(self, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """``[B, H, N, D + 1]`` and ``[1, H, size, D + 1]``, with `forward` as their product."""
        hidden = split_heads(F.relu(self.hidden(x)), len(self.weight))
        columns = torch.cat((self.weight, self.bias), dim=1)[..., :size].mT
        return F.pad(hidden, (0, 1), value=1.0), columns.unsqueeze(0)
