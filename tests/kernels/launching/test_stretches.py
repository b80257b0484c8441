"""How sequences are cut into stretches: by counting waves, without any kernel."""

import pytest
import torch

from lln.kernels.launching import sizes
from lln.kernels.launching.sizes import MIDDLE_BLOCK_TILES, MIDDLE_TILES, choose_sizes
from lln.kernels.launching.stretches import Tile, walk_stretch

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


@pytest.mark.parametrize(
    ("tokens", "heads", "expected"),
    [
        # 2, 4 and 6 stretches of two programs each are 1, 2 and 3 waves; 5 are 2 as well.
        (16384, 48, 5),
        # 768 programs: 3 waves of 32 tiles; one stretch is 2 waves of 64.
        (4096, 192, 2),
        (512, 1536, 1),
        (64, 1, 1),
    ],
)
def test_stretches_of_whole_waves(tokens, heads, expected):
    tile = Tile(tokens=64, warps=4, stages=4, programs=2, resident=2)
    length = tile.stretch(tokens, 64, heads, CORES, shares=2)
    assert length % 64 == 0
    assert -(-tokens // length) == expected


def test_of_equally_fast_ways_the_fewest_stretches_if_each_leaves_a_part():
    tile = Tile(tokens=64, warps=4, stages=3, programs=8, resident=4)
    # 48 heads of 256 tiles: 11 stretches are one wave of 24 tiles, 22 are two of 12.
    assert tile.stretch(16384, 64, 48, CORES, parts=True) == 24 * 64
    assert tile.stretch(16384, 64, 48, CORES) == 12 * 64


@pytest.mark.parametrize(("width", "queries", "keys"), [(64, 22, 86), (128, 86, 86), (32, 22, 22)])
def test_queries_leave_parts_but_keys_do_not(monkeypatch, width, queries, keys):
    """12 heads of 256 tiles: 22 and 86 stretches of them take equally long.

    Wide heads compute the sums over queries in a pass of its own. Narrow ones add up the parts of
    the queries at the beginning of every stretch of keys.
    """
    pytest.importorskip("triton")
    from lln.kernels.lln import launch_bidirectional
    from lln.kernels.summaries.lln_call import LLNCall

    monkeypatch.setitem(sizes.overrides, "cores", CORES)
    for name in ("query_grad", "key_grad"):
        monkeypatch.setitem(sizes.overrides, name, MIDDLE_TILES["query_grad"])
    side = torch.empty(1, 12, 16384, width, dtype=torch.float16)
    numbers = (1.0, 1.0, 1.0, 0, 1.0, 0.0, 0, False, 0)
    call = LLNCall(side, side, side, *[None] * 5, *numbers)
    cut = launch_bidirectional._cut(call, call.sizes(12), 0)
    assert (cut.query_programs, cut.key_programs) == (queries, keys)


def test_where_programs_come_in_whole_waves():
    """Only where it was measured how many fit a multiprocessor: heads of 33 to 64, 16 bits."""

    def sizes_of(dtype, width, block_size=0):
        side = torch.empty(1, 1, 64, width, dtype=dtype)
        return choose_sizes(side, side, side, 1, 1, block_size)

    for width in (33, 64):
        chosen = sizes_of(torch.float16, width, block_size=32)
        for name, tile in (MIDDLE_TILES | MIDDLE_BLOCK_TILES).items():
            assert getattr(chosen, name) == tile
    assert sizes_of(torch.bfloat16, 64, block_size=128).joint_read.resident == 0
    for others in (sizes_of(torch.float32, 64), sizes_of(torch.bfloat16, 32)):
        assert others.query_grad != MIDDLE_TILES["query_grad"]


def test_without_waves_as_many_stretches_as_fill_the_multiprocessors():
    tile = Tile(tokens=64, warps=4, stages=4, programs=2)
    assert tile.stretch(16384, 64, 48, CORES) == -(-256 // 6) * 64
    # More programs fit than there are: every stretch more is a gain.
    assert tile._replace(programs=4, resident=4).stretch(16384, 64, 48, CORES) == 24 * 64


def test_long_narrow_heads_have_fewer_partial_summaries():
    def parts_of(tokens):
        side = torch.empty(65536 // tokens, 12, tokens, 32, dtype=torch.bfloat16)
        tile = choose_sizes(side, side, side, 65536 // tokens, 12, 0).summarise
        heads = 65536 // tokens * 12
        return -(-tokens // tile.stretch(tokens, tile.tokens, heads, CORES, parts=True))

    assert [parts_of(tokens) for tokens in (4096, 16384, 65536)] == [2, 5, 22]
