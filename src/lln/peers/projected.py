"""Standard projections around a core, and the two branches any core can take.

Dimension legend: B batch, H heads, N tokens, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lln.attention import block_diagonal_attention
from lln.checks import check_block_size
from lln.errors import InvalidInputError
from lln.peers.host import Host
from lln.peers.peer import Core, Peer


class Projected(Peer):
    """q, k, v and output projections around a `Core`.

    Args:
        core: The attention.
        diagonal: Block size of a block-diagonal softmax averaged with the core's output, as in
            LLN+Diag; 0 = none.
        convolution: Tokens under a depthwise convolution of the values (one filter a head, as in
            Nyströmformer) added to the output; odd, 0 = none.
    """

    def __init__(self, core: Core, *, diagonal: int = 0, convolution: int = 0) -> None:
        """Build the projections and the branches."""
        super().__init__(core.host)
        self.card = core.card
        host = core.host
        _check_branches(host, diagonal, convolution)
        self.core, self.diagonal = core, diagonal
        self.query, self.key, self.value, self.out = (
            nn.Linear(host.embed_dim, host.embed_dim) for _ in range(4)
        )
        self.convolution = TokenConvolution(host.num_heads, convolution) if convolution else None

    def mix(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """See `Peer.mix`."""
        query, key, value = self.heads(x)
        out = self.core(query, key, value, key_mask)
        if self.diagonal:
            short = block_diagonal_attention(
                query,
                key,
                value,
                block_size=self.diagonal,
                key_mask=key_mask,
                is_causal=self.host.is_causal,
            )
            out = 0.5 * (out + short)
        if self.convolution is not None:
            if key_mask is not None:
                # Projected zeros are the bias: real neighbours must not see it.
                value = torch.where(key_mask[:, None, :, None], value, 0.0)
            out = out + self.convolution(value)
        return self.out(out.transpose(1, 2).flatten(2))

    def matrix(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """The core's attention matrix ``[B, H, N, N]`` for these tokens, branches not included."""
        self._check(x, key_mask)
        query, key, _ = self.heads(x)
        return self.core.matrix(query, key, key_mask)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value ``[B, H, N, D]`` of tokens ``[B, N, embed_dim]``."""
        query, key, value = (
            project(x).unflatten(-1, (self.host.num_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        return query, key, value


class TokenConvolution(nn.Module):
    """A depthwise convolution over the tokens: one odd filter a head, no bias."""

    def __init__(self, heads: int, kernel: int) -> None:
        """Args: heads is H, kernel the number of tokens under the filter."""
        super().__init__()
        self.filter = nn.Conv2d(
            heads, heads, (kernel, 1), padding=(kernel // 2, 0), groups=heads, bias=False
        )

    def forward(self, value: Tensor) -> Tensor:
        """``[B, H, N, D]`` → the same."""
        return self.filter(value)


def _check_branches(host: Host, diagonal: int, convolution: int) -> None:
    if diagonal:
        check_block_size(diagonal)
    if convolution < 0 or (convolution and convolution % 2 == 0):
        raise InvalidInputError(
            f"convolution must be an odd number of tokens or 0, got {convolution}."
        )
    if convolution and host.is_causal:
        raise InvalidInputError(
            "convolution looks at later tokens; leave it 0 where is_causal=True."
        )
