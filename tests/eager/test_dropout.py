"""Dropout of whole keys."""

import pytest
import torch

from lln import (
    block_diagonal_attention,
    lln_attention,
    lln_attention_varlen,
    lln_diag_attention,
    window_attention,
)
from lln.eager.dropout import drop_keys
from lln.testing import make_qkv

P = 0.3
TOKENS = 24


def attend(form, *qkv, **options):
    if form == "varlen":
        packed = (side[0].transpose(0, 1) for side in qkv)
        bounds = torch.tensor([0, TOKENS])
        out = lln_attention_varlen(*packed, bounds, alpha=1.5, beta=1.5, **options)
        return out.transpose(0, 1)[None]
    if form == "block":
        return block_diagonal_attention(*qkv, block_size=10, **options)
    if form == "window":
        return window_attention(*qkv, window=6, **options)
    options |= {"alpha": 1.5, "beta": 1.5, "is_causal": form == "causal"}
    if form == "diag":
        return lln_diag_attention(*qkv, block_size=10, **options)
    return lln_attention(*qkv, **options)


FORMS = ["lln", "causal", "block", "diag", "window", "varlen"]


def weights_of(form, **options):
    """The implied attention matrix: attention to the identity."""
    query, key, _ = make_qkv(1, 3, TOKENS, 4, dtype=torch.float64)
    identity = torch.eye(TOKENS, dtype=torch.float64).expand(1, 3, -1, -1)
    return attend(form, query, key, identity, **options)


@pytest.mark.parametrize("form", FORMS)
def test_columns_are_dropped_whole_and_the_others_scaled(form):
    plain = weights_of(form)
    dropped = weights_of(form, dropout_p=P)
    gone = (dropped == 0).all(-2)
    assert 0.1 < gone.double().mean() < 0.6
    wanted = torch.where(gone.unsqueeze(-2), 0.0, plain / (1 - P))
    torch.testing.assert_close(dropped, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("form", FORMS)
def test_heads_drop_different_keys(form):
    gone = (weights_of(form, dropout_p=P) == 0).all(-2)[0]
    assert not torch.equal(gone[0], gone[1])


@pytest.mark.parametrize("form", FORMS)
def test_expectation_is_attention_without_dropout(form):
    draws = 300
    plain = weights_of(form)
    mean = sum(weights_of(form, dropout_p=P) for _ in range(draws)) / draws
    # A kept column is 1 / (1 − p): its standard deviation is √(p / (1 − p)).
    deviation = (P / (1 - P) / draws) ** 0.5
    assert ((mean - plain).abs() <= 5 * deviation * plain + 1e-12).all()


@pytest.mark.parametrize("form", FORMS)
def test_no_dropout_is_the_identity_and_draws_nothing(form):
    before = torch.get_rng_state()
    assert torch.equal(weights_of(form, dropout_p=0.0), weights_of(form))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("form", FORMS)
def test_seed_decides(form):
    torch.manual_seed(3)
    first = weights_of(form, dropout_p=P)
    second = weights_of(form, dropout_p=P)
    torch.manual_seed(3)
    assert torch.equal(weights_of(form, dropout_p=P), first)
    assert not torch.equal(first, second)


def test_both_branches_drop_the_same_keys():
    query, key, _ = make_qkv(1, 3, TOKENS, 4, dtype=torch.float64)
    identity = torch.eye(TOKENS, dtype=torch.float64).expand(1, 3, -1, -1)
    masks = {}
    for mix in (0.0, 0.5, 1.0):
        torch.manual_seed(5)
        options = {"mix": mix, "dropout_p": P, "block_size": TOKENS}
        weights = lln_diag_attention(query, key, identity, alpha=1.5, beta=1.5, **options)
        masks[mix] = (weights == 0).all(-2)
    # With masks of their own, a column would vanish from the half sum only if dropped twice.
    assert masks[0.5].any()
    assert torch.equal(masks[0.0], masks[1.0])
    assert torch.equal(masks[0.0], masks[0.5])


@pytest.mark.parametrize("form", FORMS)
def test_gradient_reaches_kept_values_only(form):
    query, key, value = make_qkv(1, 3, TOKENS, 4, dtype=torch.float64)
    torch.manual_seed(2)
    gone = (weights_of(form, dropout_p=P) == 0).all(-2)
    torch.manual_seed(2)
    leaf = value.requires_grad_()
    attend(form, query, key, leaf, dropout_p=P).sum().backward()
    assert torch.equal((leaf.grad == 0).all(-1), gone)


def test_dropout_of_a_masked_key_with_nan():
    query, key, value = make_qkv(1, 3, TOKENS, 4)
    value[:, :, 5] = torch.nan
    mask = torch.ones(1, TOKENS, dtype=torch.bool)
    mask[:, 5] = False
    assert lln_diag_attention(query, key, value, key_mask=mask, dropout_p=P).isfinite().all()


@pytest.mark.usefixtures("poisoned")
def test_mask_is_drawn_not_read_from_fresh_memory():
    value = torch.ones(4, 1000, 2)
    dropped = drop_keys(value, P)
    assert set(dropped.unique().tolist()) == {0.0, (value / (1 - P)).max().item()}
    assert abs((dropped == 0).double().mean().item() - P) < 5 * (P * (1 - P) / 4000) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_probability_is_exact_in_narrow_dtypes(dtype):
    # Bernoulli drawn in a narrow dtype would round 1 − p.
    kept = drop_keys(torch.ones(100_000, 1, dtype=dtype), 0.001) != 0
    assert abs(kept.double().mean().item() - 0.999) < 5 * (0.001 / 100_000) ** 0.5
