"""Local and global layers in turn, with rotary positions: the pattern of ModernBERT.

Dimension legend: B batch, H heads, N tokens, D head width, w reach of the window.
"""

import torch
from torch import Tensor

from lln.checks import check_count
from lln.errors import InvalidInputError
from lln.precision import accumulation_dtype, without_autocast
from lln_lab.peers import rotary
from lln_lab.peers.band import band_attention
from lln_lab.peers.masked import softmax_matrix
from lln_lab.peers.option_checks import check_number, check_window
from lln_lab.peers.peer import Card, Core, Host, Mask, visible
from lln_lab.peers.rotary import frequencies
from lln_lab.peers.softmax import Softmax


class LocalGlobal(Core):
    """Softmax attention of rotated queries and keys, in a window in two layers of three.

        P_ij ∝ exp((R_i q_i)·(R_j k_j)/√d),  |i − j| ≤ w, or any j in layers 0, 3, 6, …

    R_i turns the pair of coordinates (t, t + d/2) by the angle i·θ^(−2t/d).

    Args:
        host: Its ``layer`` decides which kind this one is.
        window: Tokens of the window, even; w is its half.
        every: Layers 0, every, 2·every, … are global, the others see a window.
        local_theta: θ of windowed layers.
        global_theta: θ of global layers.
    """

    card = Card(
        name="local_global",
        title="Local and global layers (ModernBERT)",
        citation="Warner et al. 2024, arXiv 2412.13663",
        equation="P = softmax(RoPE(Q) RoPE(K)ᵀ/√d) over |i−j| ≤ w; over all in every third layer",
        complexity="O(N w d), in every third layer O(N² d)",
        is_linear=False,
        repeats_on_gpu=False,
        period=3,
        oracle="transformers ModernBertAttention, both kinds of layer; dense form",
        departures="the projections have biases, as every core's here; published ones have none",
    )

    def __init__(
        self,
        host: Host,
        *,
        window: int = 128,
        every: int = 3,
        local_theta: float = 10_000.0,
        global_theta: float = 160_000.0,
    ) -> None:
        super().__init__(host)
        check_window(window)
        check_count("every", every)
        for name, theta in (("local_theta", local_theta), ("global_theta", global_theta)):
            check_number(name, theta, lambda number: number > 0, "a positive number")
        if host.head_dim % 2:
            raise InvalidInputError(
                f"local_global turns pairs of coordinates and needs an even head width, got "
                f"{host.head_dim}; choose num_heads so that embed_dim / num_heads is even."
            )
        self.is_global = host.layer % every == 0
        self.reach = window // 2
        self.theta = global_theta if self.is_global else local_theta
        self.full = Softmax(host)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask = None) -> Tensor:
        query, key = (rotate(side, self.theta).to(value.dtype) for side in (query, key))
        if self.is_global:
            return self.full(query, key, value, key_mask)
        return band_attention(query, key, value, self.reach, key_mask, self.host.is_causal)

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        place = torch.arange(query.shape[-2], device=query.device)
        near = (place.unsqueeze(-1) - place).abs() <= self.reach
        among = None if self.is_global else near
        allowed = visible(query, key_mask, self.host.is_causal, among)
        return softmax_matrix(rotate(query, self.theta), rotate(key, self.theta), allowed)


def rotate(heads: Tensor, theta: float) -> Tensor:
    """Turn the coordinates (t, t + D/2) of token i by i·θ^(−2t/D); in the accumulation dtype."""
    with without_autocast(heads):
        wide = accumulation_dtype(heads.dtype)
        angles = frequencies(heads.shape[-1], wide, heads.device, theta)
        return rotary.rotate(heads, angles, halves=True)
