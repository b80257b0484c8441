"""Instruments of attention with exact keys: chosen keys, groups, offsets, packing and capture."""

import math
from itertools import pairwise

import pytest
import torch
from tests.instruments.dense import (
    dense_entropy,
    dense_gap,
    dense_keys_matrix,
    dense_log_moments,
    dense_matrix,
    dense_variance,
    only_valid,
)
from torch import nn

import lln
from lln import instruments
from lln.errors import InvalidInputError
from lln.instruments import capture, of_matrix
from lln.instruments.attention_inputs import AttentionInputs
from lln.instruments.head_groups import head_groups
from lln.instruments.rows import AttentionRows
from lln.testing import make_qkv

NUMBERS = {"alpha": 1.3, "beta": 0.8, "offset": -3.0}


def rows_of(query, key, **options):
    """P of every head of the whole batch, tile by tile: ``[B·H, T, S]``."""
    (group,) = head_groups(AttentionInputs(query, key, kind="lln_keys", **options))
    matrix = query.new_zeros(group.heads.query.shape[0], *(2 * [query.shape[2]])).double()
    for tile in AttentionRows(group.heads).tiles():
        count = tile.p.shape[-1]
        matrix[:, tile.row : tile.row + tile.p.shape[1], :count] = tile.p
    return matrix


@pytest.mark.parametrize("group_size", [None, 4, 1])
def test_rows_are_the_weights_of_the_attention(group_size):
    query, key, value = make_qkv(2, 4, 90, 8, key_heads=2, dtype=torch.float64)
    choice = {"keys": 11, "group_size": group_size, "block_size": 16}
    options = NUMBERS | choice
    matrix = rows_of(query, key, **options).unflatten(0, (2, 4))
    out = lln.lln_keys_attention(query, key, value, enable_gqa=True, **options)
    torch.testing.assert_close(matrix @ value.repeat_interleave(2, 1), out, rtol=1e-9, atol=1e-10)


def test_rows_of_a_block_far_beyond_the_sequence():
    query, key, _ = make_qkv(2, 2, 70, 8, dtype=torch.float64)
    mask = torch.arange(70) >= torch.tensor([[0], [21]])
    options = NUMBERS | {"block_size": 2**40, "group_size": 1, "key_mask": mask}
    options["keys"] = lln.choose_keys(query, key, 3, block_size=2**40, group_size=1, key_mask=mask)
    found = instruments.entropy(query, key, kind="lln_keys", **options)
    options["block_size"] = 128
    assert torch.equal(found, instruments.entropy(query, key, kind="lln_keys", **options))


def test_given_indices_that_do_not_count():
    """Repeated keys, keys of the own block, masked and missing ones."""
    query, key, _ = make_qkv(2, 2, 50, 8)
    keep = torch.ones(2, 50, dtype=torch.bool)
    keep[0, :13] = False
    keep[1, [3, 20, 21, 49]] = False
    generator = torch.Generator().manual_seed(0)
    # Blocks of 10 tokens from the first valid one: up to 6, with two groups each.
    indices = torch.randint(-1, 50, (2, 2, 12, 30), generator=generator)
    options = NUMBERS | {"block_size": 10, "group_size": 5, "keys": indices}
    found = {
        name: getattr(instruments, name)(query, key, kind="lln_keys", key_mask=keep, **options)
        for name in ("entropy", "variance", "spectral_gap", "temperature")
    }
    for sample in range(2):
        own = options | {"keys": indices[sample], "kind": "lln_keys", "keep": keep[sample]}
        matrix = only_valid(dense_matrix(query[sample], key[sample], **own), keep[sample])
        for name, measure in (
            ("entropy", dense_entropy),
            ("variance", dense_variance),
            ("spectral_gap", dense_gap),
            ("temperature", lambda matrix: dense_log_moments(matrix)[2].rsqrt()),
        ):
            torch.testing.assert_close(found[name][sample], measure(matrix), rtol=0, atol=1e-6)


def test_numbers_per_head():
    query, key, _ = make_qkv(2, 4, 40, 8, key_heads=2)
    alpha, beta = torch.rand(2, 4, 1, 1) + 1, torch.rand(2, 2, 1, 1) + 1
    offset = torch.randn(4, 1, 1)
    options = {"block_size": 8, "keys": 6}
    numbers = {"alpha": alpha, "beta": beta, "offset": offset}
    found = instruments.entropy(query, key, kind="lln_keys", **options, **numbers)
    for sample in range(2):
        sides = query[sample], key[sample].repeat_interleave(2, 0)
        own = alpha[sample], beta[sample].repeat_interleave(2, 0), options["block_size"]
        matrix = dense_keys_matrix(*sides, *own, offset=offset.double(), keys=6)
        torch.testing.assert_close(found[sample], dense_entropy(matrix), rtol=0, atol=1e-9)


def test_packed_indices():
    query, key, _ = make_qkv(1, 2, 60, 8)
    packed = [side[0].transpose(0, 1) for side in (query, key)]
    bounds = [0, 7, 7, 40, 41, 60]
    options = NUMBERS | {"block_size": 8, "group_size": 4}
    generator = torch.Generator().manual_seed(1)
    indices = torch.randint(-1, 60, (2, (60 // 8 + 5) * 2, 9), generator=generator)
    found = instruments.entropy(
        *packed, kind="lln_keys", keys=indices, cu_seqlens=torch.tensor(bounds), **options
    )
    assert found[1].isnan().all()
    block = 0
    for number, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            continue
        count = -(-(end - start) // 8)
        own = indices[:, 2 * block : 2 * (block + count)]
        own = torch.where((own >= start) & (own < end), own - start, -1)
        block += count
        sides = (side[:, :, start:end] for side in (query, key))
        alone = instruments.entropy(*sides, kind="lln_keys", keys=own[None], **options)
        torch.testing.assert_close(found[number], alone[0])


@pytest.mark.parametrize("keys", [0, 7, 400])
def test_the_gap_of_a_long_head_never_forms_the_matrix(keys, monkeypatch):
    """From the weights of block, chosen keys and slots, as if P were too large to keep."""
    query, key, _ = make_qkv(1, 1, 400, 16, scale=1.5)
    options = NUMBERS | {"kind": "lln_keys", "keys": keys, "block_size": 32}
    found = instruments.spectral_gap(query, key, **options)
    matrix = dense_matrix(query[0], key[0], **options)
    torch.testing.assert_close(found[0], dense_gap(matrix), rtol=0, atol=1e-6)
    monkeypatch.setattr("lln.instruments.rows.AttentionRows.tiles", None)
    assert torch.equal(instruments.spectral_gap(query, key, **options), found)


def test_every_key_exact_is_softmax():
    query, key, _ = make_qkv(1, 2, 50, 8)
    options = NUMBERS | {"kind": "lln_keys", "block_size": 10, "keys": 50}
    for name in ("entropy", "variance", "spectral_gap"):
        measure = getattr(instruments, name)
        torch.testing.assert_close(measure(query, key, **options), measure(query, key))


def test_constant_inputs():
    """A key has 1 + ρ shares of 150 inside a block of b and ρ outside, ρ = (150 - b)/150."""
    query, options = torch.full((1, 1, 150, 8), 0.3), {"kind": "lln_keys", "block_size": 8}
    # Slots that weigh as much as the softmax score of the mean key.
    numbers = {"alpha": 0.5, "beta": 2.0, "offset": -math.log(8) - 0.15, "keys": 0}
    expected = 0.0
    for size, rows in ((8, 144), (6, 6)):
        share = (150 - size) / 150
        inside, outside = (1 + share) / 150, share / 150
        expected -= rows * size * inside * math.log2(inside)
        expected -= rows * (150 - size) * outside * math.log2(outside)
    found = instruments.entropy(query, query, **options, **numbers).item()
    assert found == pytest.approx(expected / 150, abs=1e-6)


def test_what_is_missing_or_does_not_fit_is_said():
    query, key, _ = make_qkv(1, 2, 20, 8)
    options = {"kind": "lln_keys", "block_size": 4}
    for bad, error, sentence in (
        ({"is_causal": True}, InvalidInputError, "use lln.page_attention"),
        ({"keys": -1}, InvalidInputError, "keys must be"),
        ({"keys": torch.zeros(1, 2, 3, 4, dtype=torch.int64)}, InvalidInputError, "keys must be i"),
        ({"group_size": 3}, InvalidInputError, "group_size must divide block_size"),
        ({"offset": math.nan}, InvalidInputError, "offset must be a finite number"),
        ({"matching": "best"}, InvalidInputError, "matching must be one of"),
    ):
        with pytest.raises(error, match=sentence):
            instruments.entropy(query, key, **options | bad)
    with pytest.raises(InvalidInputError, match="matching must be one of"):
        instruments.entropy(query, key, kind="lln", matching="rest")
    with pytest.raises(InvalidInputError, match="same positions"):
        instruments.entropy(query, key[:, :, :9], kind="lln_keys")


class Attention(nn.Module):
    """Calls the attention in the way it is told."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, *sides):
        return lln.lln_keys_attention(*sides, **self.options)


def test_capture_measures_what_ran():
    query, key, value = make_qkv(2, 2, 60, 8, dtype=torch.float64)
    keep = torch.ones(2, 60, dtype=torch.bool)
    keep[1, :9] = False
    options = NUMBERS | {"keys": 5, "block_size": 12, "key_mask": keep}
    model = Attention(**options)
    before = model(query, key, value)
    with capture(model, instruments=("entropy", "spectral_gap", "log_normality")) as seen:
        after = model(query, key, value)
    assert torch.equal(before, after)
    assert not seen.problems
    (call,) = seen.calls
    assert call.kind == "lln_keys"
    found = instruments.entropy(query, key, kind="lln_keys", **options)
    torch.testing.assert_close(call.values["entropy"], found)
    assert call.values["offset"].eq(-3).all()
    assert call.values["alpha"].eq(1.3).all()
    assert call.values["spectral_gap"].isfinite().all()
    assert call.values["log_normality.ks"].isfinite().all()


def test_capture_of_modules_and_packed_calls():
    layer = lln.LLNKeysAttention(16, 2, batch_first=True, keys=4, block_size=8)
    x = torch.randn(2, 30, 16)
    with capture(layer) as seen:
        layer(x)
    assert {record.kind for record in seen.records} == {"lln_keys"}
    assert all(math.isfinite(record.values["entropy"]) for record in seen.records)

    class Packed(nn.Module):
        def forward(self, x, bounds):
            return lln.lln_keys_attention_varlen(x, x, x, bounds, keys=3, block_size=4)

    x, bounds, model = torch.randn(20, 2, 8), torch.tensor([0, 7, 20]), Packed()
    with capture(model) as seen:
        model(x, bounds)
    assert not seen.problems
    found = instruments.entropy(x, x, kind="lln_keys", cu_seqlens=bounds, keys=3, block_size=4)
    torch.testing.assert_close(seen.calls[0].values["entropy"], found)


def test_the_matrix_itself_gives_the_same():
    query, key, _ = make_qkv(1, 2, 40, 8)
    options = NUMBERS | {"keys": 6, "block_size": 8}
    matrix = rows_of(query, key, **options)
    for name in ("entropy", "variance", "spectral_gap", "temperature"):
        found = getattr(instruments, name)(query, key, kind="lln_keys", **options)
        torch.testing.assert_close(found[0], getattr(of_matrix, name)(matrix))
