"""Set Transformer: tokens speak through a few learned points.

Dimension legend: B batch, H heads, N tokens, D head width, m inducing points.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lln.checks import check_count
from lln_lab.peers.peer import Card, Host, Mask, Peer
from lln_lab.peers.projections import MultiHead


class SetTransformer(Peer):
    """ISAB_m(X) = MAB(X, MAB(I, X)), with m learned points I.

    Residuals, norms and feed-forward are inside: it takes the place of a whole encoder layer.

    Args:
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


class AttentionBlock(MultiHead):
    """MAB(X, Y) = LN(H + rFF(H)), H = LN(X + Multihead(X, Y, Y))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.feed_forward = nn.Linear(width, width)
        self.norm_attention, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, y: Tensor, y_mask: Tensor | None = None) -> Tensor:
        """See `MultiHead.attend`."""
        hidden = self.norm_attention(x + self.attend(x, y, y_mask))
        return self.norm_out(hidden + F.relu(self.feed_forward(hidden)))
