"""gaussianity: closed forms, and what must not matter."""

import math

import pytest
import torch
from tests.instruments.test_public import check_arguments_are_documented

from lln.errors import InvalidInputError
from lln_lab.inspection.gaussianity import gaussianity


def test_gaussian_entries_have_no_shape():
    query, key = torch.randn(2, 1, 2, 8192, 32, dtype=torch.float64)
    found = gaussianity(query, 3 * key + 5)
    for name in ("query_skew", "query_kurtosis", "key_skew", "key_kurtosis"):
        # Standard errors are √(6/n) and √(24/n).
        assert getattr(found, name).abs().max() < 5 * math.sqrt(24 / (8192 * 32))
    for name in ("query_norms", "key_norms"):
        assert (getattr(found, name) - 1).abs().max() < 0.1


def test_closed_forms():
    # Signs: every fourth moment equals the squared second one, and every norm is the same.
    query = torch.tensor([1.0, -1.0]).repeat(16, 8)[None, None]
    # One entry in eight is 1, the others 0: a Bernoulli variable of p = 1/8 along the queries.
    p = 1 / 8
    key = torch.eye(8).repeat(4, 1)[None, None]
    found = gaussianity(query, query)
    assert found.query_kurtosis.item() == pytest.approx(-2)
    assert found.query_skew.item() == pytest.approx(0)
    assert found.query_norms.item() == pytest.approx(0)
    found = gaussianity(key, key)
    spread = math.sqrt(p * (1 - p))
    assert found.query_skew.item() == pytest.approx((1 - 2 * p) / spread)
    assert found.query_kurtosis.item() == pytest.approx((1 - 6 * p * (1 - p)) / spread**2)
    # Every feature of the keys has the same mean, so that taking it out changes no shape.
    assert found.key_skew.item() == pytest.approx((1 - 2 * p) / spread)


def test_norms_that_vary():
    query = torch.randn(1, 1, 4096, 64, dtype=torch.float64)
    sizes = torch.where(torch.arange(4096) % 2 == 0, 1.0, 3.0)[:, None]
    found = gaussianity(query * sizes, query)
    # |q|² is 64·1 or 64·9 to its own relative variance 2/64: (mean square of 1, 9)/25 − 1.
    expected = ((1 + 81) / 2 * (1 + 2 / 64) / 25 - 1) * 32
    assert found.query_norms.item() == pytest.approx(expected, rel=0.02)


def test_the_mean_of_keys_and_the_scale_do_not_matter():
    query, key = torch.randn(2, 1, 2, 64, 8, dtype=torch.float64)
    plain = gaussianity(query, key)
    moved = gaussianity(5 * query, 2 * key + torch.randn(8, dtype=torch.float64))
    for one, other in zip(plain, moved, strict=True):
        torch.testing.assert_close(one, other)


def test_padding_packing_and_nothing_to_measure():
    query, key = torch.randn(2, 2, 2, 10, 8, dtype=torch.float64)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[1, 6:] = False
    spoilt = key.clone()
    spoilt[1, :, 6:] = torch.nan
    found = gaussianity(query, spoilt, key_mask=mask)
    alone = gaussianity(query[1:, :, :6], key[1:, :, :6])
    torch.testing.assert_close(found.key_kurtosis[1:], alone.key_kurtosis)
    bounds = torch.tensor([0, 4, 10])
    packed = gaussianity(query[0].transpose(0, 1), key[0].transpose(0, 1), cu_seqlens=bounds)
    torch.testing.assert_close(
        packed.query_skew[1:], gaussianity(query[:1, :, 4:], key[:1, :, 4:]).query_skew
    )
    constant = gaussianity(torch.ones(1, 1, 5, 4), torch.ones(1, 1, 5, 4))
    assert constant.query_kurtosis.isnan().all()
    with pytest.raises(InvalidInputError, match="same head width"):
        gaussianity(query, key[..., :4])


def test_arguments_are_documented():
    check_arguments_are_documented(gaussianity)
