"""P a tile of rows at a time, as logarithms; nothing of size N×N is ever held.

`Rows` is what the instruments read: the attention of some heads (`AttentionRows`), or a matrix that
somebody else made (`lln.instruments.of_matrix`).

Dimension legend: G heads, T queries, S keys, D head width, r rows and w columns of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lln.instruments.heads import Heads

# Entries of a tile, all heads together: 8 MiB in float64.
TILE = 1 << 20

# Rows of a tile, if the rows of a head do not fit.
MOST_ROWS = 256

# A sum below this may have lost terms to underflow and is done again in the log domain.
_TINY = 1e-280

# Pairs of that second attempt at a time.
_PAIRS = 1 << 14


class Tile(NamedTuple):
    """Some rows of P.

    Attributes:
        log_p: ``[G, r, w]``, −inf where P is zero. P is zero in all columns left out.
        row: The first row.
        column: The first column.
    """

    log_p: Tensor
    row: int
    column: int


class Rows(Protocol):
    """Row-stochastic matrices ``[G, T, S]`` that can be read a tile of rows at a time."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, T, S)."""
        ...

    def slices(self) -> Iterator[Rows]:
        """The same in groups of heads, few enough that a tile holds many rows."""
        ...

    def tiles(self) -> Iterator[Tile]:
        """All rows, in order."""
        ...


def sum_over_rows(rows: Rows, statistic: Callable[[Tile], Tensor]) -> Tensor:
    """The sum over all tiles of a statistic of each, ``[G, ...]``."""
    found = []
    for part in rows.slices():
        tiles = part.tiles()
        total = statistic(next(tiles))
        for tile in tiles:
            total = total + statistic(tile)
        found.append(total)
    return torch.cat(found)


def heads_in_a_slice(tokens: int, keys: int) -> int:
    """How many heads go together so that a tile of many rows stays within `TILE`."""
    return max(TILE // (min(tokens, MOST_ROWS) * keys), 1)


@dataclass(frozen=True)
class AttentionRows:
    """Rows of P of some heads.

    Attributes:
        heads: The heads.
        normalised: Whether tiles hold log P; otherwise the logarithms of the kernel, the scores.
    """

    heads: Heads
    normalised: bool = True

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, T, S)."""
        count, tokens, _ = self.heads.query.shape
        return count, tokens, self.heads.key.shape[1]

    def slices(self) -> Iterator[AttentionRows]:
        """The same in groups of heads, few enough that a tile holds many rows."""
        count, tokens, keys = self.shape
        step = heads_in_a_slice(tokens, keys)
        for start in range(0, count, step):
            yield replace(self, heads=self.heads.part(start, start + step))

    @property
    def width(self) -> int:
        """Most columns of a tile."""
        keys = self.heads.key.shape[1]
        if self.heads.kind != "diag":
            return keys
        return min(keys, MOST_ROWS + 2 * int(self.heads.block.bincount().max()))

    def tiles(self) -> Iterator[Tile]:
        """All rows, in order."""
        count, tokens, _ = self.shape
        most = MOST_ROWS if self.heads.kind == "diag" else tokens
        step = max(min(TILE // (count * self.width), most), 1)
        for start in range(0, tokens, step):
            end = min(start + step, tokens)
            if self.heads.kind == "lln_diag":
                yield _mixed(self.heads, start, end)
            else:
                yield _plain(self.heads, start, end, self.normalised)


def _plain(heads: Heads, start: int, end: int, normalised: bool = True) -> Tile:
    """Rows of P with one part, softmax, diagonal or LLN."""
    first, last = 0, end if heads.is_causal else heads.key.shape[1]
    if heads.kind == "diag":
        bounds = heads.block[[start, end - 1]]
        first = int(torch.searchsorted(heads.block, bounds[0]))
        last = min(last, int(torch.searchsorted(heads.block, bounds[1], right=True)))
    query, key = heads.query[:, start:end], heads.key[:, first:last]
    if heads.kind == "lln":
        log_kernel = _log_lln_kernel(heads.alpha * query, heads.beta * key)
    else:
        log_kernel = heads.scale * query @ key.mT.contiguous()
    hidden = _hidden(heads, start, end, first, last)
    if hidden is not None:
        log_kernel = log_kernel.masked_fill(hidden, -torch.inf)
    return Tile(log_kernel.log_softmax(-1) if normalised else log_kernel, start, first)


def _mixed(heads: Heads, start: int, end: int) -> Tile:
    """Rows of mix · LLN + (1 − mix) · diagonal, Figure 3."""
    long_range = _plain(replace(heads, kind="lln"), start, end)
    short_range = _plain(replace(heads, kind="diag"), start, end)
    mix = heads.mix[:, start:end]
    log_p = long_range.log_p + mix.log()
    near = slice(short_range.column, short_range.column + short_range.log_p.shape[-1])
    log_p[..., near] = torch.logaddexp(log_p[..., near], short_range.log_p + (-mix).log1p())
    return Tile(log_p, start, 0)


def _hidden(heads: Heads, start: int, end: int, first: int, last: int) -> Tensor | None:
    """Which pairs of a tile P leaves out: bool ``[r, w]``."""
    hidden = None
    if heads.kind == "diag":
        hidden = heads.block[start:end, None] != heads.block[first:last]
    if heads.is_causal:
        row = torch.arange(start, end, device=heads.query.device)
        later = torch.arange(first, last, device=heads.query.device) > row[:, None]
        hidden = later if hidden is None else hidden | later
    return hidden


def _log_lln_kernel(exponent_q: Tensor, exponent_k: Tensor) -> Tensor:
    """Log Σ_f e^{αq_f + βk_f} up to a constant of the row, numerator of Eq. (9).

    With the keys' largest exponents moved into the queries both factors are at most one, and a row
    sums to at least one. Single entries may still underflow; those are summed as logarithms.
    """
    peak = exponent_k.amax(-2, keepdim=True)
    exponent_q, exponent_k = exponent_q + peak, exponent_k - peak
    exponent_q = exponent_q - exponent_q.amax(-1, keepdim=True)
    kernel = exponent_q.exp() @ exponent_k.exp().mT.contiguous()
    lost = kernel < _TINY
    log_kernel = kernel.log_()
    if bool(lost.any()):
        for place in lost.nonzero().split(_PAIRS):
            head, row, column = place.unbind(-1)
            exact = (exponent_q[head, row] + exponent_k[head, column]).logsumexp(-1)
            log_kernel[head, row, column] = exact
    return log_kernel
