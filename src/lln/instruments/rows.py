"""P, read one tile of rows at a time, as logarithms; nothing of size N×N is ever held.

`Rows` is what the instruments read: the attention of some heads (`AttentionRows`), or a matrix that
was given (`lln.instruments.of_matrix`).

Dimension legend: G heads, T queries, S keys, D head width, r rows and w columns of a tile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lln.instruments.unmasked_heads import UnmaskedHeads

# Entries of a tile, all heads together: 8 MiB in float64.
TILE = 1 << 20

# Rows of a tile, if the rows of a head do not fit.
MOST_ROWS = 256

# A sum below this may have lost terms to underflow and is done again in the log domain.
_TINY = 1e-280

# Pairs of that second attempt at a time.
_PAIRS = 1 << 14


@dataclass(frozen=True)
class RowTile:
    """Some rows of P.

    Attributes:
        log_p: ``[G, r, w]``, −inf where P is zero. P is zero in all columns left out.
        row: The first row.
        column: The first column.
        known_p: P itself where making the tile gave it anyway.
    """

    log_p: Tensor
    row: int
    column: int
    known_p: Tensor | None = None

    @property
    def p(self) -> Tensor:
        """P, ``[G, r, w]``."""
        return self.log_p.exp() if self.known_p is None else self.known_p


class Rows(ABC):
    """Row-stochastic matrices ``[G, T, S]`` that can be read one tile of rows at a time."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """(G, T, S)."""

    @abstractmethod
    def part(self, start: int, end: int) -> Rows:
        """The matrices from ``start`` up to ``end``."""

    @abstractmethod
    def tiles(self) -> Iterator[RowTile]:
        """All rows, in order."""

    def slices(self) -> Iterator[Rows]:
        """The same in groups of matrices, few enough that a tile of many rows fits in `TILE`."""
        count, tokens, keys = self.shape
        step = max(TILE // (min(tokens, MOST_ROWS) * keys), 1)
        for start in range(0, count, step):
            yield self.part(start, start + step)


def sum_over_rows(rows: Rows, statistic: Callable[[RowTile], Tensor]) -> Tensor:
    """The sum over all tiles of a statistic of each, ``[G, ...]``."""
    found = []
    for part in rows.slices():
        tiles = part.tiles()
        total = statistic(next(tiles))
        for tile in tiles:
            total = total + statistic(tile)
        found.append(total)
    return torch.cat(found)


@dataclass(frozen=True)
class AttentionRows(Rows):
    """Rows of P of some heads.

    Attributes:
        heads: The heads.
        normalised: Whether tiles hold log P; otherwise the logarithms of the kernel, the scores.
    """

    heads: UnmaskedHeads
    normalised: bool = True

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, T, S)."""
        count, tokens, _ = self.heads.query.shape
        return count, tokens, self.heads.key.shape[1]

    def part(self, start: int, end: int) -> AttentionRows:
        """The heads from ``start`` up to ``end``."""
        return replace(self, heads=self.heads.part(start, end))

    @property
    def width(self) -> int:
        """Most columns of a tile."""
        keys = self.heads.key.shape[1]
        if not self.heads.is_near:
            return keys
        around = int(self.heads.block.bincount().max()) + self.heads.window
        return min(keys, MOST_ROWS + 2 * around)

    def tiles(self) -> Iterator[RowTile]:
        """All rows, in order."""
        count, tokens, _ = self.shape
        most = MOST_ROWS if self.heads.is_near else tokens
        step = max(min(TILE // (count * self.width), most), 1)
        parts = [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]
        if self.heads.kind == "lln_diag":
            long_range, short_range = _LLNKernel(self.heads), _SoftmaxKernel(self.heads)
            for rows in parts:
                yield _mixed(long_range.tile(rows), short_range.tile(rows), self.heads.mix[:, rows])
            return
        kernels = {"lln": _LLNKernel, "lln_keys": _KeysKernel}
        kernel = kernels.get(self.heads.kind, _SoftmaxKernel)(self.heads)
        for rows in parts:
            yield kernel.tile(rows, self.normalised)


class _SoftmaxKernel:
    """Rows of softmax attention, over all keys or near ones."""

    def __init__(self, heads: UnmaskedHeads) -> None:
        self.heads = heads
        self.query = heads.scale * heads.query
        self.key = heads.key.mT.contiguous()
        self.in_blocks = heads.is_near or heads.kind == "lln_diag"

    def tile(self, rows: slice, normalised: bool = True) -> RowTile:
        """Log P of some rows, or their scores."""
        heads = self.heads
        first, last = 0, rows.stop if heads.is_causal else heads.key.shape[1]
        if self.in_blocks:
            ends = heads.block[[rows.start, rows.stop - 1]]
            near, far = ends[0] - heads.window, ends[1] + heads.window
            first = int(torch.searchsorted(heads.block, near))
            last = min(last, int(torch.searchsorted(heads.block, far, right=True)))
        columns = slice(first, last)
        scores = self.query[:, rows] @ self.key[..., columns]
        hidden = _hidden(heads, rows, columns, self.in_blocks)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        return RowTile(scores.log_softmax(-1) if normalised else scores, rows.start, first)


class _LLNKernel:
    """Rows of LLN attention, numerator of Eq. (9) over its sum.

    With the keys' largest exponents moved into the queries both factors are at most one, and a row
    of the kernel sums to at least one. Single entries may still underflow (and, with causal
    attention, all that a row sees): those are summed as logarithms.
    """

    def __init__(self, heads: UnmaskedHeads, shift: float | Tensor = 0.0) -> None:
        """Take the factors apart; ``shift`` is added to αq."""
        self.heads = heads
        exponent = heads.beta * heads.key
        peak = exponent.amax(-2, keepdim=True)
        self.exponent_k = exponent - peak
        self.key = self.exponent_k.exp().mT.contiguous()
        exponent = heads.alpha * heads.query + shift + peak
        # What the logarithms of the kernel lack in every row.
        self.row_peak = exponent.amax(-1, keepdim=True)
        self.exponent_q = exponent - self.row_peak
        self.query = self.exponent_q.exp()

    def tile(self, rows: slice, normalised: bool = True) -> RowTile:
        """Log P of some rows, or the kernel's logarithms less `row_peak`."""
        heads = self.heads
        columns = slice(0, rows.stop if heads.is_causal else heads.key.shape[1])
        kernel = self.query[:, rows] @ self.key[..., columns]
        hidden = _hidden(heads, rows, columns, in_blocks=False)
        if normalised and bool(kernel.amin() >= _TINY):
            if hidden is not None:
                kernel.masked_fill_(hidden, 0.0)
            p = kernel.div_(kernel.sum(-1, keepdim=True))
            return RowTile(p.log(), rows.start, 0, p)
        log_kernel = self._log(kernel, rows.start)
        if hidden is not None:
            log_kernel.masked_fill_(hidden, -torch.inf)
        return RowTile(log_kernel.log_softmax(-1) if normalised else log_kernel, rows.start, 0)

    def _log(self, kernel: Tensor, first_row: int) -> Tensor:
        lost = kernel < _TINY
        log_kernel = kernel.log()
        for place in lost.nonzero().split(_PAIRS):
            head, row, column = place.unbind(-1)
            exponent = self.exponent_q[head, row + first_row] + self.exponent_k[head, column]
            log_kernel[head, row, column] = exponent.logsumexp(-1)
        return log_kernel


class _KeysKernel:
    """Rows of attention with exact keys, see `lln.reference.lln_keys_matrix`.

    The weight of a key is that of its score, if it is in the block or chosen, and that of the slots
    which hold it.
    """

    def __init__(self, heads: UnmaskedHeads) -> None:
        self.heads = heads
        shift, level = heads.slot_shifts()
        self.lln = _LLNKernel(heads, shift)
        self.level = level + self.lln.row_peak
        self.query = heads.scale * heads.query
        self.key = heads.key.mT.contiguous()

    def tile(self, rows: slice, normalised: bool = True) -> RowTile:
        """Log P of some rows, or the kernel's logarithms."""
        log_kernel = self.lln.tile(rows, normalised=False).log_p + self.level[:, rows]
        columns = slice(0, log_kernel.shape[-1])
        scores = self.query[:, rows] @ self.key[..., columns]
        scores.masked_fill_(~self._exact(rows, columns), -torch.inf)
        log_kernel = torch.logaddexp(scores, log_kernel)
        return RowTile(log_kernel.log_softmax(-1) if normalised else log_kernel, rows.start, 0)

    def _exact(self, rows: slice, columns: slice) -> Tensor:
        """Which keys a row sees one by one: bool ``[G, r, w]``."""
        heads, chosen = self.heads, self.heads.chosen
        assert chosen is not None
        hidden = _hidden(heads, rows, columns, in_blocks=True)
        assert hidden is not None
        group = chosen.group[rows]
        own = chosen.indices[:, int(group[0]) : int(group[-1]) + 1]
        # One column more than the tile has, where missing keys go.
        far = own.new_zeros(*own.shape[:2], columns.stop + 1, dtype=torch.bool)
        far.scatter_(-1, torch.where(own < 0, columns.stop, own), True)
        return ~hidden | far[..., :-1][:, group - group[0]]


def _mixed(long_range: RowTile, short_range: RowTile, mix: Tensor) -> RowTile:
    """Rows of mix · LLN + (1 − mix) · diagonal, Figure 3."""
    near = slice(short_range.column, short_range.column + short_range.log_p.shape[-1])
    if long_range.known_p is not None:
        p = mix * long_range.known_p
        p[..., near] += (1 - mix) * short_range.p
        return RowTile(p.log(), long_range.row, 0, p)
    log_p = long_range.log_p + mix.log()
    log_p[..., near] = torch.logaddexp(log_p[..., near], short_range.log_p + (-mix).log1p())
    return RowTile(log_p, long_range.row, 0)


def _hidden(heads: UnmaskedHeads, rows: slice, columns: slice, in_blocks: bool) -> Tensor | None:
    """Which pairs of a tile P leaves out: bool ``[r, w]``."""
    hidden = None
    if in_blocks:
        hidden = (heads.block[rows, None] - heads.block[columns]).abs() > heads.window
    if heads.is_causal:
        row, column = (
            torch.arange(side.start, side.stop, device=heads.query.device)
            for side in (rows, columns)
        )
        later = column > row[:, None]
        hidden = later if hidden is None else hidden | later
    return hidden
