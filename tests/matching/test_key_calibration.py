"""Calibration of attention with exact keys: temperatures at half, and the mass of the rest."""

import warnings

import pytest
import torch

import lln
from lln import calibrate, calibrate_keys, reference
from lln.errors import CalibrationWarning, InvalidInputError
from lln.matching import key_calibration
from lln.matching.mass import mass_offset
from lln.matching.moments import head_moments

N, D = 320, 32


def student(generator, *shape):
    """Student-t with five degrees of freedom."""
    squares = torch.randn(5, *shape, generator=generator).square().mean(0)
    return torch.randn(*shape, generator=generator) / squares.sqrt()


def gaussian(batch=2, heads=2, tokens=N, width=D, scale=1.0, key_heads=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, tokens, width, generator=generator)
    key = torch.randn(batch, key_heads or heads, tokens, width, generator=generator)
    return scale * query, scale * key


def error(query, key, value, **options):
    soft = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    return (lln.lln_keys_attention(query, key, value, **options) - soft).norm() / soft.norm()


def needed_offsets(query, key, alpha, beta, indices, block_size, mask=None, causal=False):
    """What every row would need, from N×N matrices in float64: ``[B, H, T]``, NaN without rest."""
    tokens = query.shape[2]
    keep = torch.ones(query.shape[0], 1, tokens, tokens, dtype=torch.bool)
    if mask is not None:
        keep = keep & mask[:, None, None, :]
    group = 1 if causal else block_size
    exact = reference.exact_pairs(indices, tokens, block_size, group, keep=keep, is_causal=causal)
    rest = keep
    if causal:
        block = torch.arange(tokens) // block_size
        rest = keep & (block[:, None] > block)
    far = rest & ~exact
    scores = query.double() @ key.double().mT / query.shape[-1] ** 0.5
    true = torch.where(far, scores, -torch.inf).logsumexp(-1)
    centre = rest.double() @ key.double() / rest.sum(-1, keepdim=True).clamp_min(1)
    asked = query.double() - beta.double() / alpha.double() * centre
    linear = reference.log_lln_kernel(asked, key, alpha, beta)
    linear = linear + (query * centre).sum(-1, keepdim=True) / query.shape[-1] ** 0.5
    slots = torch.where(rest, linear, -torch.inf).logsumexp(-1)
    share = far.sum(-1) / rest.sum(-1).clamp_min(1)
    found = torch.where(far.any(-1), true - slots - share.log(), torch.nan)
    return found if mask is None else torch.where(mask[:, None], found, torch.nan)


@pytest.mark.parametrize("scale", [0.7, 1.0])
@pytest.mark.parametrize("width", [16, 64])
def test_gaussian_inputs_agree_with_the_closed_form(scale, width):
    query, key = gaussian(width=width, scale=scale)
    alpha, beta, offset = calibrate_keys(query, key, keys=32)
    expected = mass_offset(head_moments(query, key), alpha, beta, width)
    assert offset.shape == (2, 2, 1, 1)
    assert (offset - expected).abs().max() < 0.2


def test_temperatures_are_half_of_those_of_plain_calibration():
    query, key = gaussian()
    found = calibrate_keys(query, key + 1, scope="batch")
    centred = key - key.mean(2, keepdim=True)
    for half, full in zip(found[:2], calibrate(query, centred, scope="batch"), strict=True):
        torch.testing.assert_close(2 * half, full)
        assert half.shape == (1, 2, 1, 1)


@pytest.mark.parametrize("seed", [0, 1])
def test_heavy_tails_in_few_directions_need_the_measured_offset(seed):
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(2, 4, D, generator=generator) / 2
    query, key = (student(generator, 2, 2, N, 4) @ directions for _ in range(2))
    value = torch.randn(2, 2, N, D, generator=generator) + 1
    alpha, beta, offset = calibrate_keys(query, key, keys=32)
    options = {"alpha": alpha, "beta": beta, "keys": 32}
    measured = error(query, key, value, offset=offset, **options)
    assert measured < 0.96 * error(query, key, value, **options)
    assert measured < 0.96 * error(query, key, value, keys=32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_offset_is_the_median_of_what_rows_need(causal, masked):
    query, key = gaussian(tokens=50, key_heads=1)
    mask = None
    if masked:
        mask = torch.ones(2, 50, dtype=torch.bool)
        mask[0, 37:] = False
    options = {"keys": 6, "block_size": 16, "key_mask": mask, "is_causal": causal}
    options["group_size"] = 1 if causal else None
    alpha, beta, offset = calibrate_keys(query, key, rows=50, scope="batch", **options)
    indices = lln.choose_keys(query, key, enable_gqa=True, **options)
    sides = (query, key.expand(-1, 2, -1, -1), alpha, beta, indices)
    needed = needed_offsets(*sides, 16, mask, causal)
    if masked:
        # Each valid row counts once, however many rows are asked for.
        needed[0][:, 37:] = torch.nan
    expected = needed.transpose(0, 1).flatten(1).nanmedian(-1).values
    torch.testing.assert_close(offset.flatten(), expected.float(), rtol=1e-4, atol=1e-4)


def test_rows_are_measured_a_few_at_a_time(monkeypatch):
    query, key = gaussian(tokens=130)
    whole = calibrate_keys(query, key, keys=8, block_size=32)
    monkeypatch.setattr(key_calibration, "PAIR_BUDGET", 2 * 130 * 7)
    for found, expected in zip(
        calibrate_keys(query, key, keys=8, block_size=32), whole, strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_padding_changes_nothing():
    query, key = gaussian(batch=1, tokens=100)
    expected = calibrate_keys(query, key, keys=8, block_size=32, rows=100)
    mask = torch.ones(1, 140, dtype=torch.bool)
    mask[:, 100:] = False
    longer = [torch.nn.functional.pad(side, (0, 0, 0, 40), value=1e4) for side in (query, key)]
    found = calibrate_keys(*longer, keys=8, block_size=32, rows=100, key_mask=mask)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_where_every_key_is_exact_the_closed_form_stands_in():
    query, key = gaussian(tokens=100)
    with pytest.warns(CalibrationWarning, match="next to nothing is left for the slots"):
        alpha, beta, offset = calibrate_keys(query, key, keys=100)
    closed = mass_offset(head_moments(query, key), alpha, beta, D)
    torch.testing.assert_close(offset, closed)


def test_only_sequences_that_block_and_keys_cover_are_doubted():
    query, key = gaussian(tokens=81)
    mask = torch.arange(81).expand(query.shape[0], -1) < 80
    options = {"keys": 64, "block_size": 16}
    said = "has 80 tokens, and a row sees 16 in its block and 64 exact keys.* more than 80 tokens"
    with pytest.warns(CalibrationWarning, match=said):
        calibrate_keys(query, key, key_mask=mask, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrate_keys(query, key, **options)


def test_what_does_not_fit_gets_a_sentence():
    query, key = gaussian(tokens=100)
    with pytest.raises(InvalidInputError, match="select must be one of"):
        calibrate_keys(query, key, select="best")
    with pytest.raises(InvalidInputError, match="keys"):
        calibrate_keys(query, key, keys=-1)
    with pytest.raises(InvalidInputError, match="T = 100 and S = 50"):
        calibrate_keys(query, key[:, :, :50])
    with pytest.raises(InvalidInputError, match="two tokens"):
        calibrate_keys(query[:, :, :1], key[:, :, :1])
    with pytest.warns(CalibrationWarning, match="rest on 20 tokens"):
        calibrate_keys(query[:, :, :20], key[:, :, :20], block_size=8, keys=2)
