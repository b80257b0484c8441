"""The depthwise convolution of the values that every module can add."""

import pytest
import torch
from torch.nn import functional as F

import lln
from lln.nn.value_convolution import ValueConvolution

LAYERS = {
    lln.LLNAttention: {},
    lln.LLNDiagAttention: {"block_size": 4},
    lln.LLNKeysAttention: {"block_size": 4, "keys": 2},
    lln.WindowAttention: {"window": 4},
    lln.PageAttention: {"window": 4, "pages": 2},
}


def filled(channels=6, tokens=5):
    convolution = ValueConvolution(channels, tokens).double()
    torch.nn.init.normal_(convolution.weight)
    return convolution


def test_it_is_a_depthwise_convolution():
    convolution, value = filled(), torch.randn(2, 11, 6, dtype=torch.float64)
    kernel = convolution.weight.T.unsqueeze(1)
    expected = F.conv1d(value.mT, kernel, padding=2, groups=6).mT
    torch.testing.assert_close(convolution(value), expected)


def test_masked_tokens_count_as_zero_even_if_they_are_nan():
    convolution, value = filled(), torch.randn(1, 9, 6, dtype=torch.float64)
    mask = torch.tensor([[True] * 6 + [False] * 3])
    broken = torch.where(mask.unsqueeze(-1), value, torch.nan)
    expected = convolution(torch.where(mask.unsqueeze(-1), value, 0.0))
    torch.testing.assert_close(convolution(broken, mask), expected)


def test_a_causal_one_sees_no_later_token():
    convolution, value = filled(), torch.randn(1, 9, 6, dtype=torch.float64)
    changed = value.clone()
    changed[:, 5:] += 1.0
    first, second = (convolution(side, is_causal=True) for side in (value, changed))
    torch.testing.assert_close(first[:, :5], second[:, :5])
    assert not torch.equal(first[:, 5], second[:, 5])
    # Without the flag the two tokens before the change see it.
    assert not torch.equal(convolution(value)[:, 3], convolution(changed)[:, 3])


@pytest.mark.parametrize("layer", LAYERS)
def test_every_module_starts_without_it_and_learns_it(layer):
    torch.manual_seed(0)
    plain = layer(16, 2, batch_first=True, **LAYERS[layer])
    with_it = layer(16, 2, batch_first=True, convolution=3, **LAYERS[layer])
    missing = with_it.load_state_dict(plain.state_dict(), strict=False)
    assert missing.missing_keys == ["convolution.weight"]
    x = torch.randn(2, 12, 16)
    torch.testing.assert_close(with_it(x)[0], plain(x)[0])
    with_it(x)[0].square().sum().backward()
    assert with_it.convolution.weight.grad.abs().sum() > 0


def test_padding_reaches_no_real_token():
    torch.manual_seed(0)
    layer = lln.LLNAttention(16, 2, batch_first=True, convolution=3)
    torch.nn.init.normal_(layer.convolution.weight)
    padding = torch.tensor([[False] * 8 + [True] * 4])
    x = torch.randn(1, 12, 16)
    noisy = torch.where(padding.unsqueeze(-1), 100.0, x)
    first, second = (layer(side, key_padding_mask=padding)[0][:, :8] for side in (x, noisy))
    torch.testing.assert_close(first, second)


def test_refusals():
    for wrong in (4, -1, 2.0, True):
        with pytest.raises(lln.InvalidInputError, match="convolution must be"):
            lln.LLNAttention(16, 2, convolution=wrong)
    layer = lln.LLNAttention(16, 2, batch_first=True, convolution=3)
    with pytest.raises(lln.InvalidInputError, match="leave it 0 for cross attention"):
        layer(torch.randn(1, 4, 16), torch.randn(1, 6, 16))
