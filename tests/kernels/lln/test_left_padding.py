"""Kernels cut diagonal blocks where the mask ends, whatever program a block falls to."""

import pytest
import torch
from tests.kernels.common import DEVICE, DTYPES, ON_GPU, compare

import lln
from lln.kernels.launching import sizes
from lln.testing import make_qkv

BLOCK = 16


def begins(tokens, *firsts):
    """A mask whose rows begin at these tokens."""
    return torch.arange(tokens, device=DEVICE) >= torch.tensor(firsts, device=DEVICE)[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize("short", [True, False], ids=["short", "long"])
@pytest.mark.parametrize("block_size", [BLOCK, 5])
def test_rows_begin_where_their_own_mask_ends(monkeypatch, dtype, is_causal, short, block_size):
    """Long: enough programs that a block more than the tokens fill falls to one of its own."""
    monkeypatch.setitem(sizes.overrides, "short", short)
    monkeypatch.setitem(sizes.overrides, "cores", 64)
    mask = begins(64, 9, 64 - block_size + 1)
    mask[0, 9 + block_size] = False
    extra = {"alpha": 1.2, "beta": 0.8, "mix": torch.rand(2, 1, 64, 1)}
    if dtype == torch.float32:
        # Sums over all tokens: the budget of half types is for tensors of their own type.
        extra |= {name: torch.tensor(extra[name]) for name in ("alpha", "beta")}
    options = {"key_mask": mask, "is_causal": is_causal, "block_size": block_size}
    compare(dtype, extra, tokens=64, heads=1, **options)


@pytest.mark.parametrize("is_causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize("padding", [1, 7, BLOCK, 300])
def test_padding_before_a_sequence_changes_nothing(is_causal, padding):
    """300: the mask ends far behind the first look at it."""
    sides = make_qkv(1, 1, 40, 16, device=DEVICE)
    long = [torch.nn.functional.pad(side, (0, 0, padding, 0), value=torch.nan) for side in sides]
    mask = begins(40 + padding, padding)
    options = {"block_size": BLOCK, "is_causal": is_causal, "impl": "triton"}
    found = lln.block_diagonal_attention(*long, key_mask=mask, **options)
    expected = lln.block_diagonal_attention(*sides, **options)
    torch.testing.assert_close(found[:, :, padding:], expected, rtol=0, atol=1e-6)
    options |= {"alpha": 1.2, "beta": 0.8}
    found = lln.lln_diag_attention(*long, key_mask=mask, **options)
    expected = lln.lln_diag_attention(*sides, **options)
    torch.testing.assert_close(found[:, :, padding:], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("is_causal", [False, True], ids=["both", "causal"])
def test_dropped_keys_are_dropped_from_both_parts(is_causal):
    """The same tokens, however the passes over them are cut: out = P · diag(kept) · v."""
    query, key, _ = make_qkv(1, 1, 48, 16, device=DEVICE)
    value = torch.eye(48, device=DEVICE)[None, None]
    options = {"alpha": 1.2, "beta": 0.8, "block_size": BLOCK, "is_causal": is_causal}
    options |= {"key_mask": begins(48, 5), "impl": "triton"}
    torch.manual_seed(0)
    found = lln.lln_diag_attention(query, key, value, dropout_p=0.5, **options)[0, 0, 5:]
    whole = lln.lln_diag_attention(query, key, value, **options)[0, 0, 5:]
    kept = found.abs().sum(0) > 0
    assert 5 < int(kept.sum()) < 38
    torch.testing.assert_close(found, whole * kept * 2, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter would take minutes")
@pytest.mark.parametrize("is_causal", [False, True], ids=["both", "causal"])
def test_long_sequences_behind_long_padding(is_causal):
    mask = begins(2_000, 0, 1_234)
    extra = {"alpha": 1.2, "beta": 0.8}
    for dtype in DTYPES:
        options = {"key_mask": mask, "is_causal": is_causal, "block_size": 64, "width": 64}
        compare(dtype, extra, tokens=2_000, heads=2, **options)
