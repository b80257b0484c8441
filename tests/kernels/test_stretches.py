"""How causal walks are cut into stretches: by counting waves, without any kernel."""

import pytest

from lln.kernels.sizes import Tile, walk_stretch

TILE = Tile(tokens=32, warps=4, stages=3)
CORES = 132


def stretches(tokens, heads, tile=TILE, rows=64):
    length = walk_stretch(tile, tokens, rows, heads, CORES)
    assert length % rows == 0
    return -(-tokens // length)


@pytest.mark.parametrize(
    ("tokens", "heads", "expected"),
    [
        # 3 full waves, or 6, of two programs a multiprocessor: nothing to gain.
        (512, 12 * 128, 1),
        (1024, 12 * 64, 1),
        # Half a wave is idle at the end, but the states of stretches would cost as much.
        (2048, 12 * 32, 1),
        # One wave, exactly.
        (65536, 12, 22),
        (64, 12, 1),
        (1, 1, 1),
    ],
)
def test_waves_are_filled(tokens, heads, expected):
    assert stretches(tokens, heads) == expected


def test_programs_of_twice_the_warps_fill_a_wave_with_half_as_many():
    assert stretches(65536, 12, TILE._replace(warps=8)) == 11


@pytest.mark.parametrize("heads", [1, 3, 12, 48, 96, 192, 1000])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1000, 8192, 100_000])
def test_no_cut_is_worse_than_one_stretch(tokens, heads):
    def duration(cuts):
        tiles = -(-tokens // 64)
        length = -(-tiles // cuts)
        waves = -(-heads * -(-tiles // length) // (2 * CORES))
        return waves * length + (0.35 * heads * tiles / (2 * CORES) if length < tiles else 0)

    assert duration(stretches(tokens, heads)) <= duration(1)
