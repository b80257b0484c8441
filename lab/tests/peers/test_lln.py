"""LLN in the registry is the library's LLN."""

import pytest
import torch
from lab.tests.peers.contract import build, tokens

import lln
from lln.errors import InvalidInputError


def heads(length=40):
    return torch.randn(3, 2, 2, length, 16, dtype=torch.float64)


def some_padding():
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1, 30:] = False
    return mask


@pytest.mark.parametrize("matching", ["variance", "entropy", "paper"])
def test_lln_is_lln_attention(matching):
    query, key, value = heads()
    mask = some_padding()
    found = build("lln", matching=matching).core(query, key, value, mask)
    expected = lln.lln_attention(query, key, value, key_mask=mask, matching=matching)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_lln_diag_is_lln_diag_attention():
    query, key, value = heads()
    mask = some_padding()
    found = build("lln_diag", block_size=16).core(query, key, value, mask)
    expected = lln.lln_diag_attention(query, key, value, key_mask=mask, block_size=16)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert build("lln_diag", block_size=64).core.attention.block_size == 64


def test_a_share_per_channel_has_no_matrix():
    query, key, value = heads()
    layer = build("lln_diag", block_size=16, join="ratio")
    average = lln.lln_diag_attention(query, key, value, block_size=16)
    torch.testing.assert_close(layer.core(query, key, value), average)
    with torch.no_grad():
        layer.core.attention.lln_scale.fill_(1)
    torch.testing.assert_close(layer.core(query, key, value), lln.lln_attention(query, key, value))
    with pytest.raises(InvalidInputError, match="matrix per channel"):
        layer.matrix(tokens())


def test_lln_with_the_common_diagonal_branch_is_lln_diag():
    x = tokens()
    plain, joined = build("lln", diagonal=16), build("lln_diag", block_size=16)
    joined.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain(x), joined(x))


@pytest.mark.parametrize("name", ["lln", "lln_diag"])
def test_a_causal_layer_learns_running_statistics_and_freezes_them(name):
    layer = build(name, is_causal=True)
    source = layer.core.attention.statistics
    x = tokens()
    before = layer(x)
    layer.train()(3 * x)
    assert source.updates == 1
    layer.eval()
    assert (layer(x) - before).abs().max() > 1e-6
    layer(x)
    assert source.updates == 1


def test_the_matrix_of_a_training_layer_updates_nothing():
    layer = build("lln", statistics="running").train()
    source = layer.core.attention.statistics
    layer.matrix(tokens())
    assert source.updates == 0
    assert source.training


def test_fixed_temperatures_reach_the_attention():
    query, key, value = heads()
    found = build("lln", statistics="fixed", alpha=0.7, beta=1.3).core(query, key, value)
    weights = torch.einsum("bhic,bhjc->bhij", (0.7 * query).exp(), (1.3 * key).exp())
    expected = weights / weights.sum(-1, keepdim=True) @ value
    # α, β are kept in float32.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(InvalidInputError, match="running"):
        build("lln", is_causal=True, statistics="sample")
    with pytest.raises(InvalidInputError, match="matching"):
        build("lln", matching="hope")
    with pytest.raises(InvalidInputError, match="statistics"):
        build("lln_diag", statistics="guessed")
    with pytest.raises(InvalidInputError, match="block_size"):
        build("lln_diag", block_size=0)


def test_lln_keys_is_lln_keys_attention():
    query, key, value = heads()
    mask = some_padding()
    sizes = {"block_size": 8, "keys": 6, "group_size": 1}
    found = build("lln_keys", **sizes).core(query, key, value, mask)
    expected = lln.lln_keys_attention(query, key, value, key_mask=mask, **sizes)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_lln_keys_with_every_key_is_softmax():
    x = tokens()
    exact, softmax = build("lln_keys", keys=40, block_size=8), build("softmax")
    softmax.load_state_dict(exact.state_dict())
    torch.testing.assert_close(exact(x), softmax(x))


def test_a_learned_offset_starts_in_training_and_shows_in_the_matrix():
    layer, x = build("lln_keys", learn_offset=True), tokens()
    before = layer.matrix(x)
    layer.train()(x)
    with torch.no_grad():
        layer.core.attention.offset.value.fill_(3.0)
    assert (layer.eval().matrix(x) - before).abs().max() > 1e-3
    assert layer.core.attention.offset.known


@pytest.mark.parametrize("join", ["average", "gate", "heads"])
def test_every_join_of_lln_diag_is_its_matrix_times_the_values(join):
    torch.manual_seed(0)
    core = build("lln_diag", block_size=16, join=join).core.double()
    if join == "gate":
        torch.nn.init.normal_(core.attention.gate_weight)
        torch.nn.init.normal_(core.attention.gate_bias)
    heads, width = core.host.num_heads, core.host.head_dim
    query, key, value = torch.randn(3, 2, heads, 40, width, dtype=torch.float64)
    expected = core.matrix(query, key) @ value
    torch.testing.assert_close(core(query, key, value), expected)
    if join != "average":
        average = build("lln_diag", block_size=16).core.double()
        assert not torch.allclose(average(query, key, value), expected)


def test_a_join_without_a_matrix_is_refused():
    with pytest.raises(InvalidInputError, match="join"):
        build("lln_diag", join="scale")
