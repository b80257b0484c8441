"""Matrices whose answer is known in closed form, and inputs at the edge of sense."""

import math
import warnings

import pytest
import torch
from tests.instruments.dense import KINDS, dense_entropy, dense_gap, dense_matrix

from lln import InvalidInputError, instruments
from lln.errors import CausalStatisticsError
from lln.instruments import of_matrix
from lln.testing import make_qkv

MEASURES = ("entropy", "spectral_gap", "variance", "temperature")


def cycle(size, *lengths):
    """A permutation that consists of cycles of these lengths."""
    target, start = torch.arange(size), 0
    for length in lengths:
        target[start : start + length] = start + (torch.arange(length) + 1) % length
        start += length
    return torch.eye(size, dtype=torch.float64)[target]


# Matrices


@pytest.mark.parametrize("size", [2, 5, 200])
def test_uniform(size):
    matrix = torch.full((size, size), 1 / size, dtype=torch.float64)
    assert of_matrix.entropy(matrix).item() == pytest.approx(math.log2(size), abs=1e-12)
    assert of_matrix.spectral_gap(matrix).item() == pytest.approx(1.0, abs=1e-12)
    assert of_matrix.variance(matrix).item() == pytest.approx(0.0, abs=1e-30)
    assert of_matrix.temperature(matrix).item() > 1e12
    shape = of_matrix.log_normality(matrix)
    assert shape.mean.item() == pytest.approx(-math.log(size))
    assert shape.skew.isnan()
    assert shape.kurtosis.isnan()
    assert shape.ks.isnan()


@pytest.mark.parametrize("size", [2, 5, 200])
def test_identity(size):
    matrix = torch.eye(size, dtype=torch.float64)
    assert of_matrix.entropy(matrix).item() == 0
    assert of_matrix.spectral_gap(matrix).item() == 0
    expected = (1 / size) * (1 - 1 / size)
    assert of_matrix.variance(matrix).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("lengths", "gap"), [((200,), 0.0), ((1,) * 200, 0.0), ((100, 100), 0.0), ((199, 1), 0.0)]
)
def test_permutations(lengths, gap):
    assert of_matrix.spectral_gap(cycle(200, *lengths)).item() == gap


@pytest.mark.parametrize("size", [4, 300])
def test_one_hot_rows_that_all_end_in_one_token(size):
    """A shift: nilpotent but for the last token, where rounding says anything up to 1."""
    target = (torch.arange(size) + 1).clamp_max(size - 1)
    matrix = torch.eye(size, dtype=torch.float64)[target]
    assert of_matrix.spectral_gap(matrix).item() == 1
    scrambled = torch.randperm(size)
    assert of_matrix.spectral_gap(matrix[scrambled][:, scrambled]).item() == 1


@pytest.mark.parametrize("size", [6, 150])
def test_periodic_with_positive_weights(size):
    """Two halves that only see each other: −1 is an eigenvalue."""
    half = size // 2
    matrix = torch.zeros(size, size, dtype=torch.float64)
    matrix[:half, half:] = torch.rand(half, half).softmax(-1)
    matrix[half:, :half] = torch.rand(half, half).softmax(-1)
    assert of_matrix.spectral_gap(matrix).item() == 0


@pytest.mark.parametrize("size", [3, 150])
def test_rank_one(size):
    row = torch.rand(size, dtype=torch.float64).softmax(-1)
    matrix = row.expand(size, size)
    assert of_matrix.spectral_gap(matrix).item() == pytest.approx(1, abs=1e-12)
    expected = -(row * row.log2()).sum().item()
    assert of_matrix.entropy(matrix).item() == pytest.approx(expected)


@pytest.mark.parametrize("size", [8, 200])
@pytest.mark.parametrize("share", [1e-3, 0.5, 0.99])
def test_rank_one_plus_identity(size, share):
    """λ₂ is the share of the identity, N − 1 times over."""
    row = torch.rand(size, dtype=torch.float64).softmax(-1)
    matrix = share * torch.eye(size, dtype=torch.float64) + (1 - share) * row
    assert of_matrix.spectral_gap(matrix).item() == pytest.approx(1 - share, abs=1e-9)


@pytest.mark.parametrize("size", [5, 180])
def test_triangular(size):
    matrix = torch.rand(size, size, dtype=torch.float64).tril()
    matrix = matrix / matrix.sum(-1, keepdim=True)
    expected = 1 - matrix.diagonal()[1:].max().item()
    assert of_matrix.spectral_gap(matrix).item() == pytest.approx(expected, abs=1e-12)


def test_a_leaking_class_that_outlives_the_mixing_of_the_closed_one():
    matrix = torch.zeros(300, 300, dtype=torch.float64)
    matrix[:150, :150] = torch.rand(150, 150).double().softmax(-1)
    matrix[150:, 150:] = 0.9 * torch.rand(150, 150).double().softmax(-1)
    matrix[150:, :150] = 0.1 / 150
    assert of_matrix.spectral_gap(matrix).item() == pytest.approx(0.1, abs=1e-9)


def test_two_tokens_in_closed_form():
    a, b = 0.3, 0.25
    matrix = torch.tensor([[1 - a, a], [b, 1 - b]], dtype=torch.float64)
    assert of_matrix.spectral_gap(matrix).item() == pytest.approx(a + b, abs=1e-12)


def test_a_log_normal_sample_is_recognised():
    """Normal log P: no skew, no kurtosis, a KS distance of sampling size, a straight Q-Q plot."""
    logs = torch.randn(1000, 1000, dtype=torch.float64)
    weights = logs.exp()
    shape = of_matrix.log_normality(weights / weights.sum(-1, keepdim=True))
    assert abs(shape.skew.item()) < 0.02
    assert abs(shape.kurtosis.item()) < 0.03
    assert shape.ks.item() < 0.005
    assert shape.row_variance.item() == pytest.approx(1, abs=0.01)
    gap = (shape.quantiles - shape.normal_quantiles).abs()[2:-2]
    assert gap.max().item() < 0.03


def test_zero_rows_do_not_count():
    matrix = torch.rand(3, 20, 20, dtype=torch.float64).softmax(-1)
    padded = torch.zeros(3, 25, 25, dtype=torch.float64)
    padded[:, 3:23, 3:23] = matrix
    for name in MEASURES:
        measure = getattr(of_matrix, name)
        torch.testing.assert_close(measure(padded), measure(matrix), rtol=1e-9, atol=1e-12)
    assert of_matrix.entropy(torch.zeros(4, 4)).isnan()


def test_a_zero_row_that_others_attend_to_has_no_gap():
    matrix = torch.full((3, 3), 1 / 3)
    matrix[1] = 0
    with pytest.raises(InvalidInputError, match="zero its column too"):
        of_matrix.spectral_gap(matrix)
    assert of_matrix.entropy(matrix).item() == pytest.approx(math.log2(3))


def test_half_precision_matrices_are_normalised():
    matrix = torch.rand(2, 50, 50).softmax(-1)
    for dtype in (torch.bfloat16, torch.float16):
        found = of_matrix.entropy(matrix.to(dtype))
        torch.testing.assert_close(found, dense_entropy(matrix.double()), rtol=0, atol=2e-3)


def test_leading_dimensions():
    matrix = torch.rand(2, 3, 4, 10, 10).softmax(-1)
    assert of_matrix.entropy(matrix).shape == (2, 3, 4)
    assert of_matrix.log_normality(matrix).quantiles.shape[:3] == (2, 3, 4)
    assert of_matrix.entropy(matrix[0, 0, 0]).shape == ()
    assert of_matrix.entropy(matrix[:0]).shape == (0, 3, 4)


def test_one_sick_matrix_does_not_touch_the_others():
    matrix = torch.rand(3, 10, 10).softmax(-1)
    sick = matrix.clone()
    sick[1, 2, 3] = torch.nan
    for name in MEASURES:
        found, whole = getattr(of_matrix, name)(sick), getattr(of_matrix, name)(matrix)
        assert found[1].isnan()
        torch.testing.assert_close(found[[0, 2]], whole[[0, 2]])


@pytest.mark.parametrize(
    ("matrix", "sentence"),
    [
        (torch.full((4, 4), 0.1), "sum to 1"),
        (torch.full((4, 4), 1 / 3), "sums to 1.33333"),
        (torch.tensor([[1.5, -0.5], [0.5, 0.5]]), "negative entry -0.5"),
        (torch.ones(4), r"\[..., T, S\]"),
        (torch.ones(0, 0), "at least one row"),
        (torch.ones(2, 2, dtype=torch.int64), "float64, float32"),
        ([[1.0]], "torch.Tensor, got list"),
    ],
    ids=str,
)
def test_what_is_not_stochastic_is_refused(matrix, sentence):
    for name in MEASURES:
        with pytest.raises(InvalidInputError, match=sentence):
            getattr(of_matrix, name)(matrix)


# Queries and keys


@pytest.mark.parametrize("kind", ["softmax", "lln", "diag", "lln_diag"])
def test_constant_inputs_give_uniform_attention(kind):
    """Scores are all zero; matching then falls back to α = β = 1."""
    query = torch.full((1, 1, 150, 8), 0.3)
    in_blocks = (144 * 3 + 6 * math.log2(6)) / 150
    # Inside a block of b tokens the average has weight 1/300 + 1/2b, elsewhere 1/300.
    inside, outside = (1 / 300 + 1 / 16, 1 / 300)
    mixed = -8 * inside * math.log2(inside) - 142 * outside * math.log2(outside)
    short = 1 / 300 + 1 / 12
    mixed_short = -6 * short * math.log2(short) - 144 * outside * math.log2(outside)
    expected = {
        "softmax": (math.log2(150), 1.0),
        "lln": (math.log2(150), 1.0),
        "diag": (in_blocks, 0.0),
        "lln_diag": ((144 * mixed + 6 * mixed_short) / 150, 0.5),
    }
    options = {"kind": kind, "block_size": 8}
    entropy = instruments.entropy(query, query, **options).item()
    gap = instruments.spectral_gap(query, query, **options).item()
    assert (entropy, gap) == pytest.approx(expected[kind], abs=1e-9)


@pytest.mark.parametrize("tokens", [20, 150])
def test_scores_so_large_that_attention_is_one_hot(tokens):
    """Every token reads itself: P is the identity to the last bit."""
    query = 1e3 * torch.eye(tokens)[None, None]
    assert instruments.entropy(query, query).item() == 0
    assert instruments.spectral_gap(query, query).item() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_large_numbers(kind):
    query, key, _ = make_qkv(1, 2, 40, 8, scale=1e4)
    matrix = dense_matrix(query[0], key[0], kind=kind, alpha=1.0, beta=1.0)
    found = instruments.entropy(query, key, kind=kind, alpha=1.0, beta=1.0)
    assert found.isfinite().all()
    torch.testing.assert_close(found[0], dense_entropy(matrix), rtol=0, atol=1e-9)
    assert instruments.spectral_gap(query, key, kind=kind).isfinite().all()
    assert instruments.log_normality(query, key, kind=kind).mean.isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_lln_entries_that_underflow_keep_their_logarithm(is_causal):
    """One key far above the others takes every sum of exponentials beyond float64."""
    query, key, _ = make_qkv(1, 1, 30, 4)
    key[0, 0, 20] += 2000
    options = {"kind": "lln", "alpha": 1.0, "beta": 1.0, "is_causal": is_causal}
    found = instruments.log_normality(query, key, **options)
    kernel = (query.double()[0, 0, :, None] + key.double()[0, 0]).logsumexp(-1)
    seen = torch.ones(30, 30, dtype=torch.bool)
    seen = seen.tril() if is_causal else seen
    logs = torch.where(seen, kernel, -torch.inf).log_softmax(-1)[seen]
    torch.testing.assert_close(found.mean.item(), logs.mean().item())
    torch.testing.assert_close(found.variance.item(), logs.var(correction=0).item())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_single_token(kind, is_causal):
    query, key, _ = make_qkv(2, 2, 1, 8)
    is_causal = is_causal and kind != "lln_keys"
    options = {"kind": kind, "is_causal": is_causal, "alpha": 1.0, "beta": 1.0, "offset": 0.0}
    zero, one = torch.zeros(2, 2).double(), torch.ones(2, 2).double()
    torch.testing.assert_close(instruments.entropy(query, key, **options), zero)
    torch.testing.assert_close(instruments.variance(query, key, **options), zero)
    torch.testing.assert_close(instruments.spectral_gap(query, key, **options), one)
    assert instruments.temperature(query, key, measured=True, **options).isinf().all()
    shape = instruments.log_normality(query, key, **options)
    torch.testing.assert_close(shape.mean, zero)
    assert shape.skew.isnan().all()
    assert instruments.score_variance(query, key, **options).total.eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sick_head_is_nan_and_touches_no_other(kind):
    query, key, _ = make_qkv(2, 3, 20, 8)
    whole = instruments.entropy(query, key, kind=kind)
    query[0, 1, 3, 2] = torch.nan
    key[1, 2, 0, 0] = torch.inf
    sick = torch.zeros(2, 3, dtype=torch.bool)
    sick[0, 1] = sick[1, 2] = True
    for name in MEASURES:
        found = getattr(instruments, name)(query, key, kind=kind)
        assert torch.equal(found.isnan(), sick), name
    found = instruments.entropy(query, key, kind=kind)
    torch.testing.assert_close(found[~sick], whole[~sick], rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_without_any_valid_token_is_nan(kind):
    query, key, _ = make_qkv(3, 2, 20, 8)
    keep = torch.ones(3, 20, dtype=torch.bool)
    keep[1] = False
    for name in MEASURES:
        found = getattr(instruments, name)(query, key, kind=kind, key_mask=keep)
        assert found[1].isnan().all()
        assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (2, 0, 5, 4), (2, 2, 0, 4)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*MEASURES, "log_normality", "score_variance"])
def test_no_samples_no_heads_no_tokens(name, kind, shape):
    query, key = torch.randn(2, *shape)
    for mask in (None, torch.ones(shape[0], shape[2], dtype=torch.bool)):
        found = getattr(instruments, name)(query, key, kind=kind, key_mask=mask)
        first = found if isinstance(found, torch.Tensor) else found[0]
        assert first.shape == shape[:2]
        assert first.isnan().all()


@pytest.mark.parametrize("name", MEASURES)
def test_no_packed_sequences(name):
    query, bounds = torch.zeros(0, 2, 4), torch.zeros(1, dtype=torch.int64)
    assert getattr(instruments, name)(query, query, cu_seqlens=bounds).shape == (0, 2)


def test_no_matrices():
    for name in (*MEASURES, "log_normality"):
        found = getattr(of_matrix, name)(torch.zeros(0, 2, 5, 5))
        assert (found if isinstance(found, torch.Tensor) else found[0]).shape == (0, 2)


def test_nothing_carries_a_gradient_and_the_inputs_stay_as_they_are():
    query, key, _ = make_qkv(1, 2, 20, 8, requires_grad=True)
    before = query.detach().clone()
    found = instruments.entropy(
        query, key, kind="lln_diag", mix=torch.rand(2, 1, 1, requires_grad=True)
    )
    assert not found.requires_grad
    assert torch.equal(query, before)


def test_autocast_changes_nothing():
    query, key, _ = make_qkv(1, 2, 20, 8)
    plain = instruments.entropy(query, key, kind="lln")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = instruments.entropy(query, key, kind="lln")
    assert torch.equal(plain, cast)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"kind": "performer"},
            "kind must be one of 'softmax', 'lln', 'diag', 'lln_diag', 'window', 'lln_keys'",
        ),
        ({"kind": "lln", "alpha": 2.0}, "alpha was given without beta"),
        ({"kind": "lln", "alpha": -1.0, "beta": 1.0}, "alpha must be positive"),
        ({"kind": "lln", "matching": "best"}, "matching must be one of"),
        ({"kind": "diag", "block_size": 0}, "block_size must be at least 1"),
        ({"kind": "window", "window": -1}, "window must be an integer of at least 0, got -1"),
        ({"kind": "window", "window": None}, "window must be an integer of at least 0, got None"),
        ({"kind": "lln_diag", "mix": 1.5}, "mix must be a number in"),
        ({"kind": "lln_diag", "mix": torch.full((1, 2, 6, 1), 1.5)}, "mix must lie in"),
        ({"kind": "lln_diag", "mix": torch.full((8,), 0.5)}, "mix must broadcast"),
        ({"scale": 0.0}, "scale must be finite and not zero"),
        ({"key_mask": torch.ones(1, 5, dtype=torch.bool)}, "key_mask must be"),
        ({"key_mask": torch.ones(1, 6)}, "key_mask must be bool"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(options, sentence):
    query, key, _ = make_qkv(1, 2, 6, 8)
    for name in (*MEASURES, "log_normality", "score_variance"):
        with pytest.raises(InvalidInputError, match=sentence):
            getattr(instruments, name)(query, key, **options)


def test_tensors_that_do_not_fit_are_refused():
    query, key, _ = make_qkv(1, 3, 6, 8, keys=9)
    with pytest.raises(InvalidInputError, match="needs as many queries as keys"):
        instruments.spectral_gap(query, key)
    with pytest.raises(InvalidInputError, match="pairs queries and keys of the same positions"):
        instruments.entropy(query, key, kind="diag")
    with pytest.raises(InvalidInputError, match="is_causal needs as many queries as keys"):
        instruments.entropy(query, key, is_causal=True)
    with pytest.raises(InvalidInputError, match="multiple of the number of key heads"):
        instruments.entropy(query, key[:, :2])
    with pytest.raises(InvalidInputError, match="4 dimensions"):
        instruments.entropy(query[0], key[0])
    with pytest.raises(InvalidInputError, match=r"must be a torch\.Tensor"):
        instruments.spectral_gap([1.0], key)
    packed = query[0].transpose(0, 1)
    mask = torch.ones(1, 6, dtype=torch.bool)
    with pytest.raises(InvalidInputError, match="cannot be combined"):
        instruments.entropy(packed, packed, cu_seqlens=torch.tensor([0, 6]), key_mask=mask)


def test_causal_lln_does_not_match_its_own_sequence():
    query, key, _ = make_qkv(1, 2, 6, 8)
    with pytest.raises(CausalStatisticsError):
        instruments.entropy(query, key, kind="lln", is_causal=True)


def test_attention_close_to_a_permutation_still_has_a_gap():
    """The iteration stalls on a cluster of eigenvalues next to 1; all of them are then computed."""
    query, key, _ = make_qkv(1, 1, 400, 64)
    query, key = query + key, query + 0.9 * key
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = instruments.spectral_gap(query, key)
    expected = dense_gap(dense_matrix(query[0], key[0]))
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-6)
