"""The host encoder: one frame around every system."""

import pytest
import torch
from lab.tests.peers.contract import HEADS, MAX_LEN, SMALL, WIDTH
from torch import nn
from torch.nn import functional as F

from lln.errors import InvalidInputError
from lln_lab import peers
from lln_lab.peers import Encoder, Peer, compare_parameters, masked_mean

NAMES = peers.available()
SIZES = {"embed_dim": WIDTH, "num_heads": HEADS, "max_len": MAX_LEN}


def encoder(name="softmax", seed=0, **changes):
    torch.manual_seed(seed)
    # The place of a layer is the encoder's to tell.
    small = {k: v for k, v in SMALL.get(name, {}).items() if k not in ("layer", "layers")}
    return Encoder(name, **{"depth": 2, **SIZES, **small, **changes}).double().eval()


def vectors(length=40):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, length, WIDTH, generator=generator, dtype=torch.float64)


def padding(length=40):
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, length - 9 :] = False
    return mask


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_any_system_fits(name, norm):
    host, mask = encoder(name, norm=norm), padding()
    x = vectors().requires_grad_()
    out = host(x, mask)
    assert out.shape == x.shape
    assert out.isfinite().all()
    assert (out[~mask] == 0).all()
    out.square().sum().backward()
    assert all(weight.grad is not None for weight in host.parameters())
    assert (x.grad[~mask] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_padded_garbage_reaches_neither_outputs_nor_gradients(name):
    found = []
    for garbage in (0.0, float("nan")):
        host, mask = encoder(name), padding()
        host(vectors().masked_fill(~mask.unsqueeze(-1), garbage), mask).square().sum().backward()
        found.append([weight.grad for weight in host.parameters()])
    for clean, dirty in zip(*found, strict=True):
        torch.testing.assert_close(dirty, clean, rtol=0, atol=1e-12)


def layer_norm(x, norm):
    return F.layer_norm(x, (WIDTH,), norm.weight, norm.bias)


def feed_forward(x, layer):
    up, _, down = layer.feed_forward
    return F.gelu(x @ up.weight.T + up.bias) @ down.weight.T + down.bias


def test_pre_norm_as_the_formula():
    host, x = encoder(depth=1), vectors()
    (layer,) = host.layers
    for norm in (layer.attention_norm, layer.feed_forward_norm, host.norm):
        nn.init.normal_(norm.weight)
    hidden = x + layer.attention(layer_norm(x, layer.attention_norm))
    hidden = hidden + feed_forward(layer_norm(hidden, layer.feed_forward_norm), layer)
    torch.testing.assert_close(host(x), layer_norm(hidden, host.norm))


def test_post_norm_as_the_formula():
    host, x = encoder(depth=1, norm="post"), vectors()
    (layer,) = host.layers
    hidden = layer_norm(x + layer.attention(x), layer.attention_norm)
    hidden = layer_norm(hidden + feed_forward(hidden, layer), layer.feed_forward_norm)
    torch.testing.assert_close(host(x), hidden)


class Halver(Peer):
    """A block: half of what it gets, with its place written on it."""

    card = peers.card("softmax")

    def mix(self, x, key_mask):
        return 0.5 * x


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_blocks_replace_the_whole_layer_as_often_as_their_card_says(monkeypatch, norm):
    from dataclasses import replace

    from lln_lab.peers import encoder as module

    card = replace(Halver.card, kind="block", layers_per_block=2)
    monkeypatch.setattr(module, "card", lambda name: card)
    monkeypatch.setattr(module, "build", lambda name, **host: Halver(peers.Host(**host)))
    host = Encoder("halver", depth=3, **SIZES, norm=norm).double()
    assert [(one.host.layer, one.host.layers) for one in host.layers] == [(i, 6) for i in range(6)]
    x = vectors()
    torch.testing.assert_close(host(x), F.layer_norm(x / 2**6, (WIDTH,)))
    assert host.parameter_count == 2 * WIDTH


def test_layers_know_their_place():
    places = [layer.attention.host for layer in encoder(depth=3).layers]
    assert [(host.layer, host.layers) for host in places] == [(0, 3), (1, 3), (2, 3)]


def test_options_reach_the_system():
    host = encoder("elu", is_causal=True, diagonal=8)
    assert all(layer.attention.diagonal == 8 for layer in host.layers)
    x = vectors()
    changed = x.clone()
    changed[:, 20:] += 1
    torch.testing.assert_close(host(changed)[:, :20], host(x)[:, :20], rtol=0, atol=1e-12)


def test_words_and_positions_are_embedded():
    host = encoder(vocabulary=50)
    words = torch.randint(50, (2, 40))
    vectors = host.word.weight[words] + host.position.weight[:40]
    plain = encoder()
    plain.load_state_dict(
        {k: v for k, v in host.state_dict().items() if not k.startswith(("word", "position"))}
    )
    torch.testing.assert_close(host(words), plain(vectors))
    assert host.parameter_count - plain.parameter_count == (50 + MAX_LEN) * WIDTH


def test_masked_mean():
    x, mask = vectors(), padding()
    expected = torch.stack((x[0].mean(0), x[1, :31].mean(0)))
    torch.testing.assert_close(masked_mean(x, mask), expected)
    torch.testing.assert_close(masked_mean(x), x.mean(1))
    dirty = x.masked_fill(~mask.unsqueeze(-1), float("nan"))
    torch.testing.assert_close(masked_mean(dirty, mask), expected)
    mask[1] = False
    assert (masked_mean(x, mask)[1] == 0).all()


def test_parameters_beside_softmax_are_those_of_the_encoders():
    found = compare_parameters(depth=2, **SIZES, feed_forward=48)
    assert tuple(found) == NAMES
    softmax = Encoder("softmax", depth=2, **SIZES, feed_forward=48).parameter_count
    layer = 4 * (WIDTH**2 + WIDTH) + 2 * WIDTH * 48 + 48 + WIDTH + 4 * WIDTH
    assert softmax == 2 * layer + 2 * WIDTH
    for name, parameters in found.items():
        total = Encoder(name, depth=2, **SIZES, feed_forward=48).parameter_count
        assert parameters.total == total
        assert parameters.relative == total / softmax
    assert list(compare_parameters(["elu"], depth=1, **SIZES)) == ["elu"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm": "sandwich"}, "norm must be .pre. or .post."),
        ({"depth": 0}, "depth must be a positive"),
        ({"feed_forward": -1}, "feed_forward must be a positive"),
        ({"vocabulary": 2.5}, "vocabulary must be a positive"),
        ({"colour": "red"}, "no option 'colour'"),
    ],
)
def test_bad_options_get_a_sentence(changes, said):
    with pytest.raises(InvalidInputError, match=said):
        encoder(**changes)


def test_bad_words_get_a_sentence():
    host = encoder(vocabulary=50)
    words = torch.zeros(2, 40, dtype=torch.int64)
    for wrong, said in (
        (vectors(), "float64"),
        (words.bool(), "bool"),
        (words.to(torch.int16), "int16"),
        (words[0], r"int64 \[40\]"),
        (words.tolist(), "list"),
    ):
        with pytest.raises(InvalidInputError, match=f"{said}.*vocabulary=None"):
            host(wrong)
    assert torch.equal(host(words.int()), host(words))
    with pytest.raises(InvalidInputError, match="larger max_len"):
        host(torch.zeros(1, MAX_LEN + 1, dtype=torch.long))


def test_every_system_has_one_family():
    for name in NAMES:
        assert sum(name in names for names in peers.FAMILIES.values()) == 1, name
        assert name in peers.FAMILIES[peers.family_of(name)]
    with pytest.raises(InvalidInputError, match="no family"):
        peers.family_of("magic")


def test_a_wrong_mask_gets_a_sentence():
    host = encoder("elu")
    for wrong, said in (
        (torch.ones(2, 40), "bool"),
        (torch.ones(2, 7, dtype=torch.bool), "shape"),
        ([[True] * 40] * 2, "bool"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            host(vectors(), wrong)


@pytest.mark.parametrize("wrong", [-1, 50, 2**40])
def test_words_outside_the_vocabulary_get_a_sentence(wrong):
    host = encoder(vocabulary=50)
    words = torch.randint(50, (2, 40))
    words[1, 7] = wrong
    # What stands under the padding is embedded too.
    for mask in (None, padding(), torch.zeros(2, 40, dtype=torch.bool)):
        with pytest.raises(InvalidInputError, match=rf"0 … 49,.* got {wrong}; .*larger vocabulary"):
            host(words, mask)
    words[1, 7] = 49
    assert host(words).isfinite().all()


def test_words_are_not_looked_at_before_use():
    # A meta tensor has no values: a check of them, which a GPU would have to wait for, fails.
    host = encoder(vocabulary=50).to("meta")
    assert host(torch.empty(2, 40, dtype=torch.int64, device="meta")).shape == (2, 40, WIDTH)
