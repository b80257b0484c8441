"""EntryMoments of all entries of some rows, merged tile by tile without cancellation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lln.instruments.rows import Rows, RowTile


class EntryMoments(NamedTuple):
    """Number, mean and sums of powers of the deviations from it, ``[G]`` each."""

    size: Tensor
    mean: Tensor
    second: Tensor
    third: Tensor
    fourth: Tensor

    @property
    def variance(self) -> Tensor:
        """Mean square deviation."""
        return self.second / self.size

    def merge(self, other: EntryMoments) -> EntryMoments:
        """The moments of both sets of numbers."""
        a, b = self.size, other.size
        n = a + b
        shift = other.mean - self.mean
        second = self.second + other.second + shift**2 * a * b / n
        third = (
            self.third
            + other.third
            + shift**3 * a * b * (a - b) / n**2
            + 3 * shift * (a * other.second - b * self.second) / n
        )
        fourth = (
            self.fourth
            + other.fourth
            + shift**4 * a * b * (a**2 - a * b + b**2) / n**3
            + 6 * shift**2 * (a**2 * other.second + b**2 * self.second) / n**2
            + 4 * shift * (a * other.third - b * self.third) / n
        )
        return EntryMoments(n, self.mean + shift * b / n, second, third, fourth)


def entry_moments(rows: Rows) -> tuple[EntryMoments, Tensor]:
    """Moments of the finite entries of ``log_p``, and the mean of the variances inside a row."""
    found = [_moments_of_tiles(part) for part in rows.slices()]
    columns = zip(*(moments for moments, _ in found), strict=True)
    within_row = torch.cat([row for _, row in found]) / rows.shape[1]
    return EntryMoments(*(torch.cat(column) for column in columns)), within_row


def row_and_total_variance(rows: Rows) -> tuple[Tensor, Tensor]:
    """Mean variance inside a row and variance over all finite entries, ``[G]`` each."""
    moments, within_row = entry_moments(rows)
    return within_row, moments.variance


def _moments_of_tiles(rows: Rows) -> tuple[EntryMoments, Tensor]:
    tiles = rows.tiles()
    moments, within_row = _moments_of_tile(next(tiles))
    for tile in tiles:
        more, more_within_row = _moments_of_tile(tile)
        moments, within_row = moments.merge(more), within_row + more_within_row
    return moments, within_row


def _moments_of_tile(tile: RowTile) -> tuple[EntryMoments, Tensor]:
    entries = tile.log_p
    there = entries > -torch.inf
    entries = torch.where(there, entries, 0.0)
    row_count = there.sum(-1)
    row_mean = entries.sum(-1) / row_count
    deviation = torch.where(there, entries - row_mean.unsqueeze(-1), 0.0)
    within_row = (deviation.square().sum(-1) / row_count).sum(-1)
    count = row_count.sum(-1).to(entries.dtype)
    mean = (row_mean * row_count).sum(-1) / count
    deviation = torch.where(there, entries - mean[:, None, None], 0.0)
    square = deviation.square()
    powers = (square, square * deviation, square.square())
    return EntryMoments(count, mean, *(power.sum((-2, -1)) for power in powers)), within_row
