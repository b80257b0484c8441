"""What the authors' released code gets wrong, each shown to be right here, with the numbers.

Where it matters, the authors' way is done beside ours, so that a test that could not see the flaw
would fail.
"""

from pathlib import Path

import pytest
import torch

import lln
from lln import (
    InvalidInputError,
    lln_attention,
    lln_diag_attention,
    match_moments,
    reference,
)
from lln.cpu import building
from lln.testing import assert_close, largest_error, make_qkv

CRITERIA = ["variance", "entropy"]
FUNCTIONS = [lln_attention, lln_diag_attention]


def relative_change(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


def exact(query, key, value, alpha, beta, causal=False):
    keep = reference.causal_keep(query.shape[-2]) if causal else None
    inputs = [torch.as_tensor(side).double() for side in (query, key, value, alpha, beta)]
    return reference.lln_attention(*inputs, keep=keep)


def authors_attention(query, key, value, alpha, beta, causal=False, eps=1e-5):
    """Eq. (8) as released: one global key maximum, then a sum that eps keeps from zero."""
    weights_q = (alpha * query - (alpha * query).amax(-1, keepdim=True)).exp()
    weights_k = (beta * key - (beta * key).amax((-1, -2), keepdim=True)).exp()
    score = weights_q @ weights_k.mT
    score = score.tril() if causal else score
    return score @ value / (score.sum(-1, keepdim=True) + eps)


# 1. One standard deviation for the whole tensor.


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("std", [1.5, 2.0, 3.0])
def test_batch_mates_change_nothing(std, criterion, function):
    sample = make_qkv(1, 4, 128, 16)
    mates = make_qkv(3, 4, 128, 16, scale=std, seed=1)
    alone = function(*sample, matching=criterion)
    beside = function(*map(torch.cat, zip(sample, mates, strict=True)), matching=criterion)[:1]
    torch.testing.assert_close(beside, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("std", "change"), [(1.5, 0.1), (2.0, 0.2), (3.0, 0.3)])
def test_batch_mates_do_change_the_authors_statistic(std, change):
    sample = make_qkv(1, 4, 128, 16)
    mates = make_qkv(3, 4, 128, 16, scale=std, seed=1)
    alone = lln_attention(*sample, matching="paper")
    together = tuple(map(torch.cat, zip(sample, mates, strict=True)))
    beside = lln_attention(*together, matching="paper")[:1]
    assert relative_change(beside, alone) > change


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("criterion", [*CRITERIA, "paper"])
@pytest.mark.parametrize("fill", [0.0, torch.nan, torch.inf, -1e8])
def test_masked_padding_changes_nothing(fill, criterion, function):
    sample = make_qkv(2, 4, 100, 16)
    padding = torch.full((2, 4, 100, 16), fill)
    padded = [torch.cat([tensor, padding], dim=2) for tensor in sample]
    mask = torch.arange(200).expand(2, 200) < 100
    alone = function(*sample, matching=criterion)
    found = function(*padded, key_mask=mask, matching=criterion)[:, :, :100]
    # The last block is short in one and padded in the other: sums of another order.
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-6)


def test_zero_padding_without_mask_would_change_much():
    sample = make_qkv(2, 4, 100, 16)
    padded = [torch.cat([tensor, torch.zeros_like(tensor)], dim=2) for tensor in sample]
    assert relative_change(lln_attention(*padded)[:, :, :100], lln_attention(*sample)) > 0.2


# 2. A causal row that sees the future.


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("tokens", [5, 64, 100])
def test_last_token_changes_no_earlier_row(tokens, function):
    inputs = make_qkv(2, 2, tokens, 8)
    options = {"alpha": 2.0, "beta": 2.0, "is_causal": True}
    before = function(*inputs, **options)
    for tensor in inputs:
        tensor[:, :, -1] *= 5
    after = function(*inputs, **options)
    torch.testing.assert_close(after[:, :, :-1], before[:, :, :-1], rtol=0, atol=2e-6)
    assert relative_change(after[:, :, -1], before[:, :, -1]) > 0.1


def test_statistics_of_the_sequence_itself_are_refused():
    with pytest.raises(lln.CausalStatisticsError):
        lln_attention(*make_qkv(), is_causal=True)


# 3. eps and one global key maximum.


@pytest.mark.parametrize(("causal", "their_error"), [(False, 0.1), (True, 0.4)])
def test_wide_scores(causal, their_error):
    query, key, value = make_qkv(1, 1, 256, 64, scale=2.0)
    alpha, beta = match_moments(query, key, criterion="paper")
    wanted = exact(query, key, value, alpha, beta, causal)
    found = lln_attention(query, key, value, alpha=alpha, beta=beta, is_causal=causal)
    assert_close(found, wanted)
    assert relative_change(found.double(), wanted) < 2e-6
    theirs = authors_attention(query, key, value, alpha, beta, causal)
    assert relative_change(theirs.double(), wanted) > their_error


def with_outlier_channel(query, key, size):
    query[..., 0] -= size
    key[..., 0] += size


def with_outlier_entry(query, key, size):
    key[..., key.shape[-2] // 2, 1] = size


@pytest.mark.parametrize(
    ("spoil", "size", "causal", "their_error"),
    [
        (with_outlier_channel, 8, False, 0.8),
        (with_outlier_channel, 8, True, 0.9),
        (with_outlier_channel, 20, False, 0.99),
        (with_outlier_channel, 20, True, 0.99),
        (with_outlier_entry, 15, False, 0.01),
        (with_outlier_entry, 15, True, 0.3),
        (with_outlier_entry, 80, False, 0.01),
        (with_outlier_entry, 80, True, 0.3),
        (with_outlier_entry, -80, False, 0.0),
        (with_outlier_entry, -80, True, 0.0),
    ],
)
def test_outliers(spoil, size, causal, their_error):
    query, key, value = make_qkv(1, 2, 130, 8)
    spoil(query, key, size)
    wanted = exact(query, key, value, 2.0, 2.0, causal)
    found = lln_attention(query, key, value, alpha=2.0, beta=2.0, is_causal=causal)
    assert_close(found, wanted)
    assert relative_change(found.double(), wanted) < 2e-6
    theirs = authors_attention(query, key, value, 2.0, 2.0, causal)
    assert relative_change(theirs.double(), wanted) > their_error


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("spoil", "size"),
    [(with_outlier_channel, 20), (with_outlier_entry, 15), (with_outlier_entry, 80)],
)
def test_outliers_keep_their_gradients(spoil, size, causal):
    inputs = make_qkv(1, 2, 130, 8)
    spoil(*inputs[:2], size)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    found = lln_attention(*leaves, alpha=2.0, beta=2.0, is_causal=causal)
    wanted = exact(*doubles, 2.0, 2.0, causal)
    upstream = torch.randn_like(found)
    grads = torch.autograd.grad(found, leaves, upstream)
    exact_grads = torch.autograd.grad(wanted, doubles, upstream.double())
    terms = 2.0 * (upstream.norm(dim=-1).max() * inputs[2].norm(dim=-1).max()).item()
    for grad, expected in zip(grads, exact_grads, strict=True):
        # Where one key takes all, the gradients are small differences of large terms.
        saturated = expected.abs().max().item() < 1e-4 * terms
        assert_close(grad, expected, backward=True, magnitude=terms if saturated else None)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_computed_wide(dtype, function):
    inputs = make_qkv(2, 3, 100, 16, dtype=dtype)
    wide = function(*(tensor.float() for tensor in inputs))
    assert torch.equal(function(*inputs), wide.to(dtype))


@pytest.mark.parametrize("causal", [False, True])
def test_narrow_inputs_lose_one_rounding(causal):
    inputs = make_qkv(2, 3, 100, 16, dtype=torch.bfloat16)
    found = lln_attention(*inputs, alpha=2.0, beta=2.0, is_causal=causal)
    wanted = exact(*inputs, 2.0, 2.0, causal)
    half_step = torch.finfo(torch.bfloat16).eps / 2
    assert largest_error(found, wanted) <= 1.01 * half_step * wanted.abs().max().item()


# 4. A mask that is never read, and means causal.


@pytest.mark.parametrize("function", FUNCTIONS)
def test_mask_of_all_true_is_no_mask(function):
    inputs = make_qkv(2, 3, 70, 8)
    mask = torch.ones(2, 70, dtype=torch.bool)
    torch.testing.assert_close(
        function(*inputs, key_mask=mask), function(*inputs), rtol=0, atol=1e-6
    )
    options = {"alpha": 2.0, "beta": 2.0, "is_causal": True}
    torch.testing.assert_close(
        function(*inputs, key_mask=mask, **options), function(*inputs, **options), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_mask_hides_exactly_its_keys(function, causal):
    query, key, value = make_qkv(1, 2, 70, 8, value_width=70)
    value[:] = torch.eye(70)
    mask = torch.rand(1, 70) < 0.5
    options = {"alpha": 2.0, "beta": 2.0, "is_causal": causal, "key_mask": mask}
    weights = function(query, key, value, **options)
    assert not weights[..., ~mask[0]].any()
    assert (weights[:, :, -1][..., mask[0]] > 0).all() or function is lln_diag_attention
    assert torch.equal(weights[0, 0].triu(1).any(), torch.tensor(not causal))


# 5. Diagonal blocks.


@pytest.mark.parametrize("value_width", [3, 24])
@pytest.mark.parametrize("causal", [False, True])
def test_value_width_is_free(value_width, causal):
    inputs = make_qkv(1, 2, 20, 8, value_width=value_width)
    found = lln_diag_attention(*inputs, alpha=2.0, beta=2.0, is_causal=causal)
    keep = reference.causal_keep(20) if causal else None
    doubles = (tensor.double() for tensor in inputs)
    assert_close(found, reference.lln_diag_attention(*doubles, 2.0, 2.0, 8, keep=keep))


def test_default_block_is_the_head_width_and_the_rest_its_own_block():
    query, key, value = make_qkv(1, 1, 20, 8, value_width=20)
    value[:] = torch.eye(20)
    weights = lln_diag_attention(query, key, value, mix=0.0)[0, 0]
    block = torch.tensor([0] * 8 + [1] * 8 + [2] * 4)
    assert torch.equal(weights > 0, block[:, None] == block)


@pytest.mark.parametrize("keys", [19, 21])
def test_other_number_of_keys_is_refused_by_the_diagonal(keys):
    with pytest.raises(InvalidInputError, match="T = 20 and S = "):
        lln_diag_attention(*make_qkv(1, 2, 20, 8, keys=keys))


# 6. Constants and single elements.


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("criterion", [*CRITERIA, "paper"])
@pytest.mark.parametrize("constant", ["query", "key", "both"])
@pytest.mark.parametrize("level", [0.0, 0.1, 1000.0])
def test_constant_inputs_are_finite(level, constant, criterion, function):
    query, key, value = make_qkv(2, 3, 7, 5)
    if constant != "key":
        query.fill_(level)
    if constant != "query":
        key.fill_(level)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = function(*leaves, matching=criterion)
    assert out.isfinite().all()
    out.square().sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("criterion", [*CRITERIA, "paper"])
@pytest.mark.parametrize("width", [1, 4])
def test_one_token_attends_to_itself(width, criterion, function):
    query, key, value = make_qkv(1, 1, 1, width)
    found = function(query, key, value, matching=criterion)
    torch.testing.assert_close(found, value, rtol=1e-6, atol=0)


# 7. A compiled extension.


def test_package_is_not_compiled():
    package = Path(lln.__file__).parent
    files = [path for path in package.rglob("*") if path.is_file()]
    assert ".py" in {path.suffix for path in files}
    compiled = {".so", ".pyd", ".dylib", ".dll", ".c", ".cc", ".cpp", ".cu"}
    # Everything runs without them; an installation compiles the passes of a CPU where it finds a
    # compiler, and `lln build-launcher` the launcher.
    found = {path for path in files if path.suffix in compiled} - {building.LIBRARY}
    assert found == {
        package / "kernels" / "launching" / "launcher.cpp",
        package / "cpu" / "cpp" / "library.cpp",
        package / "cpu" / "cpp" / "passes.cpp",
    }
