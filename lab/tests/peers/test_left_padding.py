"""Blocks of peers are counted from the first token that is not masked, as everywhere."""

import pytest
import torch
from tests.functional.test_left_padding import BLOCK, TOKENS, pad

from lln.testing import make_qkv
from lln_lab import peers


@pytest.mark.parametrize("name", ["diag", "lln_diag"])
@pytest.mark.parametrize("padding", [1, 3, BLOCK, BLOCK + 5])
def test_peers_cut_likewise(name, padding):
    sides = make_qkv(2, 2, TOKENS, 8, dtype=torch.float64)
    query, key, _ = sides
    _, mask = pad(sides, padding)
    layer = peers.build(name, embed_dim=16, num_heads=2, max_len=64, block_size=BLOCK).double()
    tokens = torch.randn(2, TOKENS, 16, dtype=torch.float64)
    padded = torch.nn.functional.pad(tokens, (0, 0, padding, 0), value=torch.nan)
    torch.testing.assert_close(layer(padded, mask)[:, padding:], layer(tokens))
    (long_query, long_key, _), mask = pad(sides, padding)
    matrix = layer.core.matrix(long_query.nan_to_num(), long_key.nan_to_num(), mask)
    torch.testing.assert_close(matrix[..., padding:, padding:], layer.core.matrix(query, key))
