"""Routing attention against clusters chosen and attended one by one."""

import math

import pytest
import torch
from lab.tests.peers.contract import HEADS, WIDTH, build, some_padding, tokens

from lln.errors import InvalidInputError
from lln_lab import peers

D = WIDTH // HEADS


def linear(part, x):
    return x @ part.weight.T + part.bias


def sphere(layer, x, head):
    """LN(W x) of one head, no affine."""
    u = linear(layer.query, x)[:, head * D : (head + 1) * D]
    centred = u - u.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def clusters(layer, u, centroids):
    """The members of every centroid: the ⌈n/k⌉ best."""
    best = [sorted(range(len(u)), key=lambda i: -float(u[i] @ c)) for c in centroids]
    return [order[: math.ceil(len(u) / layer.clusters)] for order in best]


def routed(layer, x, head, centroids):
    """One routing head on real tokens only."""
    u, out = sphere(layer, x, head), torch.zeros(len(x), D, dtype=x.dtype)
    value = linear(layer.value, x)[:, head * D : (head + 1) * D]
    groups = clusters(layer, u, centroids)
    for i in range(len(x)):
        homes = [group for group in groups if i in group]
        for group in homes:
            weights = (u[group] @ u[i] / math.sqrt(D)).softmax(0)
            out[i] += weights @ value[group] / len(homes)
    return out


def windowed(layer, x, head, place):
    """One local head on real tokens that stand at these places."""
    query = linear(layer.query, x)[:, head * D : (head + 1) * D]
    key = linear(layer.key, x)[:, head * D : (head + 1) * D]
    value = linear(layer.value, x)[:, head * D : (head + 1) * D]
    far = (place[:, None] - place).abs() > layer.window
    scores = (query @ key.T / math.sqrt(D)).masked_fill(far, -math.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("local_heads", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 5, 16, 27])
@torch.no_grad()
def test_agrees_with_a_loop_over_clusters(length, local_heads):
    layer = build("routing", clusters=3, window=4, local_heads=local_heads)
    x = tokens(length=length)
    mask = torch.ones(2, length, dtype=torch.bool)
    if length > 7:
        mask[1, [2, 3, length - 1]] = False
    found = layer(x, mask)
    for sample in range(2):
        real = x[sample][mask[sample]]
        place = torch.arange(length)[mask[sample]]
        parts = [windowed(layer, real, head, place) for head in range(local_heads)]
        parts += [
            routed(layer, real, head, layer.centroids[head - local_heads])
            for head in range(local_heads, HEADS)
        ]
        expected = linear(layer.out, torch.cat(parts, -1))
        torch.testing.assert_close(found[sample][mask[sample]], expected)


@torch.no_grad()
def test_the_comparison_covers_tokens_of_no_and_of_several_clusters():
    layer, x = build("routing", clusters=3, local_heads=0), tokens(length=27)
    u = sphere(layer, x[0], 0)
    chosen = [i for group in clusters(layer, u, layer.centroids[0]) for i in group]
    times = [chosen.count(i) for i in range(27)]
    assert 0 in times
    assert max(times) > 1


@torch.no_grad()
def test_a_token_of_no_cluster_gets_nothing_but_the_bias():
    layer, x = build("routing", clusters=3, local_heads=0), tokens(length=27)
    homeless = []
    for head in range(HEADS):
        groups = clusters(layer, sphere(layer, x[0], head), layer.centroids[head])
        homeless.append(set(range(27)) - {i for group in groups for i in group})
    lost = homeless[0] & homeless[1]
    assert lost
    for i in lost:
        torch.testing.assert_close(layer(x)[0, i], layer.out.bias)


def test_one_cluster_is_shared_softmax():
    layer, x = build("routing", clusters=1, local_heads=0), tokens(length=20)
    heads = torch.stack([sphere(layer, x.flatten(0, 1), h).view(2, 20, D) for h in range(HEADS)], 1)
    value = linear(layer.value, x).unflatten(-1, (HEADS, D)).transpose(1, 2)
    plain = torch.nn.functional.scaled_dot_product_attention(heads, heads, value)
    expected = linear(layer.out, plain.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected)


@torch.no_grad()
def test_centroids_follow_their_tokens_in_training_only():
    layer, x, mask = build("routing", clusters=3, decay=0.9), tokens(), some_padding()
    before = layer.centroids.clone()
    layer(x, mask)
    assert torch.equal(layer.centroids, before)
    layer.train()(x, mask)
    real = torch.cat([x[sample][mask[sample]] for sample in range(2)])
    u = sphere(layer, real, 1) / math.sqrt(D)
    nearest = (u @ before[0].T).argmax(-1)
    for c in range(3):
        moved = 0.9 * before[0, c] + 0.1 * u[nearest == c].mean(0)
        torch.testing.assert_close(layer.centroids[0, c], moved / moved.norm())


@torch.no_grad()
def test_a_centroid_without_tokens_stays():
    layer, x = build("routing", clusters=4, decay=0.5), tokens(length=2, batch=1)
    before = layer.centroids.clone()
    layer.train()(x)
    same = (layer.centroids == before).all(-1)[0]
    assert 2 <= int(same.sum()) < 4


def test_parameters_are_those_of_the_card():
    whole = WIDTH * WIDTH + WIDTH
    assert peers.parameter_count(build("routing", local_heads=0)) == 3 * whole
    assert peers.parameter_count(build("routing")) == 3 * whole + whole // 2
    assert build("routing").centroids.shape == (1, 4, D)
    assert build("routing", clusters=None, window=None).clusters == 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clusters": 0}, "clusters"),
        ({"window": 0}, "window"),
        ({"local_heads": 3}, "at most num_heads, 2"),
        ({"decay": 1.0}, "decay"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(InvalidInputError, match=said):
        build("routing", **options)


def test_a_checkpointed_call_moves_the_centroids_once_and_keeps_its_members():
    plain, checkpointed = (build("routing", decay=0.5).train() for _ in range(2))
    x, weights = tokens(length=96).requires_grad_(), torch.linspace(-1, 1, WIDTH)
    (plain(x) * weights).sum().backward()
    expected, x.grad = x.grad, None
    out = torch.utils.checkpoint.checkpoint(checkpointed, x, use_reentrant=False)
    (out * weights).sum().backward()
    torch.testing.assert_close(x.grad, expected)
    torch.testing.assert_close(checkpointed.centroids, plain.centroids)
