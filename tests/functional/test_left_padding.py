"""Diagonal blocks begin at the first token that is not masked, in every path."""

import pytest
import torch

import lln
from lln import instruments
from lln.testing import make_qkv

BLOCK, TOKENS = 8, 21
GIVEN = {"alpha": 1.5, "beta": 1.2}
each_padding = pytest.mark.parametrize("padding", range(1, 2 * BLOCK + 1))
each_direction = pytest.mark.parametrize("is_causal", [False, True], ids=["both", "causal"])
ATTENTIONS = {
    "diag": lln.block_diagonal_attention,
    "lln_diag": lambda *sides, **options: lln.lln_diag_attention(*sides, **GIVEN, **options),
}
each_attention = pytest.mark.parametrize("attend", ATTENTIONS.values(), ids=ATTENTIONS)


def pad(sides, padding):
    """So many tokens of NaN before each, and the mask that hides them."""
    padded = [torch.nn.functional.pad(side, (0, 0, padding, 0), value=torch.nan) for side in sides]
    mask = torch.arange(sides[0].shape[2] + padding) >= padding
    return padded, mask.expand(sides[0].shape[0], -1)


@each_attention
@each_direction
@each_padding
def test_padding_before_a_sequence_changes_nothing(attend, is_causal, padding):
    sides = make_qkv(2, 3, TOKENS, 8, dtype=torch.float64, requires_grad=True)
    options = {"block_size": BLOCK, "is_causal": is_causal}
    alone = attend(*sides, **options)
    padded, mask = pad(sides, padding)
    found = attend(*padded, key_mask=mask, **options)[:, :, padding:]
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-14)
    upstream = torch.randn_like(alone)
    expected = torch.autograd.grad(alone, sides, upstream)
    torch.testing.assert_close(torch.autograd.grad(found, sides, upstream), expected)


@each_attention
@each_direction
@pytest.mark.parametrize("tokens", [1, BLOCK, TOKENS])
def test_rows_begin_where_their_own_mask_ends(attend, is_causal, tokens):
    """Other rows, holes and rows without any token do not move a row's blocks."""
    sides = make_qkv(5, 2, tokens, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(tokens) >= torch.tensor([[0], [3], [BLOCK], [tokens - 1], [tokens]])
    mask[1, 5:7] = False
    mask[1, 3 + BLOCK :: BLOCK] = False
    options = {"block_size": BLOCK, "is_causal": is_causal, "key_mask": mask}
    outs = [attend(*sides, **options, impl=impl) for impl in ("eager", "reference")]
    upstream = torch.randn_like(outs[0])
    grads = [torch.autograd.grad(out, sides, upstream) for out in outs]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*grads)


@pytest.mark.slow
@each_direction
def test_compiled_calls_cut_likewise(is_causal):
    def attend(query, key, value, mask):
        options = {"key_mask": mask, "block_size": BLOCK, "is_causal": is_causal}
        return lln.block_diagonal_attention(query, key, value, **options)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for padding in (0, 3, 11):
        padded, mask = pad(make_qkv(2, 2, TOKENS, 8), padding)
        expected = attend(*padded, mask)
        torch.testing.assert_close(compiled(*padded, mask), expected, equal_nan=True)


@pytest.mark.parametrize("name", ["diag", "lln_diag"])
@pytest.mark.parametrize("padding", [1, 3, BLOCK, BLOCK + 5])
def test_instruments_cut_likewise(name, padding):
    sides = make_qkv(2, 2, TOKENS, 8, dtype=torch.float64)
    query, key, _ = sides
    (long_query, long_key, _), mask = pad(sides, padding)
    options = {"kind": name, "block_size": BLOCK} | (GIVEN if name == "lln_diag" else {})
    found = instruments.entropy(long_query, long_key, key_mask=mask, **options)
    torch.testing.assert_close(found, instruments.entropy(query, key, **options))
