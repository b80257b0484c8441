"""Longformer against transformers' and against a dense form of its equation."""

import pytest
import torch
from lab.tests.peers.contract import build, tokens
from lab.tests.peers.growth import growth

from lln.errors import InvalidInputError


def heads(x):
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def dense(layer, x, mask, is_global):
    """Both softmaxes over N×N, chosen row by row."""
    place = torch.arange(x.shape[1])
    ahead = place - place.unsqueeze(-1)
    near = ahead.abs() <= layer.reach
    if layer.host.is_causal:
        near = near & (ahead <= 0)
    rows = attend(layer.query, layer.key, layer.value, x, near | is_global[:, None, :], mask)
    if is_global.any():
        everything = torch.ones_like(near)
        wide = (layer.global_query, layer.global_key, layer.global_value)
        rows = torch.where(is_global[..., None], attend(*wide, x, everything, mask), rows)
    return layer.out(rows)


def attend(query, key, value, x, allowed, mask):
    scores = heads(query(x)) @ heads(key(x)).mT / 4.0
    hidden = ~(allowed & mask[:, None, :]).unsqueeze(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ heads(value(x))).transpose(1, 2).flatten(2)


def first_real(mask, count):
    return mask & (mask.cumsum(-1) <= count)


@pytest.mark.parametrize("global_tokens", [0, 1, 3])
@pytest.mark.parametrize("length", [1, 17, 41, 64])
def test_agrees_with_the_dense_form(length, global_tokens):
    layer = build("longformer", global_tokens=global_tokens)
    x = tokens(length=length)
    mask = torch.ones(2, length, dtype=torch.bool)
    # Padding on the left: the first real token is global, not the first place.
    mask[1, : length // 3] = False
    found = layer(x, mask)
    expected = dense(layer, x * mask.unsqueeze(-1), mask, first_real(mask, global_tokens))
    torch.testing.assert_close(found[mask], expected[mask], rtol=1e-9, atol=1e-10)
    everyone = torch.ones_like(mask)
    expected = dense(layer, x, everyone, first_real(everyone, global_tokens))
    torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-10)


def test_causal_form_is_a_band_to_the_left():
    layer, x = build("longformer", is_causal=True), tokens(length=50)
    mask = torch.ones(2, 50, dtype=torch.bool)
    expected = dense(layer, x, mask, torch.zeros_like(mask))
    torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-10)
    assert not hasattr(layer, "global_key")


def test_a_wide_window_is_softmax_attention():
    layer, x = build("longformer", window=2 * 39, global_tokens=0), tokens(length=40)
    mask = torch.ones(2, 40, dtype=torch.bool)
    everything = torch.ones(40, 40, dtype=torch.bool)
    softmax = attend(layer.query, layer.key, layer.value, x, everything, mask)
    torch.testing.assert_close(layer(x), layer.out(softmax), rtol=1e-9, atol=1e-10)


def test_fewer_real_tokens_than_global_ones():
    layer, x = build("longformer", global_tokens=3), tokens(length=20)
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[0, 4:6] = mask[1, :] = True
    expected = dense(layer, x * mask.unsqueeze(-1), mask, first_real(mask, 3))
    torch.testing.assert_close(layer(x, mask)[mask], expected[mask], rtol=1e-9, atol=1e-10)


def test_unused_slots_may_point_anywhere():
    layer, x = build("longformer"), tokens(length=20)
    mask = torch.ones(2, 20, dtype=torch.bool)
    is_global = torch.zeros_like(mask)
    is_global[0, [2, 11]] = is_global[1, 5] = True
    found = layer.attend(
        x, mask, torch.tensor([[11, 2], [5, 5]]), torch.tensor([[True, True], [False, True]])
    )
    expected = dense(layer, x, mask, is_global)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("with_pads", [False, True])
@pytest.mark.parametrize("chosen", [[[], []], [[0], [0]], [[0, 9], [3]], [[5], []]])
def test_agrees_with_transformers(chosen, with_pads):
    modeling = pytest.importorskip("transformers.models.longformer.modeling_longformer")
    config = modeling.LongformerConfig(
        hidden_size=32,
        num_attention_heads=2,
        num_hidden_layers=1,
        attention_window=[16],
        attention_probs_dropout_prob=0.0,
    )
    theirs = modeling.LongformerSelfAttention(config, layer_id=0).eval()
    ours = build("longformer", dtype=torch.float32)
    for name in ("query", "key", "value"):
        getattr(theirs, name).load_state_dict(getattr(ours, name).state_dict())
        wide = getattr(ours, f"global_{name}").state_dict()
        getattr(theirs, f"{name}_global").load_state_dict(wide)
    x = tokens(length=48, dtype=torch.float32)
    mask = torch.ones(2, 48, dtype=torch.bool)
    if with_pads:
        mask[1, 37:] = False
    is_global = torch.zeros_like(mask)
    for sample, places in enumerate(chosen):
        is_global[sample, places] = True
    signs = torch.where(mask, 0.0, -10000.0).masked_fill(is_global, 10000.0)
    (expected,) = theirs(
        x,
        attention_mask=signs,
        is_index_masked=signs < 0,
        is_index_global_attn=signs > 0,
        is_global_attn=bool(is_global.any()),
    )
    most = max(1, *(len(places) for places in chosen))
    where = torch.tensor([(places + [0] * most)[:most] for places in chosen])
    valid = torch.tensor([[g < len(places) for g in range(most)] for places in chosen])
    found = ours.attend(x, mask, where, valid)
    torch.testing.assert_close(found[mask], ours.out(expected)[mask], rtol=1e-5, atol=1e-5)


def test_never_forms_a_matrix():
    assert growth(build("longformer", dtype=torch.float32)) < 4.5


def test_bad_options_get_a_sentence():
    for options, said in (
        ({"window": 0}, "window"),
        ({"window": 7}, "even"),
        ({"global_tokens": -1}, "global_tokens"),
        ({"global_tokens": 1, "is_causal": True}, "sees later tokens"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            build("longformer", **options)
