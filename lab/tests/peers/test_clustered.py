"""Improved clustered attention against K-means, means and rows written out one by one."""

import math

import pytest
import torch
from lab.tests.peers.contract import build

from lln import reference
from lln.errors import InvalidInputError


def hamming(left, right):
    return sum(a != b for a, b in zip(left, right, strict=True))


def cluster(query, planes, clusters, iterations):
    """K-means of one head's real queries under the Hamming distance, on lists of bits."""
    bits = [[bool(query[i] @ plane >= 0) for plane in planes] for i in range(len(query))]
    centroids = [bits[index * len(bits) // clusters] for index in range(clusters)]

    def assign():
        return [min(range(clusters), key=lambda c: (hamming(b, centroids[c]), c)) for b in bits]

    for _ in range(iterations):
        home = assign()
        for c in range(clusters):
            members = [b for b, group in zip(bits, home, strict=True) if group == c]
            if members:
                votes = (sum(member[bit] for member in members) for bit in range(len(planes)))
                centroids[c] = [2 * ones >= len(members) for ones in votes]
    return assign()


def loop(query, key, value, core):
    """One head on real tokens: every row of the attention matrix by itself."""
    scale = 1 / math.sqrt(query.shape[-1])
    home = cluster(query, core.planes, core.clusters, core.iterations)
    out = torch.empty_like(value)
    for i in range(len(query)):
        mates = [j for j in range(len(query)) if home[j] == home[i]]
        coarse = (key @ query[mates].mean(0) * scale).softmax(0)
        top = sorted(range(len(key)), key=lambda j: -float(coarse[j]))[: core.exact]
        row = coarse.clone()
        row[top] = coarse[top].sum() * (key[top] @ query[i] * scale).softmax(0)
        out[i] = row @ value
    return out


@pytest.mark.parametrize("clusters", [1, 3, 8])
@pytest.mark.parametrize("length", [1, 5, 20, 33])
def test_agrees_with_loops(length, clusters):
    core = build("clustered", clusters=clusters, exact=4, bits=9, iterations=3, tile=4).core
    query, key, value = torch.randn(3, 2, 2, length, 16, dtype=torch.float64)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, 1:-1:4] = False
    found, dense = core(query, key, value, mask), core.matrix(query, key, mask) @ value
    for sample in range(2):
        real = mask[sample]
        for head in range(2):
            one = (side[sample, head][real] for side in (query, key, value))
            expected = loop(*one, core)
            torch.testing.assert_close(found[sample, head][real], expected)
            torch.testing.assert_close(dense[sample, head][real], expected)


def test_clusters_of_the_comparison_have_ties_and_empty_ones():
    core = build("clustered", clusters=8, exact=4, bits=9, iterations=3).core
    query = torch.randn(1, 1, 20, 16, dtype=torch.float64)
    sizes = torch.bincount(core.groups(query, None).flatten(), minlength=8)
    assert sizes.max() > 2
    few = torch.bincount(core.groups(query[:, :, :5], None).flatten(), minlength=8)
    assert (few == 0).sum() >= 3


def test_empty_clusters_keep_their_centroid():
    """Few bits and many clusters: centroids coincide, lose their members and may win some back."""
    core = build("clustered", clusters=6, bits=4, iterations=3).core
    query = torch.randn(40, 2, 12, 16, dtype=torch.float64)
    found = core.groups(query, None)
    for sample in range(40):
        for head in range(2):
            expected = cluster(query[sample, head], core.planes, 6, 3)
            assert found[sample, head].tolist() == expected


def test_all_keys_exact_is_softmax():
    core = build("clustered", exact=64).core
    query, key, value = torch.randn(3, 2, 2, 20, 16, dtype=torch.float64)
    expected = reference.softmax_attention(query, key, value)
    torch.testing.assert_close(core(query, key, value), expected)


@pytest.mark.parametrize("tile", [1, 3, 32])
def test_tiles_change_nothing(tile):
    query, key, value = torch.randn(3, 2, 2, 37, 16, dtype=torch.float64)
    small, large = build("clustered").core, build("clustered", tile=tile).core
    torch.testing.assert_close(small(query, key, value), large(query, key, value))


def test_equal_queries_share_a_cluster():
    core = build("clustered", clusters=4).core
    kinds = torch.randn(1, 2, 4, 16, dtype=torch.float64)
    group = core.groups(kinds.repeat(1, 1, 10, 1), None)
    assert torch.equal(group, group[..., :4].repeat(1, 1, 10))
    assert len(group[0, 0].unique()) > 1


def test_gradients():
    core = build("clustered", embed_dim=4, clusters=2, exact=3, bits=5).core
    inputs = [side.requires_grad_() for side in torch.randn(3, 1, 2, 6, 2, dtype=torch.float64)]
    assert torch.autograd.gradcheck(core, inputs)


@pytest.mark.parametrize("option", ["clusters", "exact", "bits", "iterations", "tile"])
def test_bad_options(option):
    with pytest.raises(InvalidInputError, match=option):
        build("clustered", **{option: 0})
