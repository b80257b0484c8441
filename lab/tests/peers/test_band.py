"""Banded attention against loops over queries and keys."""

import pytest
import torch

from lln_lab.peers.band import Everywhere, band_attention


def looped(query, key, value, reach, mask, is_causal, everywhere=None):
    """One query at a time, from a list of the keys it may see."""
    out = torch.zeros_like(query)
    batch, heads, tokens, width = query.shape
    for b in range(batch):
        for h in range(heads):
            for i in range(tokens):
                near = range(
                    max(0, i - reach), (i if is_causal else min(i + reach, tokens - 1)) + 1
                )
                pairs = [(key[b, h, j], value[b, h, j]) for j in near if mask[b, j]]
                if everywhere is not None:
                    pairs += [
                        (everywhere.key[b, h, g], everywhere.value[b, h, g])
                        for g in range(everywhere.valid.shape[1])
                        if everywhere.valid[b, g]
                    ]
                if not pairs:
                    continue
                keys, values = (torch.stack(side) for side in zip(*pairs, strict=True))
                weights = (keys @ query[b, h, i] / width**0.5).softmax(0)
                out[b, h, i] = weights @ values
    return out


def qkv(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 2, 2, tokens, 4, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("reach", [0, 1, 5, 16, 20, 50, 60])
@pytest.mark.parametrize("tokens", [1, 16, 51])
def test_agrees_with_loops(tokens, reach, is_causal):
    query, key, value = qkv(tokens)
    mask = torch.rand(2, tokens, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[1, tokens // 2 :] = False
    for given in (None, mask):
        found = band_attention(query, key, value, reach=reach, key_mask=given, is_causal=is_causal)
        seen = torch.ones_like(mask) if given is None else given
        expected = looped(query, key, value, reach, seen, is_causal)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reach", [3, 40])
def test_keys_seen_from_everywhere(reach):
    query, key, value = qkv(37)
    extra = torch.randn(2, 2, 2, 3, 4, dtype=torch.float64)
    valid = torch.tensor([[True, False, True], [False, False, True]])
    everywhere = Everywhere(extra[0], extra[1], valid)
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[0, 5:30] = False
    found = band_attention(query, key, value, reach=reach, key_mask=mask, everywhere=everywhere)
    expected = looped(query, key, value, reach, mask, False, everywhere)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_gradients():
    inputs = [side.clone().requires_grad_() for side in qkv(19)]
    mask = torch.ones(2, 19, dtype=torch.bool)
    mask[1, 4:] = False

    def attend(*sides):
        return band_attention(*sides, reach=2, key_mask=mask)

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)
