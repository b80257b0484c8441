"""Attention inside a sliding window: against the float64 reference, at its edges, misused."""

import pytest
import torch
import torch._dynamo.testing
from tests.functional.test_reference_agreement import (
    DTYPES,
    MASKS,
    assert_agrees,
    make_mask,
    name_of,
    sizes,
    upcast,
)
from torch.nn import functional as F

import lln
from lln import InvalidInputError, UnexpectedArgumentError, reference
from lln.errors import BackendUnavailableError
from lln.testing import LAYOUTS, make_qkv

causal_or_not = pytest.mark.parametrize("is_causal", [False, True], ids=["both sides", "causal"])
BOUNDS = torch.tensor([0, 0, 5, 40, 40, 41, 70, 70])


def check(shape, dtype, *, window, mask=None, layout="contiguous", **options):
    """Plain PyTorch against the reference, with every gradient."""
    leaves = list(make_qkv(**shape, dtype=dtype, layout=layout, requires_grad=True))
    key_mask = None if mask is None else make_mask(mask, shape["batch"], shape["tokens"])
    options |= {"window": window, "key_mask": key_mask, "enable_gqa": True}
    found = lln.window_attention(*leaves, impl="eager", **options)
    exact = upcast(leaves)
    assert_agrees(found, lln.window_attention(*exact, impl="reference", **options), leaves, exact)


@causal_or_not
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("window", [0, 1, 7, 16, 33, 400])
@pytest.mark.parametrize("tokens", [1, 16, 65, 150])
def test_lengths_and_windows(tokens, window, dtype, is_causal):
    check(sizes(1, 2, tokens, 8), dtype, window=window, is_causal=is_causal)


@causal_or_not
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, dtype, is_causal):
    check(sizes(2, 2, 70, 8), dtype, window=5, mask=mask, is_causal=is_causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "shape",
    [
        sizes(1, 4, 40, 16, key_heads=2),
        sizes(2, 3, 40, 8, key_heads=1, value_width=20),
        sizes(1, 1, 40, 1, value_width=1),
        sizes(1, 2, 40, 128),
        sizes(0, 2, 40, 8),
        sizes(2, 2, 0, 8),
    ],
    ids=name_of,
)
def test_shapes(shape, dtype):
    check(shape, dtype, window=9)
    check(shape, dtype, window=9, mask="holes", scale=-0.1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    check(sizes(3, 3, 70, 8), torch.float32, window=6, layout=layout, mask="holes")


@causal_or_not
def test_long_windows_reach_over_many_chunks(is_causal):
    check(sizes(1, 1, 700, 4), torch.float32, window=300, is_causal=is_causal)


@pytest.mark.parametrize("impl", ["auto", "eager", "reference"])
@causal_or_not
def test_a_band_as_a_mask_gives_the_same(is_causal, impl):
    query, key, value = make_qkv(2, 3, 50, 8, dtype=torch.float64)
    place = torch.arange(50)
    distance = place[:, None] - place
    seen = (distance <= 6) & (distance >= (0 if is_causal else -6))
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    found = lln.window_attention(query, key, value, window=6, is_causal=is_causal, impl=impl)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(reference.window_keep(50, 6, is_causal=is_causal), seen)


@pytest.mark.parametrize("impl", ["auto", "eager", "reference"])
@causal_or_not
@pytest.mark.parametrize("window", [39, 40, 2**40])
def test_a_window_of_all_tokens_is_softmax(window, is_causal, impl):
    inputs = make_qkv(2, 3, 40, 8, dtype=torch.float64)
    found = lln.window_attention(*inputs, window=window, is_causal=is_causal, impl=impl)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(*inputs, is_causal=is_causal))


@pytest.mark.parametrize("impl", ["auto", "eager", "reference"])
def test_a_window_of_no_neighbours_is_the_value(impl):
    query, key, value = make_qkv(2, 3, 40, 8)
    found = lln.window_attention(100 * query, key, value, window=0, impl=impl)
    torch.testing.assert_close(found, value)


# Packed sequences


@causal_or_not
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("window", [0, 4, 100])
def test_packed_sequences_against_the_reference(window, dtype, is_causal):
    """Among them empty ones, at the beginning, in the middle and at the end."""
    batched = make_qkv(1, 4, 70, 8, key_heads=2, value_width=5, dtype=dtype)
    leaves = [side[0].transpose(0, 1).clone().requires_grad_() for side in batched]
    options = {"window": window, "is_causal": is_causal, "enable_gqa": True, "scale": 0.3}
    found = lln.window_attention_varlen(*leaves, BOUNDS, impl="eager", **options)
    exact = upcast(leaves)
    expected = lln.window_attention_varlen(*exact, BOUNDS, impl="reference", **options)
    assert_agrees(found, expected, leaves, exact, token_axis=0)


@pytest.mark.parametrize("impl", ["auto", "eager", "reference"])
@causal_or_not
@pytest.mark.parametrize("longest", [None, 35])
def test_packed_sequences_equal_one_call_each(longest, is_causal, impl):
    query, key, value = torch.randn(3, 70, 2, 8, dtype=torch.float64)
    options = {"window": 6, "is_causal": is_causal, "impl": impl}
    bounds = BOUNDS.int()
    found = lln.window_attention_varlen(query, key, value, bounds, max_seqlen=longest, **options)
    for start, end in zip(BOUNDS[:-1].tolist(), BOUNDS[1:].tolist(), strict=True):
        own = [side[start:end].transpose(0, 1)[None] for side in (query, key, value)]
        expected = lln.window_attention(*own, **options)[0].transpose(0, 1)
        torch.testing.assert_close(found[start:end], expected)


@pytest.mark.parametrize("bounds", [[0], [0, 0, 0]], ids=str)
def test_no_packed_tokens(bounds):
    found = lln.window_attention_varlen(*torch.randn(3, 0, 2, 4), torch.tensor(bounds), window=2)
    assert found.shape == (0, 2, 4)


# Masks and numbers that are none


@pytest.mark.parametrize("impl", ["auto", "eager", "reference"])
@causal_or_not
def test_rows_that_see_no_valid_key_give_zeros(is_causal, impl):
    inputs = make_qkv(2, 2, 60, 8, requires_grad=True)
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[0, 20:50] = False
    mask[1] = False
    out = lln.window_attention(*inputs, window=4, key_mask=mask, is_causal=is_causal, impl=impl)
    seen = (reference.window_keep(60, 4, is_causal=is_causal) & mask[:, None]).any(-1)
    assert (out.transpose(1, 2)[~seen] == 0).all()
    assert (out.transpose(1, 2)[seen] != 0).all()
    gradients = torch.autograd.grad(out.square().sum(), inputs)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all((gradient[1] == 0).all() for gradient in gradients)


@pytest.mark.parametrize("impl", ["auto", "eager", "reference"])
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_masked_keys_have_no_effect_whatever_they_hold(garbage, impl):
    query, key, value = make_qkv(2, 2, 40, 8)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1, 17:30] = False
    other_key, other_value = key.clone(), value.clone()
    other_key[1, :, 17:30] = other_value[1, :, 17:30] = garbage
    options = {"window": 6, "key_mask": mask, "impl": impl}
    leaves = [query.requires_grad_(), other_key.requires_grad_(), other_value.requires_grad_()]
    out = lln.window_attention(*leaves, **options)
    torch.testing.assert_close(out, lln.window_attention(query, key, value, **options))
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("impl", ["auto", "eager", "reference"])
@pytest.mark.parametrize("broken", [0, 1, 2], ids=["query", "key", "value"])
def test_nan_shows_where_it_is_seen_and_not_far_away(broken, impl):
    inputs = list(make_qkv(2, 2, 400, 8))
    inputs[broken][0, 1, 200] = torch.nan
    out = lln.window_attention(*inputs, window=3, impl=impl)
    reach = 0 if broken == 0 else 3
    assert out[0, 1, 200 - reach : 201 + reach].isnan().all()
    assert out[0, 0].isfinite().all()
    assert out[1].isfinite().all()
    if impl != "reference":
        # Rows near those may show it too; these are further away than any chunk reaches.
        assert out[0, 1, :60].isfinite().all()
        assert out[0, 1, 340:].isfinite().all()


# Gradients


@causal_or_not
@pytest.mark.parametrize("masked", [False, True])
def test_first_and_second_derivatives_agree_with_differences(masked, is_causal):
    inputs = make_qkv(1, 2, 5, 2, key_heads=1, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False, True, True, False]]) if masked else None

    def attend(*sides):
        options = {"window": 2, "is_causal": is_causal, "key_mask": mask, "enable_gqa": True}
        return lln.window_attention(*sides, impl="eager", **options)

    torch.autograd.gradcheck(attend, inputs)
    torch.autograd.gradgradcheck(attend, inputs)


def test_packed_derivatives_agree_with_differences():
    inputs = [torch.randn(6, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def attend(*sides):
        bounds = torch.tensor([0, 4, 4, 6])
        return lln.window_attention_varlen(*sides, bounds, window=1, impl="eager")

    torch.autograd.gradcheck(attend, inputs)
    torch.autograd.gradgradcheck(attend, inputs)


def test_dropout_is_of_whole_keys_and_repeats():
    query, key, _ = make_qkv(1, 2, 50, 8)
    eye = torch.eye(50).expand(1, 2, 50, 50)
    torch.manual_seed(0)
    found = lln.window_attention(query, key, eye, window=5, dropout_p=0.5)
    plain = lln.window_attention(query, key, eye, window=5)
    dropped = (found == 0).all(-2)
    assert 0.2 < dropped.float().mean() < 0.8
    torch.testing.assert_close(found, torch.where(dropped.unsqueeze(-2), 0.0, 2 * plain))
    torch.manual_seed(0)
    assert torch.equal(found, lln.window_attention(query, key, eye, window=5, dropout_p=0.5))


# Compilers; the rest is in test_transforms.py


@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_graph_for_every_length(masked):
    torch._dynamo.reset()

    def attend(query, key, value, mask):
        return lln.window_attention(query, key, value, window=5, key_mask=mask)

    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (70, 41, 16):
        inputs = make_qkv(2, 2, tokens, 8)
        mask = make_mask("holes", 2, tokens) if masked else None
        torch.testing.assert_close(compiled(*inputs, mask), attend(*inputs, mask))
    assert counter.frame_count == 1
    torch._dynamo.reset()


# Misuse


Q, K, V = torch.randn(3, 1, 2, 10, 4)
PACKED = torch.randn(3, 10, 2, 4)
ENDS = torch.tensor([0, 10])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: lln.window_attention(Q, K, V, window=-1), "window must be .* at least 0, got -1"),
        (lambda: lln.window_attention(Q, K, V, window=1.5), "window must be .* got float 1.5"),
        (lambda: lln.window_attention(Q, K, V, window=None), "window must be .* got None"),
        (lambda: lln.window_attention(Q, K, V, window=True), "window must be .* got True"),
        (lambda: lln.window_attention(Q, K, V, window=(4, 4)), "window must be .* got tuple"),
        (lambda: lln.window_attention(Q, K[:, :, :9], V[:, :, :9], window=2), "T = 10 and S = 9"),
        (lambda: lln.window_attention(Q, K[:, :1], V[:, :1], window=2), "enable_gqa"),
        (lambda: lln.window_attention(Q, K, V, window=2, scale=0.0), "scale must be finite"),
        (lambda: lln.window_attention(Q, K, V, window=2, dropout_p=1.5), "dropout_p"),
        (lambda: lln.window_attention(Q, K, V, window=2, is_causal=1), "is_causal must be True or"),
        (lambda: lln.window_attention(Q, K, V, window=2, impl="fast"), "impl must be one of"),
        (lambda: lln.window_attention(Q, K, V, window=2, key_mask=Q), "key_mask must be"),
        (lambda: lln.window_attention(Q[0], K[0], V[0], window=2), "query must have 4 dimensions"),
        (
            lambda: lln.window_attention_varlen(*PACKED, ENDS, window=2, key_mask=ENDS > 0),
            "key_mask .* packed",
        ),
        (lambda: lln.window_attention_varlen(*PACKED, ENDS, window=-2), "window must be .* got -2"),
        (lambda: lln.window_attention_varlen(*PACKED, ENDS[1:], window=2), "cu_seqlens"),
        (
            lambda: lln.window_attention_varlen(Q, K, V, ENDS, window=2),
            "query must have 3 dimensions",
        ),
    ],
)
def test_misuse_gets_a_sentence(call, said):
    with pytest.raises(InvalidInputError, match=said) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 300


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: lln.window_attention(Q, K, V), "window_attention needs window"),
        (lambda: lln.window_attention(Q, K, V, window=2, alpha=1.0), "has no argument 'alpha'"),
        (lambda: lln.window_attention(Q, K, V, window=2, attn_mask=Q), "has no attn_mask"),
        (lambda: lln.window_attention_varlen(*PACKED, window=2), "needs cu_seqlens"),
    ],
)
def test_arguments_that_do_not_fit_get_a_sentence(call, said):
    with pytest.raises(UnexpectedArgumentError, match=said):
        call()


def test_kernels_that_cannot_run_say_why():
    with pytest.raises(BackendUnavailableError, match="triton"):
        lln.window_attention(Q, K, V, window=2, impl="triton")
