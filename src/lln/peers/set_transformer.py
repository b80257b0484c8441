"""Set Transformer: tokens speak through a few learned points.

Dimension legend: B batch, H heads, N tokens, D head width, m inducing points.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln.checks import check_count
from lln.peers.masked import attend
from lln.peers.peer import Card, Host, Mask, Peer


class SetTransformer(Peer):
    """ISAB_m(X) = MAB(X, MAB(I, X)), with m learned points I.

    Residuals, norms and feed-forward are inside: it takes the place of a whole encoder layer.

    Args:
        host: The layer it is built for.
        points: m.
    """

    card = Card(
        name="set_transformer",
        title="Set Transformer (ISAB)",
        kind="block",
        citation="Lee et al. 2019, arXiv 1810.00825",
        equation="ISAB(X) = MAB(X, MAB(I, X)), MAB(X, Y) = LN(H + relu(W H)), "
        "H = LN(X + Multihead(X, Y, Y))",
        complexity="O(N m d)",
        causal=False,
        row_stochastic=False,
        equivariant=True,
        repeats_on_gpu=False,
        adds="two MABs of 5·D² (four projections and one feed-forward layer) and m·D points",
        oracle="dense form",
        departures="As in the paper, not its code: scores over √d of a head (code: √D of the "
        "whole width), a residual of X itself (code: of its query projection), an output "
        "projection (code: none) and LayerNorm always (code: off unless asked for). rFF is the "
        "code's one layer, x + relu(Wx); the paper leaves it open.",
    )

    def __init__(self, host: Host, *, points: int = 32) -> None:
        super().__init__(host)
        check_count("points", points)
        self.points = nn.Parameter(torch.empty(points, host.embed_dim))
        nn.init.xavier_uniform_(self.points)
        self.gather = AttentionBlock(host.embed_dim, host.num_heads)
        self.spread = AttentionBlock(host.embed_dim, host.num_heads)

    def mix(self, x: Tensor, key_mask: Mask) -> Tensor:
        points = self.points.to(x.dtype).expand(x.shape[0], -1, -1)
        return self.spread(x, self.gather(points, x, key_mask))


class AttentionBlock(nn.Module):
    """MAB(X, Y) = LN(H + rFF(H)), H = LN(X + Multihead(X, Y, Y))."""

    def __init__(self, width: int, heads: int) -> None:
        """Args: width is that of both sets."""
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.feed_forward = nn.Linear(width, width)
        self.norm_attention, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, y: Tensor, y_mask: Tensor | None = None) -> Tensor:
        """``[B, N, embed_dim]`` of x attends ``[B, M, embed_dim]`` of y; y_mask bool ``[B, M]``."""
        query, key, value = (
            project(side).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project, side in ((self.query, x), (self.key, y), (self.value, y))
        )
        allowed = None if y_mask is None else y_mask[:, None, None, :]
        attended = self.out(attend(query, key, value, allowed).transpose(1, 2).flatten(2))
        hidden = self.norm_attention(x + attended)
        return self.norm_out(hidden + F.relu(self.feed_forward(hidden)))
