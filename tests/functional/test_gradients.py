"""Gradients against finite differences, and what autograd may be asked for."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from lln import (
    KeySummary,
    block_diagonal_attention,
    lln_attention,
    lln_attention_varlen,
    lln_diag_attention,
    lln_diag_attention_varlen,
    match_moments,
)
from lln.eager import causal as causal_module
from lln.testing import make_qkv


def leaves(batch=2, heads=2, tokens=5, width=2, **others):
    return make_qkv(batch, heads, tokens, width, dtype=torch.float64, requires_grad=True, **others)


def positive(*shape):
    return (1 + torch.rand(*shape, dtype=torch.float64)).requires_grad_()


def holes(batch, tokens):
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    mask[:, 1::3] = False
    mask[-1, :2] = False
    return mask


@pytest.fixture
def exact_calls(monkeypatch):
    """Every call of the causal exact path."""
    calls, exact = [], causal_module._exact

    def counted(chunks):
        calls.append(chunks.query.shape)
        return exact(chunks)

    monkeypatch.setattr(causal_module, "_exact", counted)
    return calls


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_lln(causal, masked):
    mask = holes(2, 5) if masked else None

    def attend(query, key, value, alpha, beta):
        options = {"key_mask": mask, "is_causal": causal}
        return lln_attention(query, key, value, alpha=alpha, beta=beta, **options)

    assert gradcheck(attend, (*leaves(value_width=1), positive(2, 2, 1, 1), positive(1, 2, 1, 1)))


def test_lln_cross_attention_with_groups():
    def attend(query, key, value, alpha, beta):
        return lln_attention(query, key, value, alpha=alpha, beta=beta, enable_gqa=True)

    inputs = leaves(1, 4, 3, 3, keys=6, key_heads=2)
    assert gradcheck(attend, (*inputs, positive(4, 1, 1), positive(1, 4, 1, 1)))
    assert gradcheck(attend, (*inputs, positive(()), positive(1, 2, 1, 1)))


def test_causal_over_several_chunks(exact_calls):
    def attend(query, key, value, alpha, beta):
        return lln_attention(query, key, value, alpha=alpha, beta=beta, is_causal=True)

    inputs = (*leaves(1, 1, 66, 2), positive(()), positive(()))
    assert gradcheck(attend, inputs, fast_mode=True)
    assert not exact_calls


@pytest.mark.parametrize("tokens", [9, 66])
@pytest.mark.parametrize("masked", [False, True])
def test_causal_through_the_exact_path(exact_calls, tokens, masked):
    # The outlier is a constant added inside: finite differences need inputs of ordinary size.
    outlier = torch.zeros(1, 1, tokens, 2, dtype=torch.float64)
    outlier[..., 6, :] = 700.0
    mask = holes(1, tokens) if masked else None

    def attend(query, key, value, alpha, beta):
        options = {"alpha": alpha, "beta": beta, "key_mask": mask, "is_causal": True}
        return lln_attention(query, key + outlier, value, **options)

    inputs = (*leaves(1, 1, tokens, 2), positive(()))
    scale = torch.tensor(1.5, dtype=torch.float64)
    assert gradcheck(lambda *args: attend(*args, scale), inputs, fast_mode=tokens > 9)
    assert exact_calls


def test_exact_path_knows_the_gradient_of_beta():
    def attend(query, key, value, alpha, beta):
        scaled = (query * alpha, key * beta, value)
        log_mass = torch.full((1, 2), -1e30, dtype=torch.float64)
        centroid = torch.zeros(1, 2, 2, dtype=torch.float64)
        return causal_module._exact(causal_module.Chunks(*scaled, log_mass, centroid))

    inputs = (tensor[0].detach().requires_grad_() for tensor in leaves(1, 1, 16, 2))
    assert gradcheck(attend, (*inputs, positive(()), positive(())))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_block_diagonal(causal, masked):
    mask = holes(2, 5) if masked else None

    def attend(query, key, value):
        options = {"block_size": 3, "key_mask": mask, "is_causal": causal}
        return block_diagonal_attention(query, key, value, **options)

    assert gradcheck(attend, leaves(value_width=1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(), (2, 1, 1), (2, 2, 5, 1)], ids=str)
def test_diag_with_mix(shape, causal):
    def attend(query, key, value, alpha, beta, mix):
        options = {"block_size": 2, "mix": mix.sigmoid(), "is_causal": causal}
        return lln_diag_attention(query, key, value, alpha=alpha, beta=beta, **options)

    mix = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert gradcheck(attend, (*leaves(value_width=1), positive(()), positive(()), mix))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("diag", [False, True])
def test_varlen(diag, causal):
    cu_seqlens = torch.tensor([0, 2, 2, 7])

    def attend(query, key, value, alpha, beta, mix):
        options = {"alpha": alpha, "beta": beta, "is_causal": causal, "enable_gqa": True}
        if diag:
            options |= {"block_size": 2, "mix": mix}
        function = lln_diag_attention_varlen if diag else lln_attention_varlen
        return function(query, key, value, cu_seqlens, **options)

    shapes = ((7, 2, 3), (7, 1, 3), (7, 1, 2))
    packed = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    inputs = (*packed, positive(3, 2, 1, 1), positive(3, 2, 1, 1), positive(7, 2, 1))
    if not diag:
        inputs[-1].requires_grad_(False)
    assert gradcheck(attend, inputs)


def test_summary_split_and_resumed():
    def attend(query, key, value, alpha, beta):
        summary = KeySummary.of(key[:, :, :2], value[:, :, :2], beta)
        early = summary.read(query, alpha)
        summary.append(key[:, :, 2:], value[:, :, 2:])
        return early, summary.read(query, alpha)

    assert gradcheck(attend, (*leaves(), positive(2, 2, 1, 1), positive(1, 2, 1, 1)))


@pytest.mark.parametrize("causal", [False, True])
def test_second_derivatives(causal):
    def attend(query, key, value, alpha, beta):
        return lln_attention(query, key, value, alpha=alpha, beta=beta, is_causal=causal)

    inputs = (*leaves(1, 1, 3, 2), positive(()), positive(()))
    assert gradgradcheck(attend, inputs)


CALLS = {
    "lln": lambda *args: lln_attention(*args[:3], alpha=args[3], beta=args[4]),
    "causal": lambda *args: lln_attention(*args[:3], alpha=args[3], beta=args[4], is_causal=True),
    "diag": lambda *args: lln_diag_attention(*args[:3], alpha=args[3], beta=args[4], block_size=2),
    "varlen": lambda *args: lln_attention_varlen(
        *(tensor[0].transpose(0, 1) for tensor in args[:3]),
        torch.tensor([0, 2, 5]),
        **{"alpha": args[3], "beta": args[4]},
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("asked", range(5), ids=["query", "key", "value", "alpha", "beta"])
def test_only_one_input_requires_grad(call, asked):
    inputs = (*leaves(1), positive(()), positive(()))
    wanted = torch.autograd.grad(CALLS[call](*inputs).square().sum(), inputs)[asked]
    alone = [tensor.detach() for tensor in inputs]
    alone[asked].requires_grad_()
    found = torch.autograd.grad(CALLS[call](*alone).square().sum(), alone[asked])[0]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("call", CALLS)
def test_no_graph_without_grad(call):
    inputs = [tensor.detach() for tensor in (*leaves(1), positive(()), positive(()))]
    assert not CALLS[call](*inputs).requires_grad


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["transposed", "expanded", "strided"])
def test_upstream_gradient_of_any_layout(call, kind):
    inputs = (*leaves(1), positive(()), positive(()))
    out = CALLS[call](*inputs)
    upstream = {
        "transposed": torch.randn_like(out.mT.contiguous()).mT,
        "expanded": torch.randn_like(out[..., :1]).expand_as(out),
        "strided": torch.randn(*out.shape, 2, dtype=out.dtype)[..., 0],
    }[kind]
    assert not upstream.is_contiguous()
    found = torch.autograd.grad(out, inputs, upstream, retain_graph=True)
    wanted = torch.autograd.grad(out, inputs, upstream.contiguous())
    for grad, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("changed", range(5), ids=["query", "key", "value", "alpha", "beta"])
def test_in_place_change_is_never_silently_wrong(call, changed):
    inputs = (*leaves(1), positive(()), positive(()))
    wanted = torch.autograd.grad(CALLS[call](*inputs).sum(), inputs)
    out = CALLS[call](*inputs)
    with torch.no_grad():
        inputs[changed].add_(1.0)
    try:
        found = torch.autograd.grad(out.sum(), inputs)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
    else:
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("call", ["lln", "diag"])
@pytest.mark.parametrize("changed", range(5), ids=["query", "key", "value", "alpha", "beta"])
def test_in_place_change_of_a_saved_tensor_is_detected(call, changed):
    inputs = (*leaves(1), positive(()), positive(()))
    out = CALLS[call](*inputs)
    with torch.no_grad():
        inputs[changed].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_matched_temperatures_carry_no_gradient():
    query, key, value = leaves()
    out = lln_attention(query, key, value)
    alpha, beta = match_moments(query, key)
    assert not alpha.requires_grad
    assert not beta.requires_grad
    fixed = lln_attention(query, key, value, alpha=alpha, beta=beta)
    for found, wanted in zip(
        torch.autograd.grad(out.square().sum(), (query, key, value)),
        torch.autograd.grad(fixed.square().sum(), (query, key, value)),
        strict=True,
    ):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_masked_tokens_get_no_gradient(causal):
    query, key, value = leaves(2, 2, 70, 3)
    mask = holes(2, 70)
    options = {"alpha": 1.5, "beta": 1.5, "is_causal": causal}
    lln_diag_attention(query, key, value, key_mask=mask, **options).square().sum().backward()
    hidden = ~mask[:, None, :, None]
    for tensor in (key, value):
        assert not tensor.grad.masked_select(hidden).any()
        assert tensor.grad.masked_select(~hidden).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("function", [lln_attention, lln_diag_attention])
def test_garbage_in_padding_reaches_no_gradient(function, garbage, causal):
    def grads(fill):
        query, key, value = make_qkv(2, 2, 20, 4)
        for tensor in (query, key, value):
            tensor[:, :, 15:] = fill
        leaf = [tensor.requires_grad_() for tensor in (query, key, value)]
        scales = [torch.full((1, 2, 1, 1), 1.5, requires_grad=True) for _ in range(2)]
        mask = torch.arange(20).expand(2, 20) < 15
        options = {"alpha": scales[0], "beta": scales[1], "key_mask": mask, "is_causal": causal}
        out = function(query, key, value, **options)[:, :, :15]
        return torch.autograd.grad(out.square().sum(), (*leaf, *scales))

    for found, wanted in zip(grads(garbage), grads(0.0), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("garbage", [torch.nan, 3e38])
def test_garbage_in_padding_reaches_no_gradient_of_blocks(garbage):
    def grads(fill):
        inputs = make_qkv(2, 2, 20, 4)
        for tensor in inputs:
            tensor[:, :, 15:] = fill
        leaf = [tensor.requires_grad_() for tensor in inputs]
        mask = torch.arange(20).expand(2, 20) < 15
        out = block_diagonal_attention(*leaf, block_size=8, key_mask=mask)[:, :, :15]
        return torch.autograd.grad(out.square().sum(), leaf)

    for found, wanted in zip(grads(garbage), grads(0.0), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
