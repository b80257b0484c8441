"""Attention to a window, sinks and pages: against the float64 reference, at its edges, misused."""

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
from lln import InvalidInputError, UnexpectedArgumentError
from lln.errors import BackendUnavailableError
from lln.testing import LAYOUTS, assert_close, make_qkv

causal_or_not = pytest.mark.parametrize("is_causal", [False, True], ids=["both sides", "causal"])
every_impl = pytest.mark.parametrize("impl", ["auto", "eager", "cpu", "reference"])
by_torch_or_compiled = pytest.mark.parametrize("impl", ["eager", "cpu"])
BOUNDS = torch.tensor([0, 0, 5, 40, 40, 41, 70, 70])
FORM = {"window": 6, "sinks": 3, "pages": 3, "page_size": 4}


def choose(query, key, form, **options):
    """The choice in float64, so that both sides of a comparison read the same pages."""
    sizes = {name: form[name] for name in ("window", "sinks", "page_size")}
    options |= {"enable_gqa": True}
    return lln.choose_pages(query.double(), key.double(), form["pages"], **sizes, **options)


def dtype_of(impl):
    """The most precise that it computes in."""
    return torch.float32 if impl == "cpu" else torch.float64


def check(
    shape, dtype, impl, *, mask=None, layout="contiguous", scale=None, is_causal=False, **form
):
    """A way against the reference; plain PyTorch with every gradient."""
    form = FORM | form
    if impl == "cpu" and dtype == torch.float64:
        dtype = torch.float32
    leaves = list(make_qkv(**shape, dtype=dtype, layout=layout, requires_grad=True))
    key_mask = None if mask is None else make_mask(mask, shape["batch"], shape["tokens"])
    options = {"key_mask": key_mask, "is_causal": is_causal, "scale": scale}
    form["pages"] = choose(*(side.detach() for side in leaves[:2]), form, **options)
    options |= form | {"enable_gqa": True}
    found = lln.page_attention(*leaves, impl="eager", **options)
    exact = upcast(leaves)
    expected = lln.page_attention(*exact, impl="reference", **options)
    if impl == "eager":
        assert_agrees(found, expected, leaves, exact)
        return
    with torch.no_grad():
        compiled = lln.page_attention(*leaves, impl="cpu", **options)
    assert compiled.dtype == dtype
    assert_close(compiled, expected, found)


@causal_or_not
@by_torch_or_compiled
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"window": 0, "sinks": 0},
        {"pages": 0},
        {"pages": 100},
        {"page_size": 1, "pages": 5},
        {"sinks": 200},
        {"window": 33, "page_size": 16},
    ],
    ids=name_of,
)
def test_lengths_and_forms(form, is_causal, impl):
    for tokens, dtype in zip((1, 17, 90, 90), DTYPES, strict=False):
        check(sizes(1, 2, tokens, 8), dtype, impl, is_causal=is_causal, **form)


@causal_or_not
@by_torch_or_compiled
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, is_causal, impl):
    check(sizes(2, 2, 70, 8, key_heads=1), torch.float32, impl, mask=mask, is_causal=is_causal)


@by_torch_or_compiled
@pytest.mark.parametrize(
    "shape",
    [
        sizes(1, 4, 40, 16, key_heads=2),
        sizes(2, 3, 40, 8, key_heads=1, value_width=20),
        sizes(1, 1, 40, 1, value_width=1),
        sizes(0, 2, 40, 8),
        sizes(2, 2, 0, 8),
    ],
    ids=name_of,
)
def test_shapes(shape, impl):
    check(shape, torch.bfloat16, impl)
    check(shape, torch.float32, impl, mask="holes", scale=-0.1)


@by_torch_or_compiled
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, impl):
    check(sizes(3, 3, 70, 8), torch.float32, impl, layout=layout, mask="holes")


def test_many_rows_are_computed_in_parts(monkeypatch):
    query, key, value = make_qkv(2, 4, 90, 8, key_heads=2)
    form = FORM | {"is_causal": True, "enable_gqa": True, "impl": "eager"}
    expected = lln.page_attention(query, key, value, **form)
    monkeypatch.setattr("lln.eager.page_choice._MOST_SCORES", 5000)
    monkeypatch.setattr("lln.eager.page_attention._MOST_COPIED", 5000)
    torch.testing.assert_close(lln.page_attention(query, key, value, **form), expected)


@every_impl
@causal_or_not
@pytest.mark.parametrize("form", [{"pages": 20}, {"window": 70}, {"sinks": 70}], ids=name_of)
def test_parts_that_hold_all_tokens_are_softmax(form, is_causal, impl):
    inputs = make_qkv(2, 3, 70, 8, dtype=dtype_of(impl))
    found = lln.page_attention(*inputs, **FORM | form, is_causal=is_causal, impl=impl)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(*inputs, is_causal=is_causal))


@every_impl
@causal_or_not
def test_a_window_alone(is_causal, impl):
    inputs = make_qkv(2, 3, 70, 8, dtype=dtype_of(impl))
    options = {"window": 6, "is_causal": is_causal, "impl": impl}
    found = lln.page_attention(*inputs, sinks=0, pages=0, **options)
    torch.testing.assert_close(found, lln.window_attention(*inputs, **options))


@every_impl
def test_the_last_tokens_of_a_longer_text(impl):
    """What a cache holds: the keys of all tokens, and the queries of the last ones."""
    query, key, value = make_qkv(2, 4, 60, 8, key_heads=2, dtype=dtype_of(impl))
    mask = make_mask("left", 2, 60)
    options = FORM | {"is_causal": True, "enable_gqa": True, "impl": impl, "key_mask": mask}
    whole = lln.page_attention(query, key, value, **options)
    for last in (1, 7, 60):
        found = lln.page_attention(query[:, :, 60 - last :], key, value, **options)
        torch.testing.assert_close(found, whole[:, :, 60 - last :])


@every_impl
def test_causal_rows_do_not_see_what_comes_later(impl):
    query, key, value = make_qkv(2, 4, 60, 8, key_heads=2, dtype=dtype_of(impl))
    options = FORM | {"is_causal": True, "enable_gqa": True, "impl": impl}
    before = lln.page_attention(query, key, value, **options)
    for side in (query, key, value):
        side[:, :, 40:] = 7 * torch.randn_like(side[:, :, 40:])
    after = lln.page_attention(query, key, value, **options)
    torch.testing.assert_close(after[:, :, :40], before[:, :, :40], rtol=0, atol=0)
    assert not torch.allclose(after[:, :, 40:], before[:, :, 40:])


@every_impl
def test_left_padding_changes_nothing(impl):
    query, key, value = make_qkv(1, 4, 50, 8, key_heads=2, dtype=dtype_of(impl))
    options = FORM | {"is_causal": True, "enable_gqa": True, "impl": impl}
    expected = lln.page_attention(query, key, value, **options)
    padded = [F.pad(side, (0, 0, 13, 0), value=torch.nan) for side in (query, key, value)]
    mask = torch.arange(63)[None] >= 13
    found = lln.page_attention(*padded, key_mask=mask, **options)
    torch.testing.assert_close(found[:, :, 13:], expected)


# The choice


@every_impl
def test_a_page_is_chosen_by_its_best_token(impl):
    """A mean would take the page of six tokens that are alike a little."""
    key = torch.zeros(1, 1, 40, 4)
    key[0, 0, 17] = torch.tensor([3.0, 0, 0, 0])
    key[0, 0, 24:32] = torch.tensor([1.0, 0, 0, 0])
    query = torch.tensor([1.0, 0, 0, 0]).expand(1, 1, 40, 4)
    options = {"window": 0, "sinks": 0, "page_size": 8, "impl": impl}
    assert (lln.choose_pages(query, key, 1, **options) == 2).all(-1).sum() == 39
    assert lln.choose_pages(query, key, 1, **options)[0, 0, 17] == 3


@every_impl
def test_equal_scores_take_the_first_pages(impl):
    query = key = torch.ones(1, 1, 40, 4)
    options = {"window": 0, "sinks": 4, "page_size": 4, "is_causal": True, "impl": impl}
    found = lln.choose_pages(query, key, 2, **options)
    assert found[0, 0, -1].tolist() == [1, 2]
    assert found[0, 0, 2].tolist() == [-1, -1]
    assert found[0, 0, 6].tolist() == [1, -1]


@every_impl
def test_heads_of_a_key_head_are_compared_by_what_they_see_anyway(impl):
    """One head has large scores everywhere, near tokens included; the other stands out."""
    key = torch.zeros(1, 1, 40, 2)
    key[..., 0] = 5.0
    key[0, 0, 8, 0] = 5.2
    key[0, 0, 20, 1] = 2.0
    query = torch.eye(2)[:, None].expand(2, 40, 2)[None]
    options = {"window": 2, "sinks": 0, "page_size": 4, "is_causal": True, "enable_gqa": True}
    assert lln.choose_pages(query, key, 1, impl=impl, **options)[0, 0, -1].tolist() == [5]


@every_impl
def test_a_choice_by_other_tensors(impl):
    query, key, value = make_qkv(2, 4, 60, 8, key_heads=2, dtype=dtype_of(impl))
    other_query, other_key, _ = make_qkv(2, 4, 60, 3, key_heads=2, dtype=dtype_of(impl))
    form = FORM | {"scale": 0.7}
    pages = choose(other_query, other_key, form, scale=0.7)
    options = form | {"enable_gqa": True, "impl": impl}
    expected = lln.page_attention(query, key, value, **options | {"pages": pages})
    choice = (other_query, other_key)
    found = lln.page_attention(query, key, value, choice=choice, **options)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, lln.page_attention(query, key, value, **options))


# Packed sequences


@causal_or_not
@every_impl
def test_packed_sequences_equal_one_call_each(is_causal, impl):
    query, key, value = torch.randn(3, 70, 2, 8, dtype=dtype_of(impl))
    choice = torch.randn(2, 70, 2, 3, dtype=dtype_of(impl)).unbind()
    options = FORM | {"is_causal": is_causal, "impl": impl}
    packed = lln.page_attention_varlen
    found = packed(query, key, value, BOUNDS.int(), choice=choice, **options)
    for start, end in zip(BOUNDS[:-1].tolist(), BOUNDS[1:].tolist(), strict=True):
        *own, q, k = (
            side[start:end].transpose(0, 1)[None] for side in (query, key, value, *choice)
        )
        expected = lln.page_attention(*own, choice=(q, k), **options)[0].transpose(0, 1)
        torch.testing.assert_close(found[start:end], expected)


@every_impl
@pytest.mark.parametrize("bounds", [[0], [0, 0, 0]], ids=str)
def test_no_packed_tokens(bounds, impl):
    found = lln.page_attention_varlen(*torch.randn(3, 0, 2, 4), torch.tensor(bounds), impl=impl)
    assert found.shape == (0, 2, 4)


# Masks and numbers that are none


@every_impl
@causal_or_not
def test_rows_that_see_no_valid_key_give_zeros(is_causal, impl):
    inputs = make_qkv(2, 2, 60, 8, requires_grad=impl != "cpu")
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[0, :20] = mask[1] = False
    out = lln.page_attention(*inputs, **FORM, key_mask=mask, is_causal=is_causal, impl=impl)
    assert (out[1] == 0).all()
    assert out[0, :, 20:].ne(0).all()
    if is_causal:
        assert (out[0, :, :20] == 0).all()
    if impl == "cpu":
        return
    gradients = torch.autograd.grad(out.square().sum(), inputs)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all((gradient[1] == 0).all() for gradient in gradients)


@every_impl
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_masked_keys_have_no_effect_whatever_they_hold(garbage, impl):
    query, key, value = make_qkv(2, 2, 60, 8)
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[1, 17:30] = False
    other_key, other_value = key.clone(), value.clone()
    other_key[1, :, 17:30] = other_value[1, :, 17:30] = garbage
    options = FORM | {"key_mask": mask, "impl": impl}
    leaves = [side.requires_grad_(impl != "cpu") for side in (query, other_key, other_value)]
    out = lln.page_attention(*leaves, **options)
    torch.testing.assert_close(out, lln.page_attention(query, key, value, **options))
    if impl == "cpu":
        return
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)


@every_impl
@pytest.mark.parametrize("broken", [0, 1, 2], ids=["query", "key", "value"])
def test_nan_stays_in_its_head(broken, impl):
    inputs = list(make_qkv(2, 2, 60, 8))
    inputs[broken][0, 1, 30] = torch.nan
    out = lln.page_attention(*inputs, **FORM, impl=impl)
    assert out[0, 1, 30].isnan().all()
    assert out[0, 0].isfinite().all()
    assert out[1].isfinite().all()


# Gradients


@causal_or_not
@pytest.mark.parametrize("masked", [False, True])
def test_first_and_second_derivatives_agree_with_differences(masked, is_causal):
    inputs = make_qkv(1, 2, 7, 2, key_heads=1, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False, True, True, False, True, True]]) if masked else None
    form = {"window": 1, "sinks": 1, "pages": 1, "page_size": 2}
    options = {"is_causal": is_causal, "key_mask": mask}
    form["pages"] = choose(*(side.detach() for side in inputs[:2]), form, **options)

    def attend(*sides):
        return lln.page_attention(*sides, impl="eager", enable_gqa=True, **form, **options)

    torch.autograd.gradcheck(attend, inputs)
    torch.autograd.gradgradcheck(attend, inputs)


@every_impl
def test_dropout_is_of_whole_keys_and_repeats(impl):
    query, key, _ = make_qkv(1, 2, 50, 8)
    eye = torch.eye(50).expand(1, 2, 50, 50)
    torch.manual_seed(0)
    found = lln.page_attention(query, key, eye, **FORM, dropout_p=0.5, impl=impl)
    plain = lln.page_attention(query, key, eye, **FORM, impl=impl)
    dropped = (found == 0).all(-2)
    assert 0.2 < dropped.float().mean() < 0.8
    torch.testing.assert_close(found, torch.where(dropped.unsqueeze(-2), 0.0, 2 * plain))


# Compilers; the rest is in test_transforms.py


@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_graph_for_every_length(masked):
    torch._dynamo.reset()

    def attend(query, key, value, mask):
        return lln.page_attention(query, key, value, key_mask=mask, **FORM)

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
PAGES = torch.zeros(1, 2, 10, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: lln.page_attention(Q, K, V, window=-1), "window must be .* at least 0, got -1"),
        (lambda: lln.page_attention(Q, K, V, sinks=1.5), "sinks must be .* got float 1.5"),
        (lambda: lln.page_attention(Q, K, V, page_size=0), "page_size must be .* at least 1"),
        (lambda: lln.page_attention(Q, K, V, pages=-1), "pages must be .* at least 0, got -1"),
        (lambda: lln.page_attention(Q, K, V, pages=PAGES.float()), "int32 or int64, got torch.fl"),
        (lambda: lln.page_attention(Q, K, V, pages=PAGES[:, :1]), r"\[B, Hk, T, P\]"),
        (lambda: lln.page_attention(Q, K[:, :, :9], V[:, :, :9]), "T = 10 and S = 9"),
        (
            lambda: lln.page_attention(Q, K[:, :, :9], V[:, :, :9], is_causal=True),
            "as the last of the keys' tokens",
        ),
        (lambda: lln.page_attention(Q[:, :, :3], K, V), "T = 3 and S = 10"),
        (lambda: lln.page_attention(Q, K, V, choice=(Q[:, :, :3], K)), "query of choice must have"),
        (lambda: lln.page_attention(Q, K, V, choice=(Q, K.int())), "key of choice must hold"),
        (lambda: lln.page_attention(Q, K, V, choice=(Q, K[..., :2])), "of one width, got 4 and 2"),
        (lambda: lln.page_attention(Q, K[:, :1], V[:, :1]), "enable_gqa"),
        (lambda: lln.page_attention(Q, K, V, scale=0.0), "scale must be finite"),
        (lambda: lln.page_attention(Q, K, V, is_causal=1), "is_causal must be True or"),
        (lambda: lln.page_attention(Q, K, V, impl="fast"), "impl must be one of"),
        (lambda: lln.page_attention(Q, K, V, key_mask=Q), "key_mask must be"),
        (lambda: lln.choose_pages(Q, K, -2), "pages must be .* got -2"),
        (lambda: lln.page_attention_varlen(*PACKED, ENDS, pages=PAGES), "must be a number"),
        (lambda: lln.page_attention_varlen(*PACKED, ENDS[1:]), "cu_seqlens"),
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
        (lambda: lln.page_attention(Q, K, V, alpha=1.0), "has no argument 'alpha'"),
        (lambda: lln.page_attention(Q, K, V, attn_mask=Q), "has no attn_mask"),
        (lambda: lln.page_attention_varlen(*PACKED), "needs cu_seqlens"),
    ],
)
def test_arguments_that_do_not_fit_get_a_sentence(call, said):
    with pytest.raises(UnexpectedArgumentError, match=said):
        call()


def test_what_cannot_run_says_why(compiled):
    with pytest.raises(BackendUnavailableError, match="triton"):
        lln.page_attention(Q, K, V, impl="triton")
    for sides, options, said in (
        ((Q.clone().requires_grad_(), K, V), {}, "finds no gradients of attention to pages"),
        ((Q.double(), K.double(), V.double()), {}, "computes in float32, not torch.float64"),
        ((Q, K, V), {"choice": (Q.double(), K.double())}, "chooses pages in float32, not"),
    ):
        with pytest.raises(BackendUnavailableError, match=f"impl='cpu' {said}.*; use impl='e"):
            lln.page_attention(*sides, impl="cpu", **options)
