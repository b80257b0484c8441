"""Packed sequences as rows of equal tiles, so that one code path serves any mix of lengths.

Every sequence is cut into tiles of ``size`` tokens; its last tile may be partly empty. At most
``T // size + number of sequences`` tiles are needed, a bound that does not depend on the values of
``cu_seqlens``: nothing waits for the device, and shapes stay static under ``torch.compile``.

Dimension legend: T packed tokens, H heads, n tiles, c tokens in a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lln.eager.whole_division import divided


class Tiling(NamedTuple):
    """Where the tokens of every tile come from, and where every token went.

    Attributes:
        source: int ``[n, c]``, index of the packed token in every place (0 where there is none).
        valid: bool ``[n, c]``, which places hold a token.
        sequence: int ``[n]``, the sequence of every tile; unused tiles have the number after the
            last sequence.
        last: int ``[n]``, the last tile of the same sequence.
        place: int ``[T]``, where in the flattened tiles every token went.
    """

    source: Tensor
    valid: Tensor
    sequence: Tensor
    last: Tensor
    place: Tensor

    def gather(self, packed: Tensor) -> Tensor:
        """``[T, H, D]`` → ``[H, n, c, D]``; zero in empty places."""
        tiles = torch.where(self.valid[..., None, None], packed[self.source], 0.0)
        return tiles.permute(2, 0, 1, 3)

    def scatter(self, tiles: Tensor) -> Tensor:
        """``[H, n, c, E]`` → ``[T, H, E]``."""
        return tiles.permute(1, 2, 0, 3).flatten(0, 1)[self.place]


def cut_tiles(cu_seqlens: Tensor, tokens: int, size: int) -> Tiling:
    """Cut packed sequences of at least one token, with int64 bounds, into tiles of c tokens."""
    sequences = cu_seqlens.shape[0] - 1
    device = cu_seqlens.device
    counts = divided(cu_seqlens.diff() + size - 1, size)
    ends = counts.cumsum(0)
    starts = torch.cat([ends - counts, ends[-1:]])
    tile = torch.arange(tokens // size + sequences, device=device)
    sequence = torch.searchsorted(ends, tile, right=True)
    used = sequence < sequences
    known = sequence.clamp_max(sequences - 1)
    first_token = cu_seqlens[known] + (tile - starts[known]) * size
    source = first_token.unsqueeze(-1) + torch.arange(size, device=device)
    valid = used.unsqueeze(-1) & (source < cu_seqlens[known + 1].unsqueeze(-1))
    last = torch.where(used, ends[known] - 1, tile)
    token = torch.arange(tokens, device=device)
    home = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    place = starts[home] * size + token - cu_seqlens[home]
    return Tiling(torch.where(valid, source, 0), valid, sequence, last, place)
