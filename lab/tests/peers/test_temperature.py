"""Which systems can follow a temperature: the fact behind the paper's Figure 2."""

import pytest
import torch
from lab.tests.peers.contract import build

# Kernels with κ(a q, b k) = a^r b^s κ(q, k).
HOMOGENEOUS = [
    ("relu", {}),
    ("relu", {"dense": True}),
    ("quadratic", {}),
    ("quadratic", {"exact": True}),
    ("cosformer", {}),
]
FOLLOWING = ["softmax", "lln", "hedgehog", "nalaformer", "performer", "elu"]


def heads(length=64):
    query, key = torch.randn(2, 2, 2, length, 16, dtype=torch.float64)
    return query, key


def entropy(matrix):
    """Bits, the mean over the rows."""
    return -(matrix * matrix.clamp(min=1e-300).log2()).sum(-1).mean().item()


@pytest.mark.parametrize(("name", "options"), HOMOGENEOUS)
@pytest.mark.parametrize(
    ("a", "b"), [(0.1, 1.0), (30.0, 1.0), (1.0, 7.0), (5.0, 0.2), (1e-3, 1.0), (1e-3, 1e-3)]
)
def test_a_homogeneous_kernel_does_not_see_the_scale(name, options, a, b):
    core = build(name, **options).core
    query, key = heads()
    expected = core.matrix(query, key)
    torch.testing.assert_close(core.matrix(a * query, b * key), expected)
    torch.testing.assert_close(core(a * query, b * key, key), expected @ key)


@pytest.mark.parametrize(("name", "options"), HOMOGENEOUS)
@pytest.mark.parametrize("scale", [1e-5, 1e-3, 1e3])
def test_nor_does_it_in_float32_and_its_gradients_stay_finite(name, options, scale):
    core = build(name, dtype=torch.float32, **options).core
    query, key = (side.float() for side in heads())
    # A row that meets no key: its denominator is the floor.
    query[0, 0, 3] = 0.0
    small, value = (scale * query).requires_grad_(), 1e3 * key
    found = core(small, scale * key, value)
    torch.testing.assert_close(found, core(query, key, value), rtol=1e-4, atol=1e-2)
    assert (found[0, 0, 3] == 0).all()
    (1e3 * found).sum().backward()
    assert small.grad.isfinite().all()


@pytest.mark.parametrize("b", [1e-3, 0.1, 20.0])
def test_nalaformer_does_not_see_the_length_of_the_keys(b):
    core = build("nalaformer").core
    query, key = heads()
    torch.testing.assert_close(core.matrix(query, b * key), core.matrix(query, key))


@pytest.mark.parametrize("name", FOLLOWING)
def test_others_do(name):
    core = build(name).core
    query, key = heads()
    assert (core.matrix(4 * query, key) - core.matrix(query, key)).abs().max() > 1e-3


@pytest.mark.parametrize(("name", "options"), HOMOGENEOUS)
def test_the_entropy_of_a_homogeneous_kernel_is_flat_in_temperature(name, options):
    core = build(name, **options).core
    query, key = heads()
    found = [entropy(core.matrix(query / tau, key)) for tau in (4, 2, 1, 0.5, 0.25)]
    assert max(found) - min(found) < 1e-6


def entropies(name, **options):
    core = build(name, **options).core
    query, key = heads()
    return [entropy(core.matrix(query / tau, key)) for tau in (4, 2, 1, 0.5, 0.25)]


@pytest.mark.parametrize(
    ("name", "bits"), [("softmax", 3.0), ("lln", 3.0), ("hedgehog", 0.1), ("nalaformer", 0.1)]
)
def test_the_entropy_of_these_falls_with_the_temperature(name, bits):
    # Hedgehog's maps are the identity until trained, and NaLaFormer's power is bounded.
    found = entropies(name)
    assert found == sorted(found, reverse=True)
    assert found[0] - found[-1] > bits


def test_lln_follows_softmax_and_not_only_in_direction():
    ours, theirs = entropies("lln", matching="entropy"), entropies("softmax")
    assert ours == pytest.approx(theirs, abs=0.35)


def test_performer_follows_until_its_offset_takes_over():
    found = entropies("performer", features=256)
    assert found[0] > found[2]
    assert found[-1] > found[2]


def test_lln_like_softmax_sees_only_the_product_of_the_scales():
    query, key = heads()
    for name in ("softmax", "lln"):
        core = build(name).core
        torch.testing.assert_close(core.matrix(3 * query, key / 3), core.matrix(query, key))


def test_a_longer_query_sharpens_its_own_row_in_lln():
    # α belongs to the head, so the length of one token still counts.
    core = build("lln").core
    query, key = heads()
    before = core.matrix(query, key)[:, :, 5]
    query[:, :, 5] *= 3
    after = core.matrix(query, key)[:, :, 5]
    assert entropy(after) < entropy(before) - 0.1
