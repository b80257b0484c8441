"""The modules of a sliding window: the function itself, and no state."""

import copy

import pytest
import torch
from torch import nn

import lln
from lln import InvalidInputError, UnexpectedArgumentError

B, T, HEADS, D = 2, 30, 4, 8
WIDTH = HEADS * D


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def heads_of(key_heads=HEADS, value_width=D):
    query = torch.randn(B, HEADS, T, D)
    key, value = torch.randn(B, key_heads, T, D), torch.randn(B, key_heads, T, value_width)
    return query, key, value


def some_padding():
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, 20:] = False
    return mask


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [0, 3, 100])
def test_the_core_is_the_function(window, is_causal):
    sides, mask = heads_of(key_heads=2, value_width=5), some_padding()
    core = lln.WindowCore(HEADS, D, window=window, scale=0.3)
    found = core(*sides, key_mask=mask, is_causal=is_causal)
    options = {"key_mask": mask, "is_causal": is_causal, "enable_gqa": True}
    expected = lln.window_attention(*sides, window=window, scale=0.3, **options)
    assert torch.equal(found, expected)
    assert found.shape == (B, HEADS, T, 5)


def test_it_has_no_state_and_says_its_window():
    core = lln.WindowCore(HEADS, D, window=7)
    assert not core.state_dict()
    assert "window=7" in str(core)
    assert "window=7" in str(lln.WindowAttention(WIDTH, HEADS, window=7))


def test_a_window_of_all_tokens_is_multihead_attention():
    softmax = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    layer = lln.WindowAttention(WIDTH, HEADS, batch_first=True, window=T).eval()
    layer.load_state_dict(softmax.state_dict(), strict=True)
    x, ignored = torch.randn(B, T, WIDTH), ~some_padding()
    expected, _ = softmax(x, x, x, key_padding_mask=ignored)
    found, weights = layer(x, x, x, key_padding_mask=ignored)
    assert weights is None
    torch.testing.assert_close(found, expected)
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    expected, _ = softmax(x, x, x, attn_mask=causal, is_causal=True)
    torch.testing.assert_close(layer(x, is_causal=True)[0], expected)


def test_a_window_is_multihead_attention_with_a_band_as_mask():
    softmax = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    layer = lln.WindowAttention(WIDTH, HEADS, batch_first=True, window=3).eval()
    layer.load_state_dict(softmax.state_dict())
    x, place = torch.randn(B, T, WIDTH), torch.arange(T)
    far = (place[:, None] - place).abs() > 3
    torch.testing.assert_close(layer(x)[0], softmax(x, x, x, attn_mask=far)[0])


def test_an_encoder_layer_of_torch_runs_it():
    encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True, dropout=0.0).eval()
    other = copy.deepcopy(encoder)
    encoder.self_attn = lln.WindowAttention(WIDTH, HEADS, batch_first=True, window=T)
    encoder.self_attn.load_state_dict(other.self_attn.state_dict())
    x = torch.randn(B, T, WIDTH)
    torch.testing.assert_close(encoder(x), other(x))


def test_dropout_drops_whole_keys_in_training_only():
    sides = heads_of()
    core = lln.WindowCore(HEADS, D, window=4, dropout=0.5)
    plain = lln.WindowCore(HEADS, D, window=4)
    assert torch.equal(core.eval()(*sides), plain(*sides))
    torch.manual_seed(3)
    found = core.train()(*sides)
    torch.manual_seed(3)
    assert torch.equal(found, lln.window_attention(*sides, window=4, dropout_p=0.5))
    assert not torch.equal(found, plain(*sides))


def test_impl_names_the_way():
    sides = heads_of()
    found = lln.WindowCore(HEADS, D, window=4, impl="reference")(*sides)
    assert torch.equal(found, lln.window_attention(*sides, window=4, impl="reference"))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: lln.WindowCore(HEADS, D, window=-1), "window must be .* at least 0, got -1"),
        (lambda: lln.WindowAttention(WIDTH, HEADS, window=2.5), "window must be .* float 2.5"),
        (lambda: lln.WindowCore(HEADS, D, scale=0), "scale must be finite and not zero"),
        (lambda: lln.WindowCore(HEADS, D, dropout=2), "dropout"),
        (lambda: lln.WindowCore(HEADS, D, impl="fast"), "impl"),
        (lambda: lln.WindowCore(3, D)(*heads_of()), "query must have 3 heads"),
        (
            lambda: lln.WindowAttention(WIDTH, HEADS)(
                torch.randn(T, B, WIDTH), torch.randn(T + 1, B, WIDTH)
            ),
            "WindowCore pairs queries and keys of the same positions",
        ),
        (
            lambda: lln.WindowAttention(WIDTH, HEADS)(torch.randn(T, B, WIDTH), need_weights=True),
            "WindowAttention never forms",
        ),
    ],
)
def test_misuse_gets_a_sentence(call, said):
    with pytest.raises(InvalidInputError, match=said):
        call()


@pytest.mark.parametrize("option", ["alpha", "beta", "statistics", "matching", "head_dim"])
def test_there_is_nothing_to_match(option):
    with pytest.raises(UnexpectedArgumentError, match=f"has no argument '{option}'.* window"):
        lln.WindowAttention(WIDTH, HEADS, **{option: 1.0})
