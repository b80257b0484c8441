"""Properties that hold for every input: the invariants of LLN attention, by hypothesis."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lln import (
    KeySummary,
    block_diagonal_attention,
    lln_attention,
    lln_attention_varlen,
    lln_diag_attention,
    lln_diag_attention_varlen,
    match_moments,
    page_attention,
    window_attention,
)
from lln.testing import make_qkv

SEEDS = st.integers(0, 2**20)
TOKENS = st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 130]))
WIDTHS = st.integers(1, 9)
SCALES = st.sampled_from([0.01, 0.5, 1.0, 3.0, 30.0])
TEMPERATURES = st.floats(0.2, 4.0)
CRITERIA = st.sampled_from(["variance", "entropy"])
GARBAGE = st.sampled_from([0.0, 1.0, -1e4, 1e30, torch.nan, torch.inf, -torch.inf])

FORMS = [
    "lln",
    "causal",
    "block",
    "diag",
    "causal_diag",
    "window",
    "causal_window",
    "pages",
    "causal_pages",
]
LINEAR_FORMS = ["lln", "causal"]


def attend(form, query, key, value, *, alpha=None, beta=None, key_mask=None):
    causal = form.startswith("causal")
    options = {"key_mask": key_mask, "is_causal": causal}
    if form == "block":
        return block_diagonal_attention(query, key, value, block_size=4, **options)
    if form.endswith("window"):
        return window_attention(query, key, value, window=4, **options)
    if form.endswith("pages"):
        sizes = {"window": 4, "sinks": 2, "pages": 2, "page_size": 4}
        return page_attention(query, key, value, **sizes, **options)
    options |= {"alpha": alpha, "beta": beta}
    if form.endswith("diag"):
        return lln_diag_attention(query, key, value, block_size=4, **options)
    return lln_attention(query, key, value, **options)


@st.composite
def cases(draw, tokens=TOKENS, dtype=torch.float64):
    """Inputs of one sample with two heads, and α, β that suit (or do not suit) their scale."""
    sizes = {"tokens": draw(tokens), "width": draw(WIDTHS), "value_width": draw(WIDTHS)}
    inputs = make_qkv(1, 2, **sizes, dtype=dtype, scale=draw(SCALES), seed=draw(SEEDS))
    return *inputs, draw(TEMPERATURES), draw(TEMPERATURES)


def assert_same(found, wanted, exponent=1.0):
    """Equal to rounding of float64; rounding an exponent of size x costs x·ε of a weight."""
    tolerance = 1e-13 * max(1.0, exponent) * max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


def exponent_of(query, key, alpha, beta):
    return max(alpha * query.abs().max().item(), beta * key.abs().max().item())


@pytest.mark.parametrize("form", FORMS)
@given(case=cases())
def test_rows_are_distributions(form, case):
    query, key, _, alpha, beta = case
    tokens = query.shape[2]
    identity = torch.eye(tokens, dtype=torch.float64).expand(1, 2, tokens, tokens)
    weights = attend(form, query, key, identity, alpha=alpha, beta=beta)
    assert (weights >= 0).all()
    torch.testing.assert_close(
        weights.sum(-1), torch.ones(1, 2, tokens, dtype=torch.float64), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("form", FORMS)
@given(case=cases(dtype=torch.float32))
def test_rows_are_distributions_in_float32(form, case):
    query, key, value, alpha, beta = case
    ones = torch.ones_like(value)
    found = attend(form, query, key, ones, alpha=alpha, beta=beta)
    torch.testing.assert_close(found, ones, rtol=0, atol=4e-6)


@pytest.mark.parametrize("form", FORMS)
@given(case=cases())
def test_output_stays_in_the_hull_of_the_values(form, case):
    query, key, value, alpha, beta = case
    out = attend(form, query, key, value, alpha=alpha, beta=beta)
    slack = 1e-13 * value.abs().max()
    assert (out <= value.amax(2, keepdim=True) + slack).all()
    assert (out >= value.amin(2, keepdim=True) - slack).all()


@pytest.mark.parametrize("form", LINEAR_FORMS)
@given(case=cases(), shift=st.floats(-30, 30), feature=st.integers(0, 8))
def test_shift_of_a_key_feature_is_a_shift_of_the_query_feature(form, case, shift, feature):
    query, key, value, alpha, beta = case
    unit = torch.zeros(query.shape[-1], dtype=torch.float64)
    unit[feature % query.shape[-1]] = shift
    scales = {"alpha": alpha, "beta": beta}
    found = attend(form, query, key + unit, value, **scales)
    wanted = attend(form, query + beta / alpha * unit, key, value, **scales)
    assert_same(found, wanted, exponent_of(query, key.abs() + 30, alpha, beta))


@given(case=cases())
def test_shift_of_a_key_feature_is_seen(case):
    query, key, value, alpha, beta = case
    if query.shape[-1] == 1 or query.shape[2] == 1:
        return
    query, key = query / query.std(), key / key.std()
    shifted = key.clone()
    shifted[..., 0] += 3.0 / beta
    before, after = (
        attend("lln", query, side, value, alpha=alpha, beta=beta) for side in (key, shifted)
    )
    assert (before - after).abs().max() > 1e-6


@pytest.mark.parametrize("form", LINEAR_FORMS)
@given(case=cases(), seed=SEEDS)
def test_constant_added_to_a_query_row_changes_nothing(form, case, seed):
    query, key, value, alpha, beta = case
    generator = torch.Generator().manual_seed(seed)
    shift = 20 * torch.randn(1, 2, query.shape[2], 1, generator=generator, dtype=torch.float64)
    scales = {"alpha": alpha, "beta": beta}
    found = attend(form, query + shift, key, value, **scales)
    exponent = exponent_of(query.abs() + 80, key, alpha, beta)
    assert_same(found, attend(form, query, key, value, **scales), exponent)


@given(case=cases(), seed=SEEDS, criterion=CRITERIA)
def test_permuted_keys_change_nothing(case, seed, criterion):
    query, key, value, alpha, beta = case
    order = torch.randperm(key.shape[2], generator=torch.Generator().manual_seed(seed))
    key, moved = (key, value), (key[:, :, order], value[:, :, order])
    scales = {"alpha": alpha, "beta": beta}
    exponent = exponent_of(query, key[0], alpha, beta)
    assert_same(
        lln_attention(query, *moved, **scales), lln_attention(query, *key, **scales), exponent
    )
    for found, wanted in zip(
        match_moments(query, moved[0], criterion=criterion),
        match_moments(query, key[0], criterion=criterion),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)


@given(case=cases(), seed=SEEDS)
def test_permuted_queries_permute_the_output(case, seed):
    query, key, value, alpha, beta = case
    order = torch.randperm(query.shape[2], generator=torch.Generator().manual_seed(seed))
    scales = {"alpha": alpha, "beta": beta}
    wanted = lln_attention(query, key, value, **scales)[:, :, order]
    found = lln_attention(query[:, :, order], key, value, **scales)
    assert_same(found, wanted, exponent_of(query, key, alpha, beta))


def spread_out(tensor, places, tokens, fill):
    wide = torch.full((*tensor.shape[:2], tokens, tensor.shape[3]), fill, dtype=tensor.dtype)
    wide[:, :, places] = tensor
    return wide


@pytest.mark.parametrize("form", ["lln", "causal"])
@given(case=cases(), fill=GARBAGE, padding=st.integers(1, 150), seed=SEEDS)
def test_padding_anywhere_changes_nothing(form, case, fill, padding, seed):
    query, key, value, alpha, beta = case
    tokens = query.shape[2] + padding
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(tokens, generator=generator)[: query.shape[2]].sort().values
    padded = (spread_out(side, places, tokens, fill) for side in (query, key, value))
    mask = torch.zeros(1, tokens, dtype=torch.bool)
    mask[:, places] = True
    scales = {"alpha": alpha, "beta": beta}
    found = attend(form, *padded, **scales, key_mask=mask)[:, :, places]
    wanted = attend(form, query, key, value, **scales)
    assert_same(found, wanted, exponent_of(query, key, alpha, beta))


@given(case=cases(), fill=GARBAGE, padding=st.integers(1, 150), criterion=CRITERIA)
def test_padding_changes_no_statistic(case, fill, padding, criterion):
    query, key, *_ = case
    tokens = query.shape[2] + padding
    places = torch.arange(query.shape[2])
    padded = [spread_out(side, places, tokens, fill) for side in (query, key)]
    mask = (torch.arange(tokens) < query.shape[2])[None]
    for found, wanted in zip(
        match_moments(*padded, criterion=criterion, key_mask=mask),
        match_moments(query, key, criterion=criterion),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)


@pytest.mark.parametrize("form", FORMS)
@given(case=cases(), fill=GARBAGE, padding=st.integers(1, 150))
def test_padding_behind_changes_nothing(form, case, fill, padding):
    query, key, value, alpha, beta = case
    tokens = query.shape[2] + padding
    places = torch.arange(query.shape[2])
    padded = (spread_out(side, places, tokens, fill) for side in (query, key, value))
    mask = (torch.arange(tokens) < query.shape[2])[None]
    scales = {"alpha": alpha, "beta": beta}
    found = attend(form, *padded, **scales, key_mask=mask)[:, :, places]
    wanted = attend(form, query, key, value, **scales)
    exponent = max(exponent_of(query, key, alpha, beta), (query.norm() * key.norm()).item())
    assert_same(found, wanted, exponent)


@pytest.mark.parametrize("form", ["lln", "block", "diag", "window"])
@given(case=cases(), seed=SEEDS, scale=SCALES, fill=GARBAGE)
def test_batch_mates_change_nothing(form, case, seed, scale, fill):
    sample = case[:3]
    widths = {"width": sample[1].shape[-1], "value_width": sample[2].shape[-1]}
    mates = make_qkv(
        2, 2, sample[0].shape[2], **widths, dtype=torch.float64, scale=scale, seed=seed
    )
    mates[2][0] = fill
    together = (torch.cat([mate, own]) for own, mate in zip(sample, mates, strict=True))
    alpha, beta = match_moments(*sample[:2])
    exponent = exponent_of(*sample[:2], alpha.max().item(), beta.max().item())
    exponent = max(exponent, (sample[0].norm() * sample[1].norm()).item())
    assert_same(attend(form, *together)[2:], attend(form, *sample), 100 * exponent)


@st.composite
def packings(draw):
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 5, 63, 64, 65]), min_size=1, max_size=6))
    heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(SEEDS))
    width, value_width = draw(WIDTHS), draw(WIDTHS)
    shapes = ((heads * groups, width), (heads, width), (heads, value_width))
    packed = [
        torch.randn(sum(lengths), *shape, generator=generator, dtype=torch.float64)
        for shape in shapes
    ]
    return lengths, packed


def cut(packed, lengths):
    for part in zip(*(tensor.split(lengths) for tensor in packed), strict=True):
        yield [tensor.transpose(0, 1)[None] for tensor in part]


@pytest.mark.parametrize("diag", [False, True])
@pytest.mark.parametrize("matched", [False, True])
@given(packing=packings(), causal=st.booleans(), block=st.sampled_from([1, 3, 64, 1000]))
def test_packed_sequences_are_separate_calls(matched, diag, packing, causal, block):
    lengths, packed = packing
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    options = {"enable_gqa": True}
    if not matched:
        options |= {"alpha": 1.4, "beta": 1.9, "is_causal": causal}
    dense, varlen = lln_attention, lln_attention_varlen
    if diag:
        options |= {"block_size": block, "mix": 0.3}
        dense, varlen = lln_diag_attention, lln_diag_attention_varlen
    found = varlen(*packed, bounds, **options)
    parts = [dense(*part, **options)[0].transpose(0, 1) for part in cut(packed, lengths)]
    torch.testing.assert_close(found, torch.cat(parts), rtol=0, atol=1e-11)


@pytest.mark.parametrize("form", ["causal", "causal_diag", "causal_window"])
@given(
    case=cases(tokens=st.integers(2, 140)),
    cut_at=st.floats(0, 1, exclude_max=True),
    size=st.sampled_from([0.0, 1.0, 5.0, 100.0, 1e4]),
    seed=SEEDS,
)
def test_future_changes_no_causal_row(form, case, cut_at, size, seed):
    query, key, value, alpha, beta = case
    now = 1 + int(cut_at * (query.shape[2] - 1))
    scales = {"alpha": alpha, "beta": beta}
    before = attend(form, query, key, value, **scales)[:, :, :now]
    generator = torch.Generator().manual_seed(seed)
    changed = [side.clone() for side in (query, key, value)]
    for side in changed:
        future = side[:, :, now:]
        future.copy_(size * torch.randn(future.shape, generator=generator, dtype=side.dtype))
    after = attend(form, *changed, **scales)[:, :, :now]
    wanted_exponent = exponent_of(query, key, alpha, beta)
    softmax_exponent = (query[:, :, :now].norm() * key[:, :, :now].norm()).item()
    assert_same(after, before, max(wanted_exponent, softmax_exponent))


@pytest.mark.parametrize("causal", [False, True])
@given(case=cases(), extra=st.integers(0, 100), scale=st.sampled_from([None, 0.3, -1.0]))
def test_one_block_is_softmax_attention(causal, case, extra, scale):
    query, key, value, *_ = case
    options = {"block_size": query.shape[2] + extra, "is_causal": causal, "scale": scale}
    found = block_diagonal_attention(query, key, value, **options)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = factor * torch.einsum("bhtd,bhsd->bhts", query, key)
    if causal:
        scores += torch.full_like(scores, -torch.inf).triu(1)
    wanted = torch.einsum("bhts,bhse->bhte", scores.softmax(-1), value)
    assert_same(found, wanted, (query.norm() * key.norm()).item())


@given(case=cases())
def test_step_by_step_is_parallel(case):
    query, key, value, alpha, beta = case
    widths = query.shape[-1], value.shape[-1]
    summary = KeySummary.empty(1, 2, *widths, beta, dtype=torch.float64)
    rows = []
    for token in range(query.shape[2]):
        now = slice(token, token + 1)
        summary.append(key[:, :, now], value[:, :, now])
        rows.append(summary.read(query[:, :, now], alpha))
    wanted = lln_attention(query, key, value, alpha=alpha, beta=beta, is_causal=True)
    assert_same(torch.cat(rows, 2), wanted, 10 * exponent_of(query, key, alpha, beta))


@pytest.mark.parametrize("form", FORMS)
@given(case=cases(), seed=SEEDS, factor=st.floats(-1e3, 1e3))
def test_linear_in_the_values(form, case, seed, factor):
    query, key, value, alpha, beta = case
    generator = torch.Generator().manual_seed(seed)
    other = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    scales = {"alpha": alpha, "beta": beta}
    found = attend(form, query, key, value + factor * other, **scales)
    first, second = (attend(form, query, key, side, **scales) for side in (value, other))
    torch.testing.assert_close(
        found, first + factor * second, rtol=0, atol=1e-12 * (5 + abs(factor))
    )
