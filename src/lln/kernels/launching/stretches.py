"""How sequences are split over programs: by counting waves of programs.

A *stretch* is the consecutive tokens that one program handles. A *wave* is as many programs as the
GPU runs at once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

# A causal walk needs so many registers that only this many warps fit on a multiprocessor.
WALKING_WARPS = 8
# Cost of the extra passes for a walk in stretches, relative to the walk: 0.30 to 0.35 measured.
SHARE_OF_STRETCHES = 0.35


class Tile(NamedTuple):
    """How one kernel goes over its tokens.

    Attributes:
        tokens: Tokens per tile; a power of two.
        warps: Warps per program.
        stages: Depth of the pipeline of loads.
        programs: Least number of programs per multiprocessor; sequences are split to reach it.
            Causal walks use `walk_stretch` instead.
        registers: Most registers of a thread, so that more programs fit; 0 = no limit.
        resident: Programs that a multiprocessor runs at once, if sequences are to be split such
            that programs come in whole waves of as many; 0 = split them evenly.
        across: Tokens per tile of the other side, for kernels that pair tiles; 0 = others.
    """

    tokens: int
    warps: int
    stages: int
    programs: int = 4
    registers: int = 0
    resident: int = 0
    across: int = 0

    def stretch(
        self, tokens: int, rows: int, heads: int, cores: int, shares: int = 1, parts: bool = False
    ) -> int:
        """Tokens per program: whole tiles of ``rows`` tokens.

        ``heads`` are those of all samples, and ``shares`` programs share a stretch. With ``parts``
        every stretch leaves a partial result, or begins by adding up those of others: of equally
        fast ways to split sequences, the one with the fewest stretches is taken then, else the one
        with most.
        """
        tiles = cdiv(tokens, rows)
        most = min(max(1, cdiv(self.programs * cores, max(heads, 1))), tiles)
        if not self.resident:
            return cdiv(tiles, most) * rows

        def duration(stretches: int) -> int:
            """Time, in tiles of one program; the last wave of programs takes as long as any."""
            length = cdiv(tiles, stretches)
            programs = heads * shares * cdiv(tiles, length)
            return cdiv(programs, self.resident * cores) * length

        choices = range(1, most + 1) if parts else range(most, 0, -1)
        return cdiv(tiles, min(choices, key=duration)) * rows


@lru_cache(4096)
def walk_stretch(tile: Tile, tokens: int, rows: int, heads: int, cores: int) -> int:
    """Tokens per program of a causal walk: whole tiles of ``rows`` tokens.

    Programs run in waves, each with as many as fit, and the last wave takes as long as a full one.
    A sequence is cut into stretches if filling the waves better saves more than it costs to compute
    the states that the stretches start from.
    """
    tiles = cdiv(tokens, rows)
    together = cores * max(1, WALKING_WARPS // tile.warps)

    def duration(stretches: int) -> float:
        """Time, in tiles of one program."""
        length = cdiv(tiles, stretches)
        waves = cdiv(heads * cdiv(tiles, length), together)
        extra = 0.0 if length == tiles else SHARE_OF_STRETCHES * heads * tiles / together
        return waves * length + extra

    most = max(1, min(tiles, cdiv(8 * together, max(heads, 1))))
    return cdiv(tiles, min(range(1, most + 1), key=duration)) * rows


def cdiv(number: int, part: int) -> int:
    """``number / part``, rounded up."""
    return -(-number // part)
