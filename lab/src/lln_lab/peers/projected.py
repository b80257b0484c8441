"""Standard projections around a core, and the two branches any core can take.

Dimension legend: B batch, H heads, N tokens, D head width.
"""

from abc import abstractmethod

from torch import Tensor, nn

from lln.checks import check_block_size
from lln.errors import InvalidInputError
from lln.functional.dense import block_diagonal_attention
from lln.precision import without_autocast
from lln_lab.peers.option_checks import check_kernel
from lln_lab.peers.peer import Core, Host, Mask, Peer, zero_padding
from lln_lab.peers.projections import join_heads, split_heads, square_maps


class Branched(Peer):
    """Standard projections, an attention between them, and two optional branches beside it.

    A subclass writes `attend` and `weights`.

    Args:
        diagonal: Block size of a block-diagonal softmax averaged with the attention's output, as
            in LLN+Diag; 0 = none.
        convolution: Tokens under a depthwise convolution of the values (one filter per head, as in
            Nyströmformer) added to the output; odd, 0 = none.
    """

    def __init__(self, host: Host, *, diagonal: int = 0, convolution: int = 0) -> None:
        super().__init__(host)
        _check_branches(host, diagonal, convolution)
        self.diagonal = diagonal
        self.query, self.key, self.value, self.out = square_maps(host.embed_dim, 4)
        self.convolution = TokenConvolution(host.num_heads, convolution) if convolution else None

    @abstractmethod
    def attend(
        self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask
    ) -> Tensor:
        """The attention, ``[B, H, N, D]``; x are the tokens that the heads were made of."""

    @abstractmethod
    def weights(self, x: Tensor, query: Tensor, key: Tensor, key_mask: Mask) -> Tensor:
        """What `attend` multiplies the values by, dense."""

    def mix(self, x: Tensor, key_mask: Mask) -> Tensor:
        query, key, value = self.heads(x)
        out = self.attend(x, query, key, value, key_mask)
        if self.diagonal:
            size, is_causal = self.diagonal, self.host.is_causal
            short = block_diagonal_attention(
                query, key, value, block_size=size, key_mask=key_mask, is_causal=is_causal
            )
            out = 0.5 * (out + short)
        if self.convolution is not None:
            out = out + self.convolution(value, key_mask)
        return self.project(join_heads(out), x)

    def project(self, out: Tensor, x: Tensor) -> Tensor:
        """The output projection of joined heads ``[B, N, embed_dim]``."""
        return self.out(out)

    def matrix(self, x: Tensor, key_mask: Mask = None) -> Tensor:
        """The attention matrix ``[B, H, N, N]`` of these tokens, branches not included."""
        self._check(x, key_mask)
        x = zero_padding(x, key_mask)
        query, key, _ = self.heads(x)
        with without_autocast(x):
            return self.weights(x, query, key, key_mask)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value ``[B, H, N, D]`` of tokens ``[B, N, embed_dim]``."""
        projected = self.query(x), self.key(x), self.value(x)
        query, key, value = (split_heads(side, self.host.num_heads) for side in projected)
        return query, key, value


class Projected(Branched):
    """q, k, v and output projections around a `Core`.

    Args:
        core: The attention; the branches are those of `Branched`.
    """

    def __init__(self, core: Core, *, diagonal: int = 0, convolution: int = 0) -> None:
        super().__init__(core.host, diagonal=diagonal, convolution=convolution)
        self.card, self.core = core.card, core

    def attend(
        self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, key_mask: Mask
    ) -> Tensor:
        return self.core(query, key, value, key_mask)

    def weights(self, x: Tensor, query: Tensor, key: Tensor, key_mask: Mask) -> Tensor:
        return self.core.matrix(query, key, key_mask)


class TokenConvolution(nn.Module):
    """A depthwise convolution over the tokens: one odd filter per head, no bias."""

    def __init__(self, heads: int, kernel: int) -> None:
        """Args: heads is H, kernel the number of tokens under the filter."""
        super().__init__()
        self.filter = nn.Conv2d(
            heads, heads, (kernel, 1), padding=(kernel // 2, 0), groups=heads, bias=False
        )

    def forward(self, value: Tensor, key_mask: Mask) -> Tensor:
        """``[B, H, N, D]`` → the same."""
        # A padded token's value is the bias of the projection; real neighbours must not see it.
        return self.filter(zero_padding(value, key_mask))


def _check_branches(host: Host, diagonal: int, convolution: int) -> None:
    if diagonal:
        check_block_size(diagonal)
    check_kernel("convolution", convolution)
    if convolution and host.is_causal:
        raise InvalidInputError(
            "convolution looks at later tokens; leave it 0 where is_causal=True."
        )
