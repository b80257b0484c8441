"""Softmax attention inside a sliding window alone: what long encoders run in most layers."""

import torch
from torch import Tensor

from lln.checks import check_count
from lln.functional.windows import window_attention
from lln_lab.peers.masked import softmax_matrix
from lln_lab.peers.peer import Card, Core, Host, Mask, visible


class Window(Core):
    """Softmax attention to the tokens nearby: P_ij = 0 unless |i − j| ≤ w.

    Args:
        window: w, how many tokens a query sees on either side of its own; before its own where the
            host is causal.
    """

    card = Card(
        name="window",
        title="Sliding-window attention",
        citation="Beltagy et al. 2020 (Longformer), arXiv 2004.05150, section 3.1",
        equation="P = softmax(QKᵀ/√d) over |i − j| ≤ w, 0 outside",
        complexity="O(N w d)",
        oracle="dense form; softmax where w ≥ N − 1",
    )

    def __init__(self, host: Host, *, window: int = 64) -> None:
        super().__init__(host)
        check_count("window", window, 0)
        self.window = window

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask = None) -> Tensor:
        options = {"window": self.window, "is_causal": self.host.is_causal}
        return window_attention(query, key, value, key_mask=key_mask, **options)

    def matrix(self, query: Tensor, key: Tensor, key_mask: Mask = None) -> Tensor:
        place = torch.arange(query.shape[-2], device=query.device)
        near = (place.unsqueeze(-1) - place).abs() <= self.window
        return softmax_matrix(query, key, visible(query, key_mask, self.host.is_causal, near))
