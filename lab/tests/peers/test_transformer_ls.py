"""Transformer-LS against a dense form in float64, one head and one row at a time."""

import pytest
import torch
from lab.tests.peers.contract import WIDTH, build, tokens
from lab.tests.peers.growth import growth
from torch.nn import functional as F

from lln.errors import InvalidInputError


def linear(module, x):
    out = x @ module.weight.T
    return out if module.bias is None else out + module.bias


def norm(module, x):
    return F.layer_norm(x, (WIDTH,), module.weight, module.bias)


def dense(layer, x, mask):
    """One sample ``[N, width]``: every row's own list of landmarks and window keys."""
    heads, width, window, few = 2, WIDTH // 2, layer.window, layer.landmarks
    query = linear(layer.query, x)
    key, value = (
        norm(layer.long_norm, linear(layer.key, x)),
        norm(layer.long_norm, linear(layer.value, x)),
    )
    if few:
        scores = linear(layer.summary, x)
        columns = []
        for side in (key, value):
            parts = []
            for h in range(heads):
                p = scores[:, h * few : (h + 1) * few].clone()
                p[~mask] = -torch.inf
                parts.append(p.softmax(0).T @ side[:, h * width : (h + 1) * width])
            columns.append(norm(layer.short_norm, torch.cat(parts, 1)))
        few_keys, few_values = columns
    out = torch.zeros_like(x)
    for i in range(len(x)):
        block = i // window
        margin = max(window // 2, 1)
        low, high = block * window - margin, (block + 1) * window + margin
        near = [j for j in range(len(x)) if low <= j < high and mask[j]]
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            keys, values = key[near, part], value[near, part]
            if few:
                keys = torch.cat((few_keys[:, part], keys))
                values = torch.cat((few_values[:, part], values))
            weights = (keys @ query[i, part] / width**0.5).softmax(0)
            out[i, part] = weights @ values
    return linear(layer.out, out)


@pytest.mark.parametrize("window", [1, 2, 5, 8])
@pytest.mark.parametrize("landmarks", [0, 3])
@pytest.mark.parametrize("length", [1, 8, 27])
def test_agrees_with_the_dense_form(length, landmarks, window):
    layer = build("transformer_ls", window=window, landmarks=landmarks)
    x = tokens(length=length)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, length // 2 + 1 :] = False
    mask[1, 0] = length < 2
    found = layer(x, mask)
    for sample in range(2):
        kept = mask[sample]
        expected = dense(layer, x[sample], kept)
        torch.testing.assert_close(found[sample][kept], expected[kept], rtol=1e-9, atol=1e-10)


def test_norm_weights_take_part():
    layer, x = build("transformer_ls"), tokens(length=20)
    with torch.no_grad():
        for module in (layer.long_norm, layer.short_norm):
            module.weight.normal_()
            module.bias.normal_()
    mask = torch.ones(20, dtype=torch.bool)
    for sample in range(2):
        expected = dense(layer, x[sample], mask)
        torch.testing.assert_close(layer(x)[sample], expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("window", [40, 100])
def test_one_wide_window_alone_is_softmax_attention_on_normed_keys_and_values(window):
    layer, x = build("transformer_ls", window=window, landmarks=0), tokens(length=40)
    query, key, value = (
        side.unflatten(-1, (2, -1)).transpose(1, 2)
        for side in (
            layer.query(x),
            layer.long_norm(layer.key(x)),
            layer.long_norm(layer.value(x)),
        )
    )
    softmax = F.scaled_dot_product_attention(query, key, value)
    expected = layer.out(softmax.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-10)
    assert not hasattr(layer, "summary")


def test_landmarks_reach_beyond_the_window():
    x = tokens(length=60)
    changed = x.clone()
    changed[:, 59] += 1.0
    for landmarks, reaches in ((0, False), (4, True)):
        layer = build("transformer_ls", landmarks=landmarks)
        moved = (layer(changed) - layer(x))[:, 0].abs().max() > 1e-9
        assert bool(moved) == reaches


def test_never_forms_a_matrix():
    assert growth(build("transformer_ls", dtype=torch.float32)) < 4.5


def test_bad_options_get_a_sentence():
    for options, said in (({"window": 0}, "window"), ({"landmarks": -1}, "landmarks")):
        with pytest.raises(InvalidInputError, match=said):
            build("transformer_ls", **options)
