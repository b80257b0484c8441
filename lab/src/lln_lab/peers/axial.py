"""Axial attention: along the rows of a grid, then along its columns.

Dimension legend: B batch, N tokens, R rows, C columns of the grid, H heads, D head width.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from lln.checks import check_count
from lln.errors import InvalidInputError
from lln_lab.peers.peer import Card, Host, Mask, Peer, real_tokens
from lln_lab.peers.projections import MultiHead
from lln_lab.peers.token_blocks import cut


class Axial(Peer):
    """r = Row(x), y = r + Column(x + r): softmax attention inside each row, then each column.

    Token i stands in row i // C, column i mod C. Rows fill from the top: of a length that is no
    multiple of C the last row is short, its missing cells are hidden like padding, and rows below
    it do not exist. So only the number of columns decides what a token sees; neither padding nor
    max_len does, and a longer sequence has more rows.

    Args:
        shape: Rows and columns, for images; they must hold max_len tokens. None = the most square
            grid that does: C = ⌈√max_len⌉ columns, ⌈max_len / C⌉ rows.
    """

    card = Card(
        name="axial",
        title="Axial attention",
        kind="mixer",
        citation="Ho et al. 2019, arXiv 1912.12180",
        equation="y = r + Column(x + r), r = Row(x): softmax attention along each axis of a grid",
        complexity="O(N (R + C) d), O(N √N d) on a square grid",
        is_linear=False,
        causal=False,
        row_stochastic=False,
        repeats_on_gpu=False,
        adds="eight projections, four per axis",
        oracle="dense mask form, one axis after the other",
        departures="The paper's layer is two residual sublayers with norms and feed-forward "
        "around each; here the residual between the two is inside, norms and feed-forward are the "
        "host's. No masked (causal) form, which the paper builds for generation.",
    )

    def __init__(self, host: Host, *, shape: Sequence[int] | None = None) -> None:
        super().__init__(host)
        if shape is None:
            columns = math.isqrt(host.max_len - 1) + 1
            shape = (-(-host.max_len // columns), columns)
        if not isinstance(shape, Sequence) or len(shape) != 2:
            raise InvalidInputError(f"shape must be rows and columns, got {shape!r}.")
        for name, size in zip(("rows", "columns"), shape, strict=True):
            check_count(f"shape's {name}", size)
        if shape[0] * shape[1] < host.max_len:
            raise InvalidInputError(
                f"shape {tuple(shape)} holds {shape[0] * shape[1]} tokens, fewer than max_len "
                f"{host.max_len}; give a larger grid."
            )
        self.shape = tuple(shape)
        width, heads = host.embed_dim, host.num_heads
        self.row, self.column = AxisAttention(width, heads), AxisAttention(width, heads)

    def mix(self, x: Tensor, key_mask: Mask) -> Tensor:
        length, columns = x.shape[1], self.shape[1]
        grid, real = cut(x, columns), None
        if key_mask is not None or length % columns:
            real = cut(real_tokens(x, key_mask), columns, dim=1)
        along_rows = self.row(grid, real)
        turned = None if real is None else real.mT
        along_columns = self.column((grid + along_rows).transpose(1, 2), turned)
        return (along_rows + along_columns.transpose(1, 2)).flatten(1, 2)[:, :length]


class AxisAttention(MultiHead):
    """Multi-head softmax attention inside every row of a grid."""

    def forward(self, grid: Tensor, real: Tensor | None) -> Tensor:
        """``[B, R, C, embed_dim]`` and bool ``[B, R, C]`` → ``[B, R, C, embed_dim]``."""
        rows = grid.flatten(0, 1)
        real_rows = None if real is None else real.flatten(0, 1)
        return self.attend(rows, rows, real_rows).unflatten(0, grid.shape[:2])
