"""PolaFormer: positive and negative parts of q and k kept apart.

Dimension legend: B batch, H heads, N tokens, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln.attention import block_diagonal_attention
from lln.checks import check_block_size
from lln.errors import InvalidInputError
from lln.peers.card import Card
from lln.peers.host import Host
from lln.peers.linear import full_sums
from lln.peers.peer import Peer
from lln.precision import accumulation_dtype, without_autocast

# Added to the mean weight of a row, as in the authors' code.
_OFFSET = 1e-6


class PolaFormer(Peer):
    """Polarity-aware linear attention.

        q± = max(0, ±q/s)^p, k± likewise, s = softplus(scale), p = 1 + α sigmoid(w)
        same side: [q₊ ; q₋]·[k₊ ; k₋] weighs the first half of each head's values,
        other side: [q₋ ; q₊]·[k₊ ; k₋] the second half; both divided by their row's sum

    Two matrices a head, hence a mixer and not a core. While w = 0 all powers are equal, and the
    kernel is as blind to the length of a query as ReLU's.

    Args:
        host: Sizes and place of the layer; the head width must be even.
        alpha: α, the range of the learned powers; 3 in the authors' LRA runs.
        convolution: Tokens under a depthwise convolution of the values (one filter a channel,
            shared by the heads), added to the output; odd, 0 = none.
        gate: Whether the output is multiplied by a linear map of x.
        diagonal: Block size of a block-diagonal softmax averaged with the output, as every core
            can take it; 0 = none.
    """

    card = Card(
        name="polaformer",
        title="PolaFormer",
        kind="mixer",
        citation="Meng et al. 2025, arXiv 2501.15061",
        equation="P ∝ [q₊;q₋]·[k₊;k₋] for one half of v, [q₋;q₊]·[k₊;k₋] for the other, "
        "x± = max(0, ±x/s)^p",
        complexity="O(N d²)",
        is_linear=True,
        causal=False,
        padding="longer",
        row_stochastic=True,
        equivariant=True,
        adds="projections, H d powers and H d scales; with options a convolution and a gate",
        oracle="dense form",
        departures="no learned position added to k; convolution (5×5 over an image there) and "
        "gate are options, off by default; means over real tokens only",
    )

    def __init__(
        self,
        host: Host,
        *,
        alpha: float = 3.0,
        convolution: int = 0,
        gate: bool = False,
        diagonal: int = 0,
    ) -> None:
        """See the class."""
        super().__init__(host)
        width = host.head_dim
        if width % 2:
            raise InvalidInputError(
                f"polaformer halves the heads: embed_dim/num_heads must be even, got {width}."
            )
        if not alpha > 0:
            raise InvalidInputError(f"alpha must be positive, got {alpha!r}.")
        if convolution < 0 or (convolution and convolution % 2 == 0):
            raise InvalidInputError(
                f"convolution must be an odd number of tokens or 0, got {convolution}."
            )
        if diagonal:
            check_block_size(diagonal)
        self.alpha, self.diagonal = alpha, diagonal
        self.query, self.key, self.value, self.out = (
            nn.Linear(host.embed_dim, host.embed_dim) for _ in range(4)
        )
        self.power = nn.Parameter(torch.zeros(host.num_heads, 1, width))
        self.scale = nn.Parameter(torch.zeros(host.num_heads, 1, width))
        self.convolution = (
            nn.Conv1d(width, width, convolution, padding=convolution // 2, groups=width)
            if convolution
            else None
        )
        self.gate = nn.Linear(host.embed_dim, host.embed_dim) if gate else None

    def mix(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """See `Peer.mix`."""
        query, key, value = self._heads(x)
        out = self._attend(query, key, value, key_mask)
        if self.diagonal:
            short = block_diagonal_attention(
                query, key, value, block_size=self.diagonal, key_mask=key_mask
            )
            out = 0.5 * (out + short)
        if self.convolution is not None:
            if key_mask is not None:
                # Projected zeros are the bias: real neighbours must not see it.
                value = torch.where(key_mask[:, None, :, None], value, 0.0)
            local = self.convolution(value.flatten(0, 1).mT).mT
            out = out + local.unflatten(0, value.shape[:2])
        out = out.transpose(1, 2).flatten(2)
        if self.gate is not None:
            out = out * self.gate(x)
        return self.out(out)

    def matrix(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """The two attention matrices ``[B, H, 2, N, N]`` of the halves of the values."""
        self._check(x, key_mask)
        query, key, _ = self._heads(x)
        sides_q, sides_k = self._sides(query), self._sides(key)
        if key_mask is not None:
            sides_k = torch.where(key_mask[:, None, :, None], sides_k, 0.0)
        weights = torch.stack((sides_q @ sides_k.mT, _swap(sides_q) @ sides_k.mT), dim=2)
        real = _count(weights[:, :, 0], key_mask)
        return weights / (weights.sum(-1, keepdim=True) + real.unsqueeze(2) * _OFFSET)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
        with without_autocast(query):
            sides_q, sides_k = self._sides(query), self._sides(key)
            if key_mask is not None:
                sides_k = torch.where(key_mask[:, None, :, None], sides_k, 0.0)
            sides_k = sides_k / _count(sides_k, key_mask)
            same, other = (
                F.pad(half, (0, 1), value=1.0) for half in value.to(sides_q.dtype).chunk(2, dim=-1)
            )
            sums = (
                full_sums(sides_q, sides_k, same),
                full_sums(_swap(sides_q), sides_k, other),
            )
            halves = [part[..., :-1] / (part[..., -1:] + _OFFSET) for part in sums]
            return torch.cat(halves, dim=-1).to(value.dtype)

    def _sides(self, x: Tensor) -> Tensor:
        wide = accumulation_dtype(x.dtype)
        scaled = x.to(wide) / F.softplus(self.scale.to(wide))
        power = 1 + self.alpha * self.power.to(wide).sigmoid()
        return torch.cat((scaled.relu() ** power, (-scaled).relu() ** power), dim=-1)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            project(x).unflatten(-1, (self.host.num_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        return query, key, value


def _swap(sides: Tensor) -> Tensor:
    """[x₊ ; x₋] → [x₋ ; x₊]."""
    return sides.roll(sides.shape[-1] // 2, -1)


def _count(like: Tensor, key_mask: Tensor | None) -> Tensor:
    """Real tokens a sample, at least 1: broadcasts to ``[B, 1, 1, 1]``."""
    if key_mask is None:
        return torch.full((1, 1, 1, 1), like.shape[-2], dtype=like.dtype, device=like.device)
    return key_mask.sum(-1).clamp_min(1).to(like.dtype)[:, None, None, None]
