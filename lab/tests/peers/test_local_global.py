"""Local and global layers against transformers' ModernBERT and complex rotations."""

import pytest
import torch
from lab.tests.peers.contract import build, tokens
from lab.tests.peers.growth import growth

from lln.errors import InvalidInputError
from lln_lab.peers.local_global import rotate


def test_rotation_is_a_complex_product():
    heads = torch.randn(2, 3, 20, 8, dtype=torch.float64)
    pairs = torch.complex(heads[..., :4], heads[..., 4:])
    frequencies = torch.tensor([500.0 ** (-t / 4) for t in range(4)], dtype=torch.float64)
    turns = torch.polar(
        torch.ones(20, 4, dtype=torch.float64),
        torch.arange(20.0, dtype=torch.float64).outer(frequencies),
    )
    expected = pairs * turns
    found = rotate(heads, 500.0)
    torch.testing.assert_close(torch.complex(found[..., :4], found[..., 4:]), expected)


def test_scores_depend_on_distance_alone():
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 1, 30, 8)
    scores = (rotate(query, 100.0) @ rotate(key, 100.0).mT)[0, 0]
    torch.testing.assert_close(scores[3, 1], scores[20, 18])
    assert (scores[3, 1] - scores[3, 2]).abs() > 1e-3


@pytest.mark.parametrize("layer", range(6))
def test_every_third_layer_is_global(layer):
    module = build("local_global", layer=layer, layers=6)
    x = tokens(length=90)
    changed = x.clone()
    changed[:, 50] += 1.0
    moved = ((module(changed) - module(x)).abs().amax((0, 2)) > 1e-12).nonzero().flatten()
    expected = range(90) if layer % 3 == 0 else range(42, 59)
    assert moved.tolist() == list(expected)
    assert module.core.theta == (160_000.0 if layer % 3 == 0 else 10_000.0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_global_layers_are_their_dense_form(is_causal):
    core = build("local_global", layer=3, layers=6, is_causal=is_causal).core
    query, key, value = torch.randn(3, 2, 2, 33, 16, dtype=torch.float64)
    mask = torch.ones(2, 33, dtype=torch.bool)
    mask[1, 20:] = False
    found = core(query, key, value, mask)
    torch.testing.assert_close(found, core.matrix(query, key, mask) @ value)


@pytest.mark.parametrize("layer", [0, 1])
def test_agrees_with_modernbert(layer):
    modernbert = pytest.importorskip("transformers.models.modernbert.modeling_modernbert")
    config = modernbert.ModernBertConfig(
        hidden_size=32,
        num_attention_heads=2,
        num_hidden_layers=3,
        local_attention=16,
        attention_bias=True,
        max_position_embeddings=128,
        vocab_size=8,
        pad_token_id=0,
        attn_implementation="eager",
    )
    theirs = modernbert.ModernBertAttention(config, layer_idx=layer).eval()
    ours = build("local_global", layer=layer, layers=3, dtype=torch.float32)
    with torch.no_grad():
        projections = (ours.query, ours.key, ours.value)
        theirs.Wqkv.weight.copy_(torch.cat([p.weight for p in projections]))
        theirs.Wqkv.bias.copy_(torch.cat([p.bias for p in projections]))
        theirs.Wo.load_state_dict(ours.out.state_dict())
    x = tokens(length=70, dtype=torch.float32)
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[1, 50:] = False
    kind = config.layer_types[layer]
    make = {
        "full_attention": modernbert.create_bidirectional_mask,
        "sliding_attention": modernbert.create_bidirectional_sliding_window_mask,
    }[kind]
    rotary = modernbert.ModernBertRotaryEmbedding(config)
    expected, _ = theirs(
        x,
        position_embeddings=rotary(x, torch.arange(70).unsqueeze(0), kind),
        attention_mask=make(config=config, inputs_embeds=x, attention_mask=mask),
    )
    torch.testing.assert_close(ours(x, mask)[mask], expected[mask], rtol=1e-5, atol=1e-5)


def test_local_layers_never_form_a_matrix():
    assert growth(build("local_global", dtype=torch.float32)) < 4.5


def test_bad_options_get_a_sentence():
    for options, said in (
        ({"window": 1}, "window"),
        ({"window": 7}, "window must be even"),
        ({"every": 0}, "every"),
        ({"local_theta": -1.0}, "local_theta"),
        ({"embed_dim": 6, "num_heads": 2}, "even head width"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            build("local_global", **options)
