"""Linformer against its formula, softmax attention and the package."""

import pytest
import torch

from lln import reference
from lln.errors import InvalidInputError
from lln_lab import peers
from lln_lab.peers.linformer import Linformer


def core(max_len=24, **options):
    host = peers.Host(embed_dim=16, num_heads=2, max_len=max_len)
    return Linformer(host, **options).double()


def sides_of(module, head):
    """E and F of a head, whatever is shared."""
    first, last = module.projections[0], module.projections[-1]
    return first[head % len(first)], last[head % len(last)]


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({}, 2 * 24 * 5),
        ({"shared": "headwise"}, 2 * 24 * 5),
        ({"shared": "none"}, 2 * 2 * 24 * 5),
        ({"shared": "key_value"}, 24 * 5),
        ({"compat": "skyformer"}, 0),
    ],
)
def test_agrees_with_the_dense_formula(options, numbers):
    module = core(mixtures=5, **options)
    assert peers.parameter_count(module) == numbers
    query, key, value = torch.randn(3, 2, 2, 17, 8, dtype=torch.float64)
    mask = torch.rand(2, 17) < 0.7
    found = module(query, key, value, mask)
    for sample in range(2):
        real = mask[sample]
        for head in range(2):
            for_keys, for_values = (side[:17][real] for side in sides_of(module, head))
            few_keys = for_keys.T @ key[sample, head, real]
            few_values = for_values.T @ value[sample, head, real]
            weights = (query[sample, head] @ few_keys.T / 8**0.5).softmax(-1)
            torch.testing.assert_close(found[sample, head], weights @ few_values)


def test_heads_have_their_own_matrices_only_if_nothing_is_shared():
    query, key, value = torch.randn(3, 1, 1, 9, 8, dtype=torch.float64).expand(3, 1, 2, 9, 8)
    apart = core(mixtures=5, shared="none")(query, key, value)
    together = core(mixtures=5, shared="headwise")(query, key, value)
    assert (apart[:, 0] - apart[:, 1]).abs().max() > 1e-3
    torch.testing.assert_close(together[:, 0], together[:, 1])


def test_identity_mixtures_give_softmax_attention():
    module = core(max_len=12, mixtures=12)
    with torch.no_grad():
        module.projections.copy_(torch.eye(12).expand_as(module.projections))
    query, key, value = torch.randn(3, 2, 2, 12, 8, dtype=torch.float64)
    expected = reference.softmax_attention(query, key, value)
    torch.testing.assert_close(module(query, key, value), expected)


def test_skyformer_leaves_its_matrix_untrained():
    module = core(max_len=4000, mixtures=5, compat="skyformer")
    assert list(module.parameters()) == []
    assert list(module.state_dict()) == ["projections"]
    assert module.projections.shape == (1, 2, 4000, 5)
    assert abs(module.projections.std().item() - 0.02) < 0.001


@pytest.mark.parametrize("tokens", [24, 15])
def test_agrees_with_the_package(tokens):
    package = pytest.importorskip("linformer")
    oracle = package.LinformerSelfAttention(16, 24, k=5, heads=2)
    layer = peers.build("linformer", embed_dim=16, num_heads=2, max_len=24, mixtures=5)
    with torch.no_grad():
        for ours, theirs in (
            (layer.query, oracle.to_q),
            (layer.key, oracle.to_k),
            (layer.value, oracle.to_v),
            (layer.out, oracle.to_out),
        ):
            ours.weight.copy_(theirs.weight)
            ours.bias.copy_(torch.zeros(16) if theirs.bias is None else theirs.bias)
        layer.core.projections[0, 0] = oracle.proj_k
        layer.core.projections[1, 0] = oracle.proj_v
    x = torch.randn(3, tokens, 16)
    torch.testing.assert_close(layer(x), oracle(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mixtures": 0}, "mixtures"),
        ({"shared": "layers"}, "'headwise'"),
        ({"compat": "other"}, "'skyformer'"),
        ({"compat": "skyformer", "shared": "none"}, "leave shared out"),
    ],
)
def test_bad_options_get_a_sentence(options, said):
    with pytest.raises(InvalidInputError, match=said):
        core(**options)
