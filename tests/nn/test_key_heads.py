"""The modules with exact keys, and where their offset comes from."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lln
from lln import InvalidInputError
from lln.matching.mass import mass_offset
from lln.matching.moments import head_moments

B, T, HEADS, D = 2, 40, 2, 8
SIZES = {"keys": 4, "block_size": 8}
FIXED = {"alpha": 1.0, "beta": 1.0, "statistics": "fixed"}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def heads_of(scale=1.0, tokens=T):
    q, k, v = torch.randn(3, B, HEADS, tokens, D)
    return [scale * q, scale * k, v]


def core_of(**options):
    return lln.LLNKeysCore(HEADS, D, **(SIZES | options))


def some_padding():
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, 30:] = False
    return mask


def closed_form(q, k, alpha, beta, mask=None):
    return mass_offset(head_moments(q, k, mask), alpha, beta, D)


@pytest.mark.parametrize("group", [None, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_the_core_is_the_function(group, masked):
    q, k, v = heads_of()
    mask = some_padding() if masked else None
    found = core_of(group_size=group)(q, k, v, key_mask=mask)
    expected = lln.lln_keys_attention(q, k, v, group_size=group, key_mask=mask, **SIZES)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("matching", ["rest", "entropy", "variance"])
def test_running_statistics_of_the_first_batch_are_its_own(matching):
    q, k, v = (side[:1] for side in heads_of(0.7))
    found = core_of(statistics="running", matching=matching).train()(q, k, v)
    expected = lln.lln_keys_attention(q, k, v, matching=matching, **SIZES)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("statistics", ["fixed", "learned"])
def test_temperatures_start_at_half_of_what_entropy_gives(statistics):
    core, other = (
        core_of(statistics=statistics),
        lln.LLNCore(HEADS, D, statistics=statistics, matching="entropy"),
    )
    q, k, v = heads_of()
    for half, full in zip(core.statistics(q, k), other.statistics(q, k), strict=True):
        torch.testing.assert_close(2 * half, full)
    alpha, beta = core.statistics(q, k)
    expected = lln.lln_keys_attention(q, k, v, alpha=alpha, beta=beta, **SIZES)
    torch.testing.assert_close(core(q, k, v), expected)


def test_a_fixed_offset_reaches_the_attention_and_is_saved():
    q, k, v = heads_of()
    core = core_of(offset=torch.tensor([-1.0, 2.0]))
    given = torch.tensor([-1.0, 2.0])[None, :, None, None]
    expected = lln.lln_keys_attention(q, k, v, offset=given, **SIZES)
    assert torch.equal(core(q, k, v), expected)
    assert not list(core.parameters())
    other = core_of(offset=0.0)
    other.load_state_dict(core.state_dict())
    assert torch.equal(other(q, k, v), expected)


def test_a_learned_offset_starts_at_the_closed_form_of_the_first_batch():
    q, k, v = heads_of(0.8)
    core = core_of(learn_offset=True, statistics="learned")
    with torch.no_grad():
        before = core.eval()(q, k, v)
    assert not core.offset.known
    alpha, beta = (side.detach() for side in core.statistics(q, k))
    expected = lln.lln_keys_attention(q, k, v, alpha=alpha, beta=beta, **SIZES)
    torch.testing.assert_close(before, expected)
    core.train()(q, k, v).square().sum().backward()
    start = closed_form(q, k, alpha, beta).mean(0).flatten()
    torch.testing.assert_close(core.offset.value.detach(), start)
    assert core.offset.value.grad.abs().min() > 0
    # Another batch leaves the start alone.
    core(*heads_of(2.0))
    torch.testing.assert_close(core.offset.value.detach(), start)


def test_padding_and_empty_samples_do_not_count_in_the_start():
    q, k, v = heads_of()
    mask = some_padding()
    mask[0] = False
    core = core_of(learn_offset=True, statistics="learned").train()
    core(q, k, v, key_mask=torch.zeros_like(mask))
    assert not core.offset.known
    core(q, k, v, key_mask=mask)
    alpha, beta = (side.detach() for side in core.statistics(q, k))
    start = closed_form(q[1:, :, :30], k[1:, :, :30], alpha, beta).flatten()
    torch.testing.assert_close(core.offset.value.detach(), start)


def test_a_given_start_is_kept():
    core = core_of(learn_offset=True, offset=-2.5).train()
    core(*heads_of())
    assert core.offset.value.tolist() == [-2.5, -2.5]


def test_a_learned_offset_round_trips_and_loading_takes_a_start_back():
    q, k, v = heads_of()
    fresh, core = core_of(learn_offset=True), core_of(learn_offset=True).train()
    unstarted = copy.deepcopy(fresh.state_dict())
    core(q, k, v)
    fresh.load_state_dict(core.state_dict())
    assert torch.equal(fresh.train()(2 * q, k, v), core(2 * q, k, v))
    core.load_state_dict(unstarted)
    core(2 * q, k, v)
    assert not torch.equal(core.offset.value, fresh.offset.value)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant):
    q, k, v = (side.requires_grad_() for side in heads_of())
    gradients = []
    for repeated in (False, True):
        core = core_of(learn_offset=True, statistics="learned").train()
        out = checkpoint(core, q, k, v, use_reentrant=reentrant) if repeated else core(q, k, v)
        out.square().sum().backward()
        gradients.append([q.grad.clone(), *(p.grad for p in core.parameters())])
        q.grad = None
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


def test_causal_calls_are_refused():
    q, k, v = heads_of()
    for core in (core_of(), core_of(**FIXED, offset=-2.0)):
        with pytest.raises(InvalidInputError, match=r"never causal: use lln\.page_attention"):
            core(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keys": -1}, "keys"),
        ({"block_size": 0}, "block_size"),
        ({"group_size": 3}, "group_size must divide block_size"),
        ({"matching": "hope"}, "matching must be one of 'rest'"),
        ({"dropout": 0.1}, "has no dropout"),
        ({"offset": "learned"}, "learn_offset=True"),
        ({"offset": torch.zeros(3)}, "one value per head"),
        ({"offset": float("nan")}, "offset must be finite"),
        ({"learn_offset": "yes"}, "learn_offset"),
        ({"alpha": 1.0}, "alpha and beta go with"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_get_a_sentence(options, said):
    with pytest.raises(InvalidInputError, match=said):
        core_of(**options)


def test_unknown_options_get_a_sentence():
    with pytest.raises(lln.UnexpectedArgumentError, match="no argument 'key'"):
        core_of(key=3)
    q, k, v = heads_of()
    with pytest.raises(InvalidInputError, match="T = 40 and S = 20"):
        core_of()(q, k[:, :, :20], v[:, :, :20])


def test_a_layer_with_every_key_is_multihead_attention():
    softmax = nn.MultiheadAttention(16, HEADS, batch_first=True)
    nn.init.normal_(softmax.in_proj_bias)
    layer = lln.LLNKeysAttention(16, HEADS, batch_first=True, keys=T, block_size=8)
    layer.load_state_dict(softmax.state_dict(), strict=True)
    x, padding = torch.randn(B, T, 16), ~some_padding()
    found, expected = (m(x, x, x, key_padding_mask=padding)[0] for m in (layer, softmax))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_layer_refuses_dropout_and_trains():
    with pytest.raises(InvalidInputError, match="has no dropout"):
        lln.LLNKeysAttention(16, HEADS, 0.1)
    layer = lln.LLNKeysAttention(16, HEADS, statistics="learned", learn_offset=True, **SIZES)
    layer(torch.randn(T, B, 16))[0].square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


def test_a_compiled_core_starts_its_offset_too():
    q, k, v = heads_of()
    core, other = core_of(learn_offset=True), core_of(learn_offset=True)
    compiled = torch.compile(core.train(), backend="eager")
    found, expected = compiled(q, k, v), other.train()(q, k, v)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(core.offset.value, other.offset.value)
    assert core.offset.known
    torch.testing.assert_close(compiled(2 * q, k, v), other(2 * q, k, v))
