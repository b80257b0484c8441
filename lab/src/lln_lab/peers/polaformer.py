"""PolaFormer: positive and negative parts of q and k kept apart.

Dimension legend: B batch, H heads, N tokens, D head width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln.errors import InvalidInputError
from lln.precision import accumulation_dtype, without_autocast
from lln_lab.peers.linear import full_sums
from lln_lab.peers.option_checks import check_kernel, check_number
from lln_lab.peers.peer import Card, Host, Mask, zero_padding
from lln_lab.peers.projected import Branched

# Added to the mean weight of a row, as in the authors' code.
_OFFSET = 1e-6


class PolaFormer(Branched):
    """Polarity-aware linear attention.

        q± = max(0, ±q/s)^p, k± likewise, s = softplus(scale), p = 1 + α sigmoid(w)
        same side: [q₊ ; q₋]·[k₊ ; k₋] weighs the first half of each head's values,
        other side: [q₋ ; q₊]·[k₊ ; k₋] the second half; both divided by their row's sum

    Two matrices per head, so a mixer and not a core. While w = 0 all powers are equal, and the
    length of a query does not matter, as with ReLU. The branches are those of `Branched`, as
    for every core.

    Args:
        host: Sizes and place of the layer; the head width must be even.
        alpha: α, the range of the learned powers; 3 in the authors' LRA runs.
        local: Tokens under the authors' own depthwise convolution of the values (one filter and
            bias per channel, shared by the heads), added to the attention; odd, 0 = none.
        gate: Whether the output is multiplied by a linear map of x.
    """

    card = Card(
        name="polaformer",
        title="PolaFormer",
        kind="mixer",
        citation="Meng et al. 2025, arXiv 2501.15061",
        equation="P ∝ [q₊;q₋]·[k₊;k₋] for one half of v, [q₋;q₊]·[k₊;k₋] for the other, "
        "x± = max(0, ±x/s)^p",
        complexity="O(N d²)",
        causal=False,
        equivariant=True,
        adds="projections, H d powers and H d scales; with options its own convolution and a gate",
        departures="no learned position added to k; its own convolution (5×5 over an image there; "
        "local=5) and its gate are options, off by default; means over real tokens only",
    )

    def __init__(
        self, host: Host, *, alpha: float = 3.0, local: int = 0, gate: bool = False, **branches: int
    ) -> None:
        super().__init__(host, **branches)
        width = host.head_dim
        if width % 2:
            raise InvalidInputError(
                f"polaformer halves the heads: embed_dim/num_heads must be even, got {width}."
            )
        check_number("alpha", alpha, lambda number: number > 0, "positive")
        check_kernel("local", local)
        self.alpha = alpha
        self.power = nn.Parameter(torch.zeros(host.num_heads, 1, width))
        self.scale = nn.Parameter(torch.zeros(host.num_heads, 1, width))
        self.local = (
            nn.Conv1d(width, width, local, padding=local // 2, groups=width) if local else None
        )
        self.gate = nn.Linear(host.embed_dim, host.embed_dim) if gate else None

    def attend(
        self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask
    ) -> Tensor:
        with without_autocast(query):
            sides_q, sides_k = self._sides(query), zero_padding(self._sides(key), key_mask)
            sides_k = sides_k / _count(sides_k, key_mask)
            halves = []
            for side_q, half in zip((sides_q, _swap(sides_q)), value.chunk(2, dim=-1), strict=True):
                values = F.pad(half.to(sides_q.dtype), (0, 1), value=1.0)
                sums = full_sums(side_q, sides_k, values)
                halves.append(sums[..., :-1] / (sums[..., -1:] + _OFFSET))
            out = torch.cat(halves, dim=-1).to(value.dtype)
        if self.local is None:
            return out
        channels = zero_padding(value, key_mask).flatten(0, 1).mT
        return out + self.local(channels).mT.unflatten(0, value.shape[:2])

    def project(self, out: Tensor, x: Tensor) -> Tensor:
        return self.out(out if self.gate is None else out * self.gate(x))

    def weights(self, x: Tensor, query: Tensor, key: Tensor, key_mask: Mask) -> Tensor:
        """The two matrices ``[B, H, 2, N, N]`` of the halves of the values."""
        sides_q, sides_k = self._sides(query), zero_padding(self._sides(key), key_mask)
        weights = torch.stack((sides_q @ sides_k.mT, _swap(sides_q) @ sides_k.mT), dim=2)
        real = _count(weights[:, :, 0], key_mask)
        return weights / (weights.sum(-1, keepdim=True) + real.unsqueeze(2) * _OFFSET)

    def _sides(self, x: Tensor) -> Tensor:
        wide = accumulation_dtype(x.dtype)
        scaled = x.to(wide) / F.softplus(self.scale.to(wide))
        power = 1 + self.alpha * self.power.to(wide).sigmoid()
        return torch.cat((scaled.relu() ** power, (-scaled).relu() ** power), dim=-1)


def _swap(sides: Tensor) -> Tensor:
    """[x₊ ; x₋] → [x₋ ; x₊]."""
    return sides.roll(sides.shape[-1] // 2, -1)


def _count(like: Tensor, key_mask: Mask) -> Tensor:
    """Real tokens per sample, at least 1: broadcasts to ``[B, 1, 1, 1]``."""
    if key_mask is None:
        return torch.full((1, 1, 1, 1), like.shape[-2], dtype=like.dtype, device=like.device)
    return key_mask.sum(-1).clamp_min(1).to(like.dtype)[:, None, None, None]
