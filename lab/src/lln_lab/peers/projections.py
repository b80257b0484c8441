"""Linear maps around heads, and softmax attention with its own four.

Dimension legend: B batch, H heads, N tokens, D head width.
"""

from torch import Tensor, nn

from lln_lab.peers.masked import attend
from lln_lab.peers.peer import Mask, visible


def square_maps(width: int, count: int, *, bias: bool = True) -> list[nn.Linear]:
    """So many linear maps from the width of the tokens to itself."""
    return [nn.Linear(width, width, bias=bias) for _ in range(count)]


def split_heads(tokens: Tensor, heads: int) -> Tensor:
    """``[B, N, H·D]`` → ``[B, H, N, D]``."""
    return tokens.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(heads: Tensor) -> Tensor:
    """``[B, H, N, D]`` → ``[B, N, H·D]``."""
    return heads.transpose(1, 2).flatten(2)


class MultiHead(nn.Module):
    """Multi-head softmax attention of one set of tokens to another."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = square_maps(width, 4)

    def attend(self, x: Tensor, y: Tensor, y_mask: Mask) -> Tensor:
        """``[B, N, width]`` of x attends ``[B, M, width]`` of y; y_mask bool ``[B, M]``."""
        query, key, value = (
            split_heads(project(side), self.heads)
            for project, side in ((self.query, x), (self.key, y), (self.value, y))
        )
        return self.out(join_heads(attend(query, key, value, visible(query, y_mask))))
