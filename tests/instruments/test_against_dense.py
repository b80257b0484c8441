"""Every instrument on every kind of attention, against N×N matrices in float64."""

from importlib import import_module

import pytest
import torch
from tests.instruments.dense import (
    KINDS,
    dense_entropy,
    dense_gap,
    dense_log_moments,
    dense_matrix,
    dense_variance,
    only_valid,
)

from lln import instruments
from lln.functional.statistics import matched_temperatures
from lln.instruments import of_matrix
from lln.testing import make_qkv

BITS = 1e-9
GAP = 1e-6


def padding(batch, tokens):
    """Right padding, left padding, holes; the first sample is whole."""
    keep = torch.ones(batch, tokens, dtype=torch.bool)
    keep[1, tokens // 2 :] = False
    keep[2, : tokens // 3] = False
    keep[3] = torch.arange(tokens) % 3 != 1
    return keep


def set_budget(monkeypatch, module, name, size):
    """The package's functions hide the modules of their names, so they are fetched by path."""
    monkeypatch.setattr(import_module(f"lln.instruments.{module}"), name, size)


def dense_of(query, key, keep=None, **options):
    matrices = []
    for index in range(query.shape[0]):
        own = None if keep is None else keep[index]
        matrix = dense_matrix(query[index], key[index], keep=own, **options)
        matrices.append(only_valid(matrix, own))
    return matrices


# Exact keys look both ways only.
FORMS = [
    pytest.param(kind, is_causal, id=f"{kind}-{'causal' if is_causal else 'both'}")
    for kind in KINDS
    for is_causal in ([False] if kind == "lln_keys" else [False, True])
]


def options_of(kind, is_causal):
    options = {"kind": kind, "is_causal": is_causal}
    if is_causal and kind.startswith("lln"):
        options |= {"alpha": 1.9, "beta": 2.2}
    if kind == "window":
        options["window"] = 7
    return options


def check(found, matrices, measure, tolerance):
    expected = torch.stack([measure(matrix) for matrix in matrices])
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("tokens", [2, 37, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "is_causal"), FORMS)
def test_every_instrument_equals_dense_float64(kind, tokens, masked, is_causal):
    query, key, _ = make_qkv(4, 2, tokens, 16, scale=1.3, seed=tokens)
    keep = padding(4, tokens) if masked and tokens > 2 else None
    options = options_of(kind, is_causal)
    if keep is not None:
        # What lies under the mask has no effect.
        key[~keep[:, None].expand(-1, 2, -1)] = torch.nan
    matrices = dense_of(query, key, keep, **options)
    given = {"key_mask": keep, **options}
    check(instruments.entropy(query, key, **given), matrices, dense_entropy, BITS)
    check(instruments.variance(query, key, **given), matrices, dense_variance, 1e-12)
    check(instruments.spectral_gap(query, key, **given), matrices, dense_gap, GAP)
    found = instruments.log_normality(query, key, **given)
    expected = torch.stack([dense_log_moments(matrix) for matrix in matrices], 1)
    shape = found[:6]
    for name, own, dense in zip(found._fields, shape, expected, strict=False):
        if not dense.isnan().any():
            torch.testing.assert_close(own, dense, rtol=1e-7, atol=1e-7, msg=name)
    check(
        instruments.temperature(query, key, measured=True, **given),
        matrices,
        lambda matrix: dense_log_moments(matrix)[2].rsqrt(),
        1e-9,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_other_precisions(kind, dtype):
    """The inputs are taken as they are: their rounding is not an error of ours."""
    query, key, _ = make_qkv(1, 2, 80, 16, dtype=dtype, scale=1.5)
    matrices = dense_of(query, key, kind=kind)
    check(instruments.entropy(query, key, kind=kind), matrices, dense_entropy, BITS)
    check(instruments.spectral_gap(query, key, kind=kind), matrices, dense_gap, GAP)
    check(instruments.variance(query, key, kind=kind), matrices, dense_variance, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 12.0])
def test_any_concentration(kind, spread):
    query, key, _ = make_qkv(1, 1, 140, 8, scale=spread)
    matrices = dense_of(query, key, kind=kind)
    check(instruments.entropy(query, key, kind=kind), matrices, dense_entropy, 1e-8)
    if spread < 4:
        # Beyond, P is close to a permutation and its eigenvalues magnify rounding.
        check(instruments.spectral_gap(query, key, kind=kind), matrices, dense_gap, GAP)


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_queries_equal_repeated_keys(kind):
    query, key, _ = make_qkv(2, 6, 50, 8, key_heads=2)
    repeated = key.repeat_interleave(3, 1)
    for name in ("entropy", "spectral_gap", "variance", "temperature"):
        measure = getattr(instruments, name)
        found = measure(query, key, kind=kind)
        torch.testing.assert_close(found, measure(query, repeated, kind=kind))
        assert found.shape == (2, 6)


def test_beta_per_key_head():
    query, key, _ = make_qkv(2, 4, 30, 8, key_heads=2)
    alpha, beta = torch.rand(2, 4, 1, 1) + 1, torch.rand(2, 2, 1, 1) + 1
    found = instruments.entropy(query, key, kind="lln", alpha=alpha, beta=beta)
    expected = torch.stack(
        [
            dense_entropy(
                dense_matrix(
                    query[index],
                    key[index],
                    kind="lln",
                    alpha=alpha[index].double(),
                    beta=beta[index].double().repeat_interleave(2, 0),
                )
            )
            for index in range(2)
        ]
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=BITS)


@pytest.mark.parametrize(("kind", "is_causal"), FORMS)
def test_packed_sequences_equal_one_call_each(kind, is_causal):
    query, key, _ = make_qkv(1, 4, 60, 8, key_heads=2)
    query, key = query[0].transpose(0, 1), key[0].transpose(0, 1)
    bounds = torch.tensor([0, 7, 7, 40, 41, 60])
    options = options_of(kind, is_causal) | {"block_size": 5}
    mix = torch.rand(60, 4, 1)
    for name in ("entropy", "spectral_gap", "variance", "temperature"):
        measure = getattr(instruments, name)
        found = measure(query, key, cu_seqlens=bounds, mix=mix, **options)
        assert found.shape == (5, 4)
        assert found[1].isnan().all()
        for index in (0, 2, 3, 4):
            own = slice(*bounds[index : index + 2].tolist())
            alone = measure(
                query[own].transpose(0, 1)[None],
                key[own].transpose(0, 1)[None],
                mix=mix[own].transpose(0, 1)[None],
                **options,
            )
            torch.testing.assert_close(found[index], alone[0], rtol=1e-6, atol=1e-8)


def test_packed_matching_over_all_tokens_with_the_authors_constants():
    query, key, _ = make_qkv(1, 2, 40, 8)
    alpha, beta = matched_temperatures(query, key, "paper", None, "eager")
    packed = [side[0].transpose(0, 1) for side in (query, key)]
    bounds = torch.tensor([0, 15, 40])
    found = instruments.entropy(*packed, kind="lln", matching="paper", cu_seqlens=bounds)
    given = instruments.entropy(*packed, kind="lln", alpha=alpha, beta=beta, cu_seqlens=bounds)
    torch.testing.assert_close(found, given)


@pytest.mark.parametrize("mix", [0.0, 0.25, 1.0])
def test_mix(mix):
    query, key, _ = make_qkv(1, 2, 140, 8)
    matrices = dense_of(query, key, kind="lln_diag", mix=mix, block_size=20)
    options = {"kind": "lln_diag", "mix": mix, "block_size": 20}
    check(instruments.entropy(query, key, **options), matrices, dense_entropy, BITS)
    check(instruments.spectral_gap(query, key, **options), matrices, dense_gap, GAP)
    found = instruments.log_normality(query, key, **options)
    expected = torch.stack([dense_log_moments(matrix) for matrix in matrices], 1)
    torch.testing.assert_close(torch.stack(found[:6]), expected, rtol=1e-7, atol=1e-7)


def test_mix_per_token_with_a_mask():
    query, key, _ = make_qkv(4, 2, 140, 8)
    keep = padding(4, 140)
    gate = torch.rand(4, 2, 140, 1)
    found = instruments.spectral_gap(
        query, key, kind="lln_diag", mix=gate, key_mask=keep, block_size=20
    )
    for index in range(4):
        matrix = dense_matrix(
            query[index],
            key[index],
            kind="lln_diag",
            mix=gate[index].double(),
            keep=keep[index],
            block_size=20,
        )
        expected = dense_gap(only_valid(matrix, keep[index]))
        torch.testing.assert_close(found[index], expected, rtol=0, atol=GAP)


@pytest.mark.parametrize("kind", ["softmax", "lln"])
def test_cross_attention(kind):
    query, key, _ = make_qkv(4, 2, 20, 8, keys=33)
    keep = padding(4, 33)
    matrices = dense_of(query, key, keep, kind=kind)
    found = instruments.entropy(query, key, kind=kind, key_mask=keep)
    check(found, matrices, dense_entropy, BITS)
    found = instruments.variance(query, key, kind=kind, key_mask=keep)
    check(found, matrices, dense_variance, 1e-12)


def test_scale():
    query, key, _ = make_qkv(1, 2, 40, 8)
    matrices = dense_of(query, key, kind="softmax", scale=0.7)
    check(instruments.entropy(query, key, scale=0.7), matrices, dense_entropy, BITS)
    found = instruments.temperature(query, key, scale=0.7)
    scores = 0.7 * query.double() @ key.double().mT
    torch.testing.assert_close(found, 1 / scores.flatten(2).std(-1, correction=0))


@pytest.mark.parametrize("tile", [pytest.param(64, marks=pytest.mark.slow), 1 << 8, 1 << 11])
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_of_any_size_agree(kind, tile, monkeypatch):
    """Small tiles here are what long sequences meet."""
    query, key, _ = make_qkv(1, 3, 70, 8)
    options = options_of(kind, is_causal=False)
    results = []
    for size in (1 << 20, tile):
        set_budget(monkeypatch, "rows", "TILE", size)
        set_budget(monkeypatch, "rows", "MOST_ROWS", min(size, 256) // 16)
        set_budget(monkeypatch, "spectral_gap", "KEPT", size)
        shape = instruments.log_normality(query, key, **options)
        results.append(
            [
                instruments.entropy(query, key, **options),
                instruments.variance(query, key, **options),
                instruments.spectral_gap(query, key, **options),
                *shape,
            ]
        )
    for whole, tiled in zip(*results, strict=True):
        torch.testing.assert_close(tiled, whole, rtol=1e-9, atol=1e-12)


def test_iterated_softmax_gap_without_the_matrix(monkeypatch):
    query, key, _ = make_qkv(1, 1, 300, 16, scale=1.5)
    kept = instruments.spectral_gap(query, key)
    set_budget(monkeypatch, "spectral_gap", "KEPT", 0)
    torch.testing.assert_close(instruments.spectral_gap(query, key), kept, rtol=0, atol=1e-9)
    expected = dense_gap(dense_matrix(query[0], key[0]))
    torch.testing.assert_close(kept[0], expected, rtol=0, atol=GAP)


def test_the_gap_of_a_long_window_without_the_matrix(monkeypatch):
    query, key, _ = make_qkv(1, 1, 300, 16, scale=1.5)
    options = {"kind": "window", "window": 20}
    expected = dense_gap(dense_matrix(query[0], key[0], **options))
    set_budget(monkeypatch, "rows", "MOST_ROWS", 32)
    # The band is kept, then made again for every product.
    for size in (300 * 80, 0):
        set_budget(monkeypatch, "spectral_gap", "KEPT", size)
        found = instruments.spectral_gap(query, key, **options)
        torch.testing.assert_close(found[0], expected, rtol=0, atol=GAP)


@pytest.mark.parametrize("window", [0, 3, 59, 1000])
def test_windows_of_every_width(window):
    """None at all is the identity, all tokens are softmax."""
    query, key, _ = make_qkv(1, 2, 60, 8)
    options = {"kind": "window", "window": window}
    matrices = dense_of(query, key, **options)
    check(instruments.entropy(query, key, **options), matrices, dense_entropy, BITS)
    check(instruments.spectral_gap(query, key, **options), matrices, dense_gap, GAP)
    if window >= 59:
        softmax = instruments.log_normality(query, key)
        for found, whole in zip(
            instruments.log_normality(query, key, **options), softmax, strict=True
        ):
            torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("kind", ["softmax", "lln"])
def test_histogram_agrees_with_sorting(kind, monkeypatch):
    query, key, _ = make_qkv(1, 2, 200, 16, scale=1.4)
    exact = instruments.log_normality(query, key, kind=kind)
    set_budget(monkeypatch, "log_normality", "_SORTED", 0)
    binned = instruments.log_normality(query, key, kind=kind)
    torch.testing.assert_close(binned.ks, exact.ks, rtol=0, atol=1e-3)
    middle = slice(3, -3)
    torch.testing.assert_close(
        binned.quantiles[..., middle], exact.quantiles[..., middle], rtol=0, atol=5e-3
    )
    for name in ("mean", "variance", "skew", "kurtosis"):
        torch.testing.assert_close(getattr(binned, name), getattr(exact, name))


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("kind", ["softmax", "diag", "window"])
def test_score_variance(kind, is_causal):
    query, key, _ = make_qkv(1, 2, 50, 8)
    # Means and unequal features, which the closed form σq²σk² does not see.
    query, key = query + 0.5, key * torch.linspace(0.5, 2, 8) + torch.randn(8)
    options = options_of(kind, is_causal)
    found = instruments.score_variance(query, key, **options)
    torch.testing.assert_close(instruments.temperature(query, key, **options), found.total.rsqrt())
    scores = query.double() @ key.double().mT / 8**0.5
    seen = dense_matrix(query[0], key[0], **options)[0] > 0
    for head in range(2):
        own = scores[0, head]
        total = own[seen].var(correction=0)
        rows = torch.stack(
            [row[mask].var(correction=0) for row, mask in zip(own, seen, strict=True)]
        )
        torch.testing.assert_close(found.total[0, head], total)
        torch.testing.assert_close(found.within_row[0, head], rows.mean())
    product = found.sigma_q**2 * found.sigma_k**2
    torch.testing.assert_close(product + found.cross, found.total)
    covariance = torch.stack([torch.cov(head.double().T, correction=0) for head in key[0]])
    second = query[0].double().mT @ query[0].double() / 50
    trace = (second @ covariance).diagonal(dim1=-2, dim2=-1).sum(-1) / 8
    torch.testing.assert_close(found.trace[0], trace)
    if kind == "softmax" and not is_causal:
        torch.testing.assert_close(found.within_row, found.trace)


def test_temperature_by_the_equations():
    query, key, _ = make_qkv(2, 2, 60, 64, scale=1.2)
    scores = query.double() @ key.double().mT / 8
    torch.testing.assert_close(
        instruments.temperature(query, key), 1 / scores.flatten(2).std(-1, correction=0)
    )
    a, b = 0.14855178144710912, -0.35487039130661086
    query_variance = query.double().square().mean((-1, -2))
    key_variance = key.double().var(-2, correction=0).mean(-1)
    expected = (a * (2.1**2 * query_variance + 2.3**2 * key_variance) + b) ** -0.5
    found = instruments.temperature(query, key, kind="lln", alpha=2.1, beta=2.3)
    torch.testing.assert_close(found, expected)
    flat = instruments.temperature(query, key, kind="lln", alpha=0.1, beta=0.1)
    assert flat.isinf().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_given_matrix_gives_the_same(kind):
    query, key, _ = make_qkv(1, 3, 90, 8)
    matrix = dense_matrix(query[0], key[0], kind=kind)
    pairs = (
        (instruments.entropy(query, key, kind=kind), of_matrix.entropy(matrix)),
        (instruments.variance(query, key, kind=kind), of_matrix.variance(matrix)),
        (instruments.spectral_gap(query, key, kind=kind), of_matrix.spectral_gap(matrix)),
        (
            instruments.temperature(query, key, kind=kind, measured=True),
            of_matrix.temperature(matrix),
        ),
        *zip(
            instruments.log_normality(query, key, kind=kind)[:-1],
            of_matrix.log_normality(matrix)[:-1],
            strict=True,
        ),
    )
    for found, given in pairs:
        torch.testing.assert_close(found[0], given, rtol=1e-6, atol=1e-8)
