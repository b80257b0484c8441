"""key_masses: where the mass of softmax attention lies."""

from importlib import import_module

import pytest
import torch
from tests.instruments.test_public import check_arguments_are_documented
from tests.memory import peak_bytes

from lln import choose_keys, reference
from lln.errors import InvalidInputError
from lln.testing import make_qkv
from lln_lab.inspection.key_masses import key_masses


def dense_masses(query, key, indices, block_size, group_size, keep, scale=None):
    """Block and chosen mass of every row, ``[B, H, T]`` each."""
    pairs = keep[:, None, None] & torch.ones(query.shape[2], 1, dtype=torch.bool)
    # Every row keeps the first key for the count of blocks: only the mask says where they begin.
    sizes = (query.shape[2], block_size, group_size)
    exact = reference.exact_pairs(indices, *sizes, keep=pairs)
    near = reference.exact_pairs(indices[..., :0], *sizes, keep=pairs)
    p = reference.softmax_matrix(query, key, keep=pairs, scale=scale)
    return (p * near).sum(-1), (p * (exact & ~near)).sum(-1)


@pytest.mark.parametrize("group_size", [None, 4, 1])
def test_masses_equal_dense(group_size):
    query, key, _ = make_qkv(3, 4, 70, 8, key_heads=2, scale=1.5)
    keep = torch.ones(3, 70, dtype=torch.bool)
    keep[1, :21] = False
    keep[2] = torch.arange(70) % 3 != 1
    choice = {"group_size": group_size, "block_size": 16, "scale": -0.4}
    choice |= {"key_mask": keep}
    found = key_masses(query, key, keys=(0, 5, 70), **choice)
    assert found.keys.tolist() == [0, 5, 70]
    repeated = key.repeat_interleave(2, 1)
    for place, number in enumerate((0, 5, 70)):
        indices = choose_keys(query, key, number, enable_gqa=True, **choice)
        size = group_size or 16
        rows = dense_masses(query, repeated, indices, 16, size, keep, scale=-0.4)
        for own, dense in zip((found.block, found.chosen[..., place]), rows, strict=True):
            expected = (dense * keep[:, None]).sum(-1) / keep.sum(-1)[:, None]
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)
    total = found.block.unsqueeze(-1) + found.chosen + found.rest
    torch.testing.assert_close(total, torch.ones_like(total))
    assert found.chosen[..., 0].eq(0).all()
    assert found.rest[..., -1].abs().max() < 1e-12


def test_packed_sequences_and_one_number():
    query, key, _ = make_qkv(1, 2, 50, 8)
    packed = [side[0].transpose(0, 1) for side in (query, key)]
    bounds = [0, 20, 20, 50]
    found = key_masses(*packed, keys=4, block_size=8, cu_seqlens=torch.tensor(bounds))
    assert found.chosen.shape == (3, 2, 1)
    assert found.block[1].isnan().all()
    for number in (0, 2):
        own = (side[:, :, bounds[number] : bounds[number + 1]] for side in (query, key))
        alone = key_masses(*own, keys=(4,), block_size=8)
        torch.testing.assert_close(found.block[number], alone.block[0])
        torch.testing.assert_close(found.chosen[number], alone.chosen[0])


def test_tiles_and_drawn_rows(monkeypatch):
    query, key, _ = make_qkv(2, 2, 300, 8, scale=1.5)
    whole = key_masses(query, key, keys=(8, 32), most_rows=None)
    drawn = key_masses(query, key, keys=(8, 32), most_rows=150)
    for own, other in zip(drawn[:3], whole[:3], strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0.05)
        assert not torch.equal(own, other)
    again = key_masses(query, key, keys=(8, 32), most_rows=150)
    assert torch.equal(again.chosen, drawn.chosen)
    # The function hides the module of its name.
    monkeypatch.setattr(import_module("lln_lab.inspection.key_masses"), "TILE", 1000)
    tiled = key_masses(query, key, keys=(8, 32), most_rows=None)
    torch.testing.assert_close(tiled.chosen, whole.chosen)


def test_a_sick_head_is_nan_and_touches_no_other():
    query, key, _ = make_qkv(2, 2, 40, 8)
    whole = key_masses(query, key, keys=(4,), block_size=8)
    query[1, 0, 5, 2] = torch.nan
    found = key_masses(query, key, keys=(4,), block_size=8)
    sick = torch.tensor([[False, False], [True, False]])
    assert torch.equal(found.block.isnan(), sick)
    assert torch.equal(found.rest[..., 0].isnan(), sick)
    torch.testing.assert_close(found.chosen[~sick], whole.chosen[~sick])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"keys": ()}, "keys must hold at least one"),
        ({"keys": "many"}, "keys must be a number of keys or several"),
        ({"keys": torch.zeros(1, 2, 3, 4)}, "keys must be a number of keys or several"),
        ({"keys": (4, -1)}, "keys must be"),
        ({"keys": (4.5,)}, "keys must be"),
        ({"most_rows": 0}, "most_rows must be"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"key": torch.zeros(1, 2, 9, 8)}, "same positions"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(options, sentence):
    query, key, _ = make_qkv(1, 2, 20, 8)
    with pytest.raises(InvalidInputError, match=sentence):
        key_masses(query, **({"key": key} | options))


def test_masses_of_keys_take_less_than_the_matrix():
    """One N×N matrix in float64 is 128 MiB."""
    key_masses(*torch.randn(2, 1, 1, 300, 64))
    query, key = torch.randn(2, 1, 1, 4096, 64)
    assert peak_bytes(lambda: key_masses(query, key)) < 100 << 20


def test_arguments_are_documented():
    check_arguments_are_documented(key_masses)
