"""Random shapes, options and spreads against dense float64; layouts, modes and defaults."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.instruments.dense import (
    KINDS,
    dense_entropy,
    dense_gap,
    dense_matrix,
    dense_variance,
    only_valid,
)

from lln import instruments
from lln.instruments import of_matrix
from lln.testing import LAYOUTS, make_qkv


@settings(max_examples=60)
@given(st.data())
def test_any_attention(data):
    kind = data.draw(st.sampled_from(KINDS))
    key_heads, group = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    tokens, width = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 20))
    spread = data.draw(st.floats(0, 3))
    options = {
        "kind": kind,
        "is_causal": kind != "lln_keys" and data.draw(st.booleans()),
        "block_size": data.draw(st.integers(1, 70)),
        "alpha": data.draw(st.floats(0.05, 4)),
        "beta": data.draw(st.floats(0.05, 4)),
        "mix": data.draw(st.floats(0.01, 0.99)),
        "scale": data.draw(st.sampled_from([None, -0.3, 1.0])),
        "offset": data.draw(st.floats(-8, 2)),
        "keys": data.draw(st.integers(0, 12)),
        "group_size": data.draw(st.sampled_from([None, 1])),
        "window": data.draw(st.integers(0, 70)),
    }
    seed = data.draw(st.integers(0, 2**31))
    query, key, _ = make_qkv(
        2, key_heads * group, tokens, width, key_heads=key_heads, scale=spread, seed=seed
    )
    noise = torch.rand(2, tokens, generator=torch.Generator().manual_seed(seed))
    keep = noise < data.draw(st.sampled_from([0.5, 1.0]))
    found = [
        getattr(instruments, name)(query, key, key_mask=keep, **options)
        for name in ("entropy", "variance", "spectral_gap")
    ]
    for sample in range(2):
        if not keep[sample].any():
            assert all(own[sample].isnan().all() for own in found)
            continue
        matrix = dense_matrix(query[sample], key[sample], keep=keep[sample], **options)
        matrix = only_valid(matrix, keep[sample])
        measures = (dense_entropy, dense_variance, dense_gap)
        # Defective eigenvalues of triangular matrices are exact here and rounded there.
        tolerances = (1e-9, 1e-12, 1e-5 if options["is_causal"] else 1e-6)
        for own, measure, tolerance in zip(found, measures, tolerances, strict=True):
            torch.testing.assert_close(own[sample], measure(matrix), rtol=0, atol=tolerance)


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 2**31))
def test_gaps_of_sparse_chains_match_their_structure(size, reach, seed):
    """One-hot rows: the gap is 1 if all walks end in one token, and 0 otherwise."""
    generator = torch.Generator().manual_seed(seed)
    step = torch.randint(0, reach, (size,), generator=generator)
    target = (torch.arange(size) + step) % size
    matrix = torch.eye(size)[target]
    ends = torch.arange(size)
    for _ in range(size):
        ends = target[ends]
    on_cycles = len(set(ends.tolist()))
    assert of_matrix.spectral_gap(matrix).item() == (1.0 if on_cycles == 1 else 0.0)


@settings(max_examples=40)
@given(st.integers(2, 30), st.floats(0.02, 0.9), st.integers(0, 2**31))
def test_gaps_of_chains_with_zeros_match_dense(size, share, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(size, size, generator=generator, dtype=torch.float64)
    there = torch.rand(size, size, generator=generator) < share
    weights = torch.where(there, weights, 0.0) + torch.eye(size, dtype=torch.float64) * 1e-3
    matrix = weights / weights.sum(-1, keepdim=True)
    found, expected = of_matrix.spectral_gap(matrix), dense_gap(matrix[None])[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts(kind, layout):
    query, key, _ = make_qkv(2, 3, 20, 8, layout=layout)
    # Given, because matching sums in float32, in the order of the memory.
    options = {"kind": kind, "alpha": 1.5, "beta": 2.0}
    found = instruments.entropy(query, key, **options)
    expected = instruments.entropy(query.contiguous(), key.contiguous(), **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_inference_mode_and_other_defaults():
    query, key, _ = make_qkv(1, 2, 140, 8)
    expected = instruments.spectral_gap(query, key, kind="lln_diag")
    with torch.inference_mode():
        torch.testing.assert_close(instruments.spectral_gap(query, key, kind="lln_diag"), expected)
    torch.set_default_dtype(torch.float64)
    try:
        torch.testing.assert_close(instruments.spectral_gap(query, key, kind="lln_diag"), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_blocks_of_one_token_are_the_identity():
    query, key, _ = make_qkv(1, 1, 150, 8)
    options = {"kind": "diag", "block_size": 1}
    assert instruments.entropy(query, key, **options).item() == 0
    assert instruments.spectral_gap(query, key, **options).item() == 0
    options["kind"] = "lln_diag"
    matrix = dense_matrix(query[0], key[0], **options)
    found = instruments.spectral_gap(query, key, **options)
    torch.testing.assert_close(found[0], dense_gap(matrix), rtol=0, atol=1e-6)


def test_one_feature_is_rank_one():
    query, key, _ = make_qkv(1, 1, 150, 1)
    assert instruments.spectral_gap(query, key, kind="lln").item() == pytest.approx(1.0)


def test_a_long_uniform_attention_is_a_point():
    """Beyond the length up to which entries are sorted."""
    query = torch.zeros(1, 1, 1100, 4)
    shape = instruments.log_normality(query, query)
    assert shape.mean.item() == pytest.approx(-math.log(1100))
    assert shape.ks.isnan()
    assert shape.quantiles.sub(shape.mean.item()).abs().max() < 1e-12


def test_temperatures_of_any_shape():
    query, key, _ = make_qkv(2, 4, 20, 8)
    plain = instruments.entropy(query, key, kind="lln", alpha=1.5, beta=2.0)
    for shape in ((), (1,), (4, 1, 1), (2, 1, 1, 1), (2, 4, 1, 1)):
        alpha, beta = torch.full(shape, 1.5), torch.full(shape, 2.0, dtype=torch.float64)
        found = instruments.entropy(query, key, kind="lln", alpha=alpha, beta=beta)
        torch.testing.assert_close(found, plain)


def test_groups_of_samples_and_many_short_heads(monkeypatch):
    query, key, _ = make_qkv(7, 3, 9, 4)
    whole = instruments.spectral_gap(query, key, kind="lln")
    monkeypatch.setattr("lln.instruments.head_groups._GROUP", 9 * 3 * 4 * 2)
    torch.testing.assert_close(instruments.spectral_gap(query, key, kind="lln"), whole)
    alone = torch.cat(
        [instruments.spectral_gap(query[i : i + 1], key[i : i + 1], kind="lln") for i in range(7)]
    )
    torch.testing.assert_close(alone, whole)


def test_a_stalled_iteration_says_so(monkeypatch):
    """A ring with a small leak: all eigenvalues nearly on the unit circle."""
    monkeypatch.setattr("lln.instruments.eigenvalues._RESCUE", 0)
    monkeypatch.setattr("lln.instruments.eigenvalues._ATTEMPTS", ((20, 2),))
    matrix = torch.eye(300, dtype=torch.float64).roll(1, 0)
    matrix = 0.999999 * matrix + 1e-6 / 300
    with pytest.warns(RuntimeWarning, match="did not converge"):
        found = of_matrix.spectral_gap(matrix)
    assert found.isnan() or found.item() == pytest.approx(1e-6, abs=1e-3)


def test_a_stalled_iteration_is_rescued():
    matrix = torch.eye(300, dtype=torch.float64).roll(1, 0)
    matrix = 0.999 * matrix + 1e-3 / 300
    assert of_matrix.spectral_gap(matrix).item() == pytest.approx(1e-3, abs=1e-9)
