"""Calibration of attention with exact keys: the rest with the smallest error of the output."""

import warnings

import pytest
import torch

import lln
from lln import calibrate_keys, match_moments
from lln.errors import CalibrationWarning, InvalidInputError
from lln.matching import rest_search
from lln.matching.mass import mass_offset
from lln.matching.moments import head_moments

N, D = 320, 32


def student(generator, *shape):
    """Student-t with five degrees of freedom."""
    squares = torch.randn(5, *shape, generator=generator).square().mean(0)
    return torch.randn(*shape, generator=generator) / squares.sqrt()


def gaussian(batch=2, heads=2, tokens=N, width=D, scale=1.0, key_heads=None, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads, key_heads or heads, key_heads or heads)
    query, key, value = (
        torch.randn(batch, count, tokens, width, generator=generator, **options) for count in sizes
    )
    return scale * query, scale * key, value


def error(*sides, **options):
    """How far exact keys are from softmax attention, of every head: ``[H]``."""
    return per_sample(*sides, **options).sum(0).sqrt()


def per_sample(query, key, value, key_mask=None, **options):
    """The squared error of every sample and head, ``[B, H]``."""
    tokens = query.shape[2]
    keep = torch.ones(tokens, tokens, dtype=torch.bool)
    if key_mask is not None:
        keep = keep & key_mask[:, None, None]
    shared = query.shape[1] // key.shape[1]
    key, value = (side.repeat_interleave(shared, 1) for side in (key, value))
    soft = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=keep)
    options |= {"key_mask": key_mask}
    apart = lln.lln_keys_attention(query, key, value, **options) - soft
    if key_mask is not None:
        apart = torch.where(key_mask[:, None, :, None], apart, 0.0)
    return apart.square().sum((2, 3))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [0.6, 1.5])
def test_nothing_that_could_be_chosen_has_a_smaller_error(scale, masked):
    query, key, value = gaussian(tokens=80, key_heads=1, scale=scale, dtype=torch.float64)
    # A sink: rows rest on the first key, which is unlike all others.
    key[:, :, 0] += 3.0
    mask = None
    if masked:
        mask = torch.ones(2, 80, dtype=torch.bool)
        mask[0, 57:] = False
        mask[1, :9] = False
    options = {"keys": 6, "block_size": 16, "key_mask": mask}
    sides = (query, key, value)
    alpha, beta, offset = calibrate_keys(*sides, rows=80, scope="batch", **options)
    found = error(*sides, alpha=alpha, beta=beta, offset=offset, **options)
    factors = torch.tensor(rest_search.FACTORS).double()
    start = rest_search.entropy_temperatures(query, key, mask, pooled=True)
    offsets = torch.tensor([rest_search.NO_REST, *torch.linspace(-12, 4, 17).tolist()])
    # Every pair of a factor and an offset is a batch of its own, all in one call.
    pairs = torch.cartesian_prod(factors, offsets.double()).repeat_interleave(2, 0)
    factor, others = pairs.T[..., None, None, None]
    many = len(pairs) // 2
    if masked:
        options["key_mask"] = mask.repeat(many, 1)
    sides = (side.repeat(many, 1, 1, 1) for side in sides)
    given = {"alpha": factor * start[0], "beta": factor * start[1], "offset": others}
    every = per_sample(*sides, **given, **options).unflatten(0, (many, 2)).sum(1)
    assert (found.square() <= 1.0001 * every).all()
    assert (alpha / start[0] - factors).abs().min(-1).values.max() < 1e-6
    assert (alpha / start[0] - beta / start[1]).abs().max() < 1e-6


def test_slots_that_only_disturb_are_taken_away_unless_they_will_be_trained():
    rows = rest_search.SampledRows(*torch.ones(3, 1, 1, 5))
    # The slots lead away from softmax attention, however little weight they get.
    wrong = rows._replace(product=-rows.product)
    for one, is_none in ((rows, False), (wrong, True)):
        _, offset, has_rest = rest_search._least_error(one, may_be_none=True)
        assert bool(offset < rest_search.NO_REST / 2) == is_none
        assert has_rest.all()
    _, offset, _ = rest_search._least_error(wrong, may_be_none=False)
    assert offset.abs() < 100


def test_temperatures_start_from_matched_entropy_whatever_the_scale():
    query, key, _ = gaussian()
    start = rest_search.entropy_temperatures(query, key, None, pooled=False)
    for found, expected in zip(start, match_moments(query, key, criterion="entropy"), strict=True):
        torch.testing.assert_close(found, expected)
    scaled = rest_search.entropy_temperatures(query / 3, key, None, pooled=False, scale=3 / D**0.5)
    torch.testing.assert_close(scaled[0], 3 * start[0])
    torch.testing.assert_close(scaled[1], start[1])


@pytest.mark.parametrize("seed", [0, 1])
def test_heavy_tails_in_few_directions_need_the_measured_offset(seed):
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(2, 4, D, generator=generator) / 2
    query, key = (student(generator, 2, 2, N, 4) @ directions for _ in range(2))
    value = torch.randn(2, 2, N, D, generator=generator) + 1
    alpha, beta, offset = calibrate_keys(query, key, value, keys=32)
    options = {"alpha": alpha, "beta": beta, "keys": 32}
    measured = error(query, key, value, offset=offset, **options)
    assert (measured < 0.96 * error(query, key, value, **options)).all()
    assert (measured < 0.96 * error(query, key, value, keys=32)).all()


def test_rows_are_measured_a_few_at_a_time(monkeypatch):
    query, key, value = gaussian(tokens=130)
    whole = calibrate_keys(query, key, value, keys=8, block_size=32)
    monkeypatch.setattr(rest_search, "PAIR_BUDGET", 2 * 130 * 7)
    for found, expected in zip(
        calibrate_keys(query, key, value, keys=8, block_size=32), whole, strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_padding_changes_nothing():
    query, key, value = gaussian(batch=1, tokens=100)
    expected = calibrate_keys(query, key, value, keys=8, block_size=32, rows=100)
    mask = torch.ones(1, 140, dtype=torch.bool)
    mask[:, 100:] = False
    longer = [
        torch.nn.functional.pad(side, (0, 0, 0, 40), value=1e4) for side in (query, key, value)
    ]
    found = calibrate_keys(*longer, keys=8, block_size=32, rows=100, key_mask=mask)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_where_every_key_is_exact_the_closed_form_stands_in():
    query, key, value = gaussian(tokens=100)
    with pytest.warns(CalibrationWarning, match="next to nothing is left for the slots"):
        alpha, beta, offset = calibrate_keys(query, key, value, keys=100)
    closed = mass_offset(head_moments(query, key), alpha, beta, D)
    torch.testing.assert_close(offset, closed)


def test_only_sequences_that_block_and_keys_cover_are_doubted():
    query, key, value = gaussian(tokens=81)
    mask = torch.arange(81).expand(query.shape[0], -1) < 80
    options = {"keys": 64, "block_size": 16}
    said = "has 80 tokens, and a row sees 16 in its block and 64 exact keys.* more than 80 tokens"
    with pytest.warns(CalibrationWarning, match=said):
        calibrate_keys(query, key, value, key_mask=mask, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrate_keys(query, key, value, **options)


def test_what_does_not_fit_gets_a_sentence():
    query, key, value = gaussian(tokens=100)
    with pytest.raises(InvalidInputError, match="keys"):
        calibrate_keys(query, key, value, keys=-1)
    with pytest.raises(InvalidInputError, match="T = 100 and S = 50"):
        calibrate_keys(query, key[:, :, :50], value[:, :, :50])
    with pytest.raises(InvalidInputError, match="two tokens"):
        calibrate_keys(query[:, :, :1], key[:, :, :1], value[:, :, :1])
    with pytest.warns(CalibrationWarning, match="rest on 20 tokens"):
        calibrate_keys(query[:, :, :20], key[:, :, :20], value[:, :, :20], block_size=8, keys=2)
