"""Mass matching: the offset in closed form against the masses of Gaussian inputs."""

import math

import pytest
import torch

from lln import lln_keys_attention, match_moments
from lln.matching.mass import keys_temperatures, mass_offset
from lln.matching.moments import head_moments
from lln.testing import make_qkv

TOKENS = 1024


def mass_gap(query, key, alpha, beta, scale=None):
    """Mean over rows of softmax's log-normaliser minus LLN's, for every head: ``[B, H]``."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    softmax = (factor * query @ key.mT).logsumexp(-1)
    log_mass = (beta * key).logsumexp(-2, keepdim=True)
    linear = (alpha * query + log_mass).logsumexp(-1)
    return (softmax - linear).mean(-1)


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("size", [0.7, 1.0, 1.5])
def test_the_offset_matches_the_masses_of_gaussian_inputs(size, width):
    query, key, _ = make_qkv(1, 4, TOKENS, width, scale=size, dtype=torch.float64)
    moments = head_moments(query, key, None)
    alpha, beta = keys_temperatures(moments, width, "rest")
    found = mass_offset(moments, alpha, beta, width)
    assert found.shape == (1, 4, 1, 1)
    gap = mass_gap(query, key, alpha, beta)
    assert (found[..., 0, 0] - gap).abs().max() < 0.1
    # It is no small number that any offset would match.
    assert gap.abs().min() > 1


@pytest.mark.parametrize("scale", [0.05, -0.2, 0.25])
def test_the_offset_knows_the_scale(scale):
    query, key, _ = make_qkv(1, 4, TOKENS, 32, dtype=torch.float64)
    moments = head_moments(query, key, None)
    alpha, beta = keys_temperatures(moments, 32, "rest")
    found = mass_offset(moments, alpha, beta, 32, scale)
    gap = mass_gap(query, key, alpha, beta, scale)
    assert (found[..., 0, 0] - gap).abs().max() < 0.1


def test_rest_is_half_of_entropy():
    query, key, _ = make_qkv(2, 3, 100, 16)
    moments = head_moments(query, key, None)
    for rest, whole in zip(
        keys_temperatures(moments, 16, "rest"),
        match_moments(query, key, criterion="entropy"),
        strict=True,
    ):
        torch.testing.assert_close(rest, whole / 2)


@pytest.mark.parametrize("criterion", ["variance", "entropy"])
def test_other_criteria_are_those_of_match_moments(criterion):
    query, key, _ = make_qkv(2, 3, 100, 16)
    found = keys_temperatures(head_moments(query, key, None), 16, criterion)
    wanted = match_moments(query, key, criterion=criterion)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(
    "shape", [None, (), (1,), (4, 1, 1), (2, 1, 1), (2, 1, 1, 1), (2, 2, 1, 1), (2, 4, 1, 1)]
)
def test_beta_per_sample_head_or_key_head(shape):
    """Two samples, four query heads, two key heads; [2, 1, 1] is one value per key head."""
    query, key, _ = make_qkv(2, 4, 50, 8, key_heads=2, dtype=torch.float64)
    moments = head_moments(query, key, None)
    beta = 1.3 if shape is None else torch.rand(shape, dtype=torch.float64) + 0.5
    found = mass_offset(moments, 0.7, beta, 8)
    full = torch.as_tensor(beta)
    full = full.reshape((1,) * (4 - full.dim()) + tuple(full.shape))
    for sample in range(2):
        for head in range(4):
            own = full[min(sample, full.shape[0] - 1), head * full.shape[1] // 4].item()
            query_variance = moments.query_variance[sample, head].item()
            key_variance = moments.key_variance[sample, head].item()
            spread = (0.7**2 * query_variance + own**2 * key_variance) / 2
            wanted = query_variance * key_variance / 2 - math.log(8) - spread
            assert found[sample, head].item() == pytest.approx(wanted, abs=1e-6)


def test_the_offset_carries_no_gradient():
    query, key, value = make_qkv(1, 2, 20, 8, requires_grad=True)
    alpha, beta = (torch.tensor(number, requires_grad=True) for number in (0.7, 0.9))
    moments = head_moments(query, key, None)
    offset = mass_offset(moments, alpha, beta, 8)
    assert not offset.requires_grad
    options = {"alpha": alpha, "beta": beta, "block_size": 8, "keys": 3}
    leaves = (query, key, value, alpha, beta)
    found, wanted = (
        torch.autograd.grad(lln_keys_attention(query, key, value, **one).square().sum(), leaves)
        for one in (options, {**options, "offset": offset})
    )
    assert all(map(torch.equal, found, wanted))


def test_masked_tokens_do_not_count():
    query, key, value = make_qkv(1, 2, 30, 8)
    mask = torch.arange(30)[None] < 22
    options = {"block_size": 8, "keys": 3}
    found = lln_keys_attention(query, key, value, key_mask=mask, **options)[:, :, :22]
    short = [side[:, :, :22] for side in (query, key, value)]
    torch.testing.assert_close(found, lln_keys_attention(*short, **options))


@pytest.mark.parametrize("constant", ["query", "key", "both"])
def test_constant_inputs_have_a_finite_offset(constant):
    query, key, value = make_qkv(1, 2, 30, 8)
    if constant != "key":
        query = torch.zeros_like(query)
    if constant != "query":
        key = torch.ones_like(key)
    assert lln_keys_attention(query, key, value, block_size=8, keys=3).isfinite().all()
