"""The modules: drop-ins for nn.MultiheadAttention, and where their α, β come from."""

import copy
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lln
from lln import CausalStatisticsError, InvalidInputError
from lln.matching.curves import matched_spread

B, T, WIDTH, HEADS = 2, 10, 16, 4
D = WIDTH // HEADS
STATISTICS = ("sample", "running", "fixed", "learned")
JOINS = ("average", "scale", "ratio", "gate", "heads")
LAYERS = (lln.LLNAttention, lln.LLNDiagAttention)
NAN = float("nan")

# Said once by torch on processors without bfloat16 instructions.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

each_layer = pytest.mark.parametrize("kind", LAYERS)
# With those that match nothing.
every_layer = pytest.mark.parametrize("kind", [*LAYERS, lln.WindowAttention, lln.PageAttention])
each_statistics = pytest.mark.parametrize("statistics", STATISTICS)
each_reentrant = pytest.mark.parametrize("reentrant", [False, True])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def layer_of(kind=lln.LLNAttention, **options):
    return kind(WIDTH, HEADS, **({"batch_first": True} | options))


def heads_of(batch=B, tokens=T, heads=HEADS, width=D, scale=1.0, dtype=torch.float32):
    q, k, v = torch.randn(3, batch, heads, tokens, width, dtype=dtype)
    return [scale * q, scale * k, v]


def padding(*lengths, tokens=T):
    """nn.MultiheadAttention's sense: True = ignore."""
    return torch.arange(tokens) >= torch.tensor(lengths).unsqueeze(-1)


# Shapes


@every_layer
@pytest.mark.parametrize("bias", [True, False])
def test_batch_first_both_ways_and_unbatched(kind, bias):
    first, second = layer_of(kind, bias=bias), layer_of(kind, bias=bias, batch_first=False)
    second.load_state_dict(first.state_dict())
    x = torch.randn(B, T, WIDTH)
    out, weights = first(x, x, x)
    assert weights is None
    assert out.shape == x.shape
    torch.testing.assert_close(second(x.transpose(0, 1))[0].transpose(0, 1), out)
    torch.testing.assert_close(first(x[0])[0], out[0])
    torch.testing.assert_close(second(x[0])[0], out[0])


@every_layer
def test_unbatched_padding_mask(kind):
    layer, x = layer_of(kind), torch.randn(B, T, WIDTH)
    expected = layer(x, key_padding_mask=padding(T, 6))[0][1]
    torch.testing.assert_close(layer(x[1], key_padding_mask=padding(6)[0])[0], expected)


@every_layer
def test_other_widths_of_key_and_value(kind):
    layer = layer_of(kind, kdim=5, vdim=7)
    assert layer.in_proj_weight is None
    out, _ = layer(torch.randn(B, T, WIDTH), torch.randn(B, T, 5), torch.randn(B, T, 7))
    assert out.shape == (B, T, WIDTH)
    out.sum().backward()
    assert layer.v_proj_weight.grad.shape == (WIDTH, 7)


def test_cross_attention_and_default_key_and_value():
    layer = layer_of()
    x, memory = torch.randn(B, T, WIDTH), torch.randn(B, 7, WIDTH)
    assert torch.equal(layer(x)[0], layer(x, x, x)[0])
    assert torch.equal(layer(x, memory)[0], layer(x, memory, memory)[0])
    with pytest.raises(InvalidInputError, match="T = 10 and S = 7"):
        layer_of(lln.LLNDiagAttention)(x, memory)


@pytest.mark.parametrize("core", [lln.LLNCore, lln.LLNDiagCore])
def test_core_shares_key_heads_and_takes_any_value_width(core):
    q, k, v = heads_of()
    k, v = k[:, :2], torch.randn(B, 2, T, 6)
    found = core(HEADS, D)(q, k, v)
    repeated = core(HEADS, D)(q, *(t.repeat_interleave(2, 1) for t in (k, v)))
    assert found.shape == (B, HEADS, T, 6)
    torch.testing.assert_close(found, repeated)


# After nn.MultiheadAttention


@every_layer
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 5, "vdim": 7}], ids=str)
def test_state_dict_of_multihead_attention_loads_strictly(kind, options):
    softmax = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
    layer = layer_of(kind, **options)
    layer.load_state_dict(softmax.state_dict(), strict=True)
    assert layer.state_dict().keys() == softmax.state_dict().keys()


def test_initial_weights_have_the_spread_of_multihead_attention():
    torch.manual_seed(0)
    softmax = nn.MultiheadAttention(64, 4)
    layer = lln.LLNAttention(64, 4)
    for name, parameter in softmax.named_parameters():
        found = layer.get_parameter(name)
        torch.testing.assert_close(found.std(), parameter.std(), rtol=0.05, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block", [T, T + 5])
def test_diagonal_alone_with_one_block_is_multihead_attention(masked, block):
    softmax = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    nn.init.normal_(softmax.in_proj_bias)
    layer = layer_of(lln.LLNDiagAttention, join="ratio", block_size=block)
    layer.load_state_dict(softmax.state_dict(), strict=False)
    nn.init.zeros_(layer.core.lln_scale)
    x = torch.randn(B, T, WIDTH)
    mask = padding(T, 6) if masked else None
    found, expected = (m(x, x, x, key_padding_mask=mask)[0] for m in (layer, softmax))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@every_layer
def test_padding_mask_true_means_ignore(kind):
    layer, x = layer_of(kind), torch.randn(B, T, WIDTH)
    out = layer(x, key_padding_mask=padding(T, 6))[0]
    torch.testing.assert_close(out[1, :6], layer(x[1:, :6])[0][0])
    assert not torch.allclose(out[1, :6], layer(x)[0][1, :6])


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lowest", [False, True])
def test_float_padding_masks(kind, dtype, lowest):
    layer, x, mask = layer_of(kind), torch.randn(B, T, WIDTH), padding(T, 6)
    ignore = torch.finfo(dtype).min if lowest else -torch.inf
    additive = torch.zeros(B, T, dtype=dtype).masked_fill(mask, ignore)
    found = layer(x, key_padding_mask=additive)[0]
    assert torch.equal(found, layer(x, key_padding_mask=mask)[0])


@pytest.mark.parametrize("value", [1.0, -1.0, -1e4, NAN, torch.inf])
def test_other_float_masks_are_refused(value):
    bias = torch.zeros(B, T)
    bias[0, 3] = value
    with pytest.raises(InvalidInputError, match="only 0 and −inf"):
        layer_of()(torch.randn(B, T, WIDTH), key_padding_mask=bias)


def test_integer_padding_masks_are_refused():
    with pytest.raises(InvalidInputError, match=r"key_padding_mask.*torch.int64"):
        layer_of()(torch.randn(B, T, WIDTH), key_padding_mask=padding(T, 6).long())


@every_layer
def test_weights_and_attention_masks_are_refused(kind):
    layer, x = layer_of(kind), torch.randn(B, T, WIDTH)
    with pytest.raises(InvalidInputError, match="need_weights"):
        layer(x, x, x, need_weights=True)
    with pytest.raises(InvalidInputError, match="attn_mask"):
        layer(x, x, x, attn_mask=torch.zeros(T, T))


@each_layer
@each_statistics
def test_padding_changes_nothing(kind, statistics):
    """Neither its length nor what it holds, in the output and in the gradient of the input."""
    layer = layer_of(kind, statistics=statistics)
    x = torch.randn(1, 6, WIDTH)
    results = []
    for tokens, fill in ((6, 0.0), (T, 0.0), (T, 1e4), (37, -5.0)):
        copied = copy.deepcopy(layer)
        padded = torch.full((1, tokens, WIDTH), fill)
        padded[:, :6] = x
        padded.requires_grad_()
        out = copied(padded, key_padding_mask=padding(6, tokens=tokens))[0][:, :6]
        out.square().sum().backward()
        results.append((out, padded.grad[:, :6]))
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("join", JOINS)
def test_nan_under_the_mask_reaches_no_gradient(join):
    core = lln.LLNDiagCore(HEADS, D, join=join, block_size=4)
    for parameter in core.parameters():
        nn.init.uniform_(parameter, 0.1, 0.9)
    heads = heads_of(batch=1)
    results = []
    for fill in (0.0, NAN):
        leaves = [tensor.clone() for tensor in heads]
        for leaf in leaves:
            leaf[:, :, 6:] = fill
            leaf.requires_grad_()
        core.zero_grad()
        out = core(*leaves, key_mask=~padding(6))
        out[:, :, :6].square().sum().backward()
        gradients = [leaf.grad[:, :, :6] for leaf in leaves]
        results.append([out[:, :, :6], *gradients, *(p.grad for p in core.parameters())])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected)


# In torch's own encoder


def encoder_layer(kind):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
    attention = layer_of(kind)
    attention.load_state_dict(layer.self_attn.state_dict(), strict=False)
    layer.self_attn = attention
    return layer


def by_hand(layer, x, mask):
    x = layer.norm1(x + layer.self_attn(x, key_padding_mask=mask)[0])
    return layer.norm2(x + layer.linear2(torch.relu(layer.linear1(x))))


@each_layer
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_encoder_layer_runs_our_attention(kind, train, grad, masked):
    layer = encoder_layer(kind).train(train)
    # Not by a hook: a module with hooks never takes the fused path.
    core, calls = layer.self_attn.core, []
    attend = core.forward
    core.forward = lambda *args, **options: calls.append(1) or attend(*args, **options)
    x, mask = torch.randn(B, T, WIDTH), padding(T, 6) if masked else None
    with torch.set_grad_enabled(grad):
        found = layer(x, src_key_padding_mask=mask)
        assert len(calls) == 1
        torch.testing.assert_close(found, by_hand(layer, x, mask))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("swap_first", [True, False])
def test_encoder_stack_runs_our_attention_or_says_why_not(swap_first):
    """A stack built around softmax layers packs padded batches into nested tensors."""
    if swap_first:
        stack = nn.TransformerEncoder(encoder_layer(lln.LLNAttention), 2)
    else:
        plain = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
        stack = nn.TransformerEncoder(plain, 2)
        for layer in stack.layers:
            layer.self_attn = layer_of()
    stack.eval()
    x, mask = torch.randn(B, T, WIDTH), padding(T, 6)
    complaint = None
    with torch.no_grad():
        try:
            found = stack(x, src_key_padding_mask=mask)
        except InvalidInputError as error:
            complaint = str(error)
        expected = x
        for layer in stack.layers:
            expected = by_hand(layer, expected, mask)
    if complaint is None:
        torch.testing.assert_close(found[~mask], expected[~mask])
    else:
        assert not swap_first
        assert "enable_nested_tensor" in complaint


# α, β and joins


@each_statistics
@pytest.mark.parametrize("join", JOINS)
def test_gradients_reach_every_parameter(statistics, join):
    layer = layer_of(lln.LLNDiagAttention, statistics=statistics, join=join, block_size=4)
    if join == "gate":
        nn.init.normal_(layer.core.gate_weight)
    out, _ = layer(torch.randn(B, T, WIDTH), key_padding_mask=padding(T, 6))
    (out * torch.randn_like(out)).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def joined(core, q, k, v):
    """Both branches by themselves."""
    alpha, beta = core.statistics(q, k)
    long_range = lln.lln_attention(q, k, v, alpha=alpha, beta=beta)
    return long_range, lln.block_diagonal_attention(q, k, v, block_size=core.block_size)


@pytest.mark.parametrize("join", JOINS)
def test_joins(join):
    core = lln.LLNDiagCore(HEADS, D, join=join, block_size=4)
    for parameter in core.parameters():
        nn.init.normal_(parameter)
    q, k, v = heads_of()
    long_range, short_range = joined(core, q, k, v)
    if join == "average":
        expected = (long_range + short_range) / 2
    elif join == "scale":
        expected = core.lln_scale * long_range + core.diag_scale * short_range
    elif join == "ratio":
        expected = core.lln_scale * long_range + (1 - core.lln_scale) * short_range
    elif join == "gate":
        gate = (q * core.gate_weight[:, None]).sum(-1, keepdim=True) + core.gate_bias[:, None, None]
        expected = gate.sigmoid() * long_range + (1 - gate.sigmoid()) * short_range
    else:
        expected = torch.cat([long_range[:, :2], short_range[:, 2:]], 1)
    torch.testing.assert_close(core(q, k, v), expected)


@pytest.mark.parametrize("join", ["scale", "ratio", "gate"])
def test_learned_joins_start_as_the_average(join):
    inputs = heads_of()
    found = lln.LLNDiagCore(HEADS, D, join=join)(*inputs)
    torch.testing.assert_close(found, lln.LLNDiagCore(HEADS, D)(*inputs))


@pytest.mark.parametrize("lln_heads", [0, 1, 4])
@each_statistics
def test_any_split_of_the_heads(statistics, lln_heads):
    core = lln.LLNDiagCore(HEADS, D, join="heads", lln_heads=lln_heads, statistics=statistics)
    q, k, v = heads_of()
    found = core(q, k[:, :2], v[:, :2])
    k, v = (t[:, :2].repeat_interleave(2, 1) for t in (k, v))
    long_range, short_range = joined(core.eval(), q, k, v)
    expected = torch.cat([long_range[:, :lln_heads], short_range[:, lln_heads:]], 1)
    torch.testing.assert_close(found, expected)


def test_sample_statistics_are_those_of_the_function():
    inputs = heads_of()
    for matching in ("variance", "entropy", "paper"):
        core = lln.LLNCore(HEADS, D, matching=matching)
        assert torch.equal(core(*inputs), lln.lln_attention(*inputs, matching=matching))


@pytest.mark.parametrize("statistics", ["fixed", "learned"])
def test_fixed_and_learned_temperatures(statistics):
    inputs, alpha = heads_of(), torch.tensor([1.0, 1.5, 2.0, 2.5])
    core = lln.LLNCore(HEADS, D, statistics=statistics, alpha=alpha, beta=1.3)
    expected = lln.lln_attention(*inputs, alpha=alpha[:, None, None], beta=1.3)
    torch.testing.assert_close(core(*inputs), expected)
    unset = lln.LLNCore(HEADS, 64, statistics=statistics, matching="entropy")
    found = unset.statistics(*heads_of(width=64)[:2])
    torch.testing.assert_close(
        torch.cat(found), torch.full((2, HEADS, 1, 1), 1.887), rtol=0.02, atol=0
    )


def test_dropout_only_in_training():
    core, inputs = lln.LLNDiagCore(HEADS, D, dropout=0.5), heads_of()
    expected = lln.LLNDiagCore(HEADS, D)(*inputs)
    assert not torch.allclose(core(*inputs), expected)
    assert torch.equal(core.eval()(*inputs), expected)


@pytest.mark.parametrize("join", JOINS)
def test_dropout_keeps_the_mean(join):
    core = lln.LLNDiagCore(2, 4, join=join, dropout=0.3, block_size=4)
    inputs = heads_of(1, 8, 2, 4)
    draws = 4000
    found = core(*(tensor.expand(draws, -1, -1, -1) for tensor in inputs))
    error = (found.mean(0) - core.eval()(*inputs)[0]).abs()
    assert (found.std(0) > 0).all()
    assert (error < 6 * found.std(0) / draws**0.5).all()


# Running statistics


def running(momentum=0.1, **options):
    return lln.LLNCore(HEADS, D, statistics="running", momentum=momentum, **options)


def state_of(core):
    return {name: tensor.clone() for name, tensor in core.statistics.state_dict().items()}


def same_state(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def moments_of(q, k, lengths):
    """By plain loops: token-weighted mean of q², of the keys' variance, mean number of keys."""
    q2, k2 = torch.zeros(HEADS).double(), torch.zeros(HEADS).double()
    for i, n in enumerate(lengths):
        if n:
            q2 += q[i, :, :n].double().square().mean((-1, -2)) * n
            k2 += k[i, :, :n].double().var(-2, correction=0).mean(-1) * n
    valid = [n for n in lengths if n]
    return q2 / sum(valid), k2 / sum(valid), sum(valid) / len(valid)


def test_running_average_by_numbers():
    core = running(momentum=0.25)
    expected = None
    for scale, lengths in ((1.0, (10, 6)), (3.0, (2, 9)), (0.5, (10, 0))):
        q, k, v = heads_of(scale=scale)
        core(q, k, v, key_mask=~padding(*lengths))
        new = moments_of(q, k, lengths)
        expected = (
            new
            if expected is None
            else [0.75 * old + 0.25 * now for old, now in zip(expected, new, strict=True)]
        )
        state = core.statistics
        torch.testing.assert_close(state.query_variance.double(), expected[0], rtol=1e-5, atol=0)
        torch.testing.assert_close(state.key_variance.double(), expected[1], rtol=1e-5, atol=0)
        assert state.keys.item() == pytest.approx(expected[2], rel=1e-6)
    assert core.statistics.updates.item() == 3


def test_running_temperatures_by_numbers():
    """α = s/σq and β = s/σk of the state before the batch; the first batch is its own state."""
    core = running(momentum=0.25, matching="entropy")
    q, k, v = heads_of(scale=2.0)
    core(q, k, v)
    q2, k2, keys = moments_of(q, k, (T, T))
    spread = matched_spread(q2 * k2, D, keys, "entropy")
    options = {"alpha": (spread / q2.sqrt()).float(), "beta": (spread / k2.sqrt()).float()}
    options = {name: value[:, None, None] for name, value in options.items()}
    later = heads_of(scale=0.3)
    torch.testing.assert_close(core(*later), lln.lln_attention(*later, **options))
    first = running(momentum=0.25, matching="entropy")
    torch.testing.assert_close(first(q, k, v), lln.lln_attention(q, k, v, **options))


def test_cross_attention_counts_queries_and_keys_by_themselves():
    core = running(momentum=1.0)
    (q, _, _), (_, k, v) = heads_of(tokens=5), heads_of(tokens=9, scale=2.0)
    core(q, k, v, key_mask=~padding(9, 3, tokens=9))
    expected = q.square().mean((0, 2, 3))
    torch.testing.assert_close(core.statistics.query_variance, expected)
    assert core.statistics.keys.item() == 6.0


def test_padding_never_enters_the_running_average():
    cores = [running(), running()]
    for core, fill in zip(cores, (0.0, NAN), strict=True):
        torch.manual_seed(1)
        q, k, v = heads_of()
        for tensor in (q, k, v):
            tensor[1, :, 6:] = fill
        core(q, k, v, key_mask=~padding(T, 6))
    assert same_state(*map(state_of, cores))


def test_eval_freezes_the_average():
    core = running()
    core(*heads_of(scale=2.0))
    before = state_of(core)
    core.eval()
    one, other = heads_of(), heads_of(scale=5.0)
    alone = core(*one)
    together = core(*(torch.cat(pair) for pair in zip(one, other, strict=True)))
    assert same_state(before, state_of(core))
    torch.testing.assert_close(together[:B], alone)


def test_state_dict_restores_the_average():
    core, inputs = running(), heads_of()
    for scale in (1.0, 3.0):
        core(*heads_of(scale=scale))
    other = running()
    other.load_state_dict(core.state_dict(), strict=True)
    assert same_state(state_of(core), state_of(other))
    assert torch.equal(core(*inputs), other(*inputs))
    assert same_state(state_of(core), state_of(other))


@pytest.mark.parametrize("bad", [NAN, torch.inf, "padding", "no tokens"])
def test_useless_batches_leave_the_average_alone(bad):
    core = running()
    core(*heads_of())
    before = state_of(core)
    if bad == "padding":
        core(*heads_of(), key_mask=torch.zeros(B, T, dtype=torch.bool))
    elif bad == "no tokens":
        core(*heads_of(tokens=0))
    else:
        q, k, v = heads_of()
        k[0, 0, 0, 0] = bad
        core(q, k, v)
    assert same_state(before, state_of(core))


@pytest.mark.parametrize("bad", [NAN, "padding"])
def test_useless_first_batch_leaves_the_start(bad):
    core, before = running(), state_of(running())
    q, k, v = heads_of()
    mask = torch.full((B, T), bad != "padding")
    q[0, 0, 0, 0] = NAN
    core(q, k, v, key_mask=mask)
    assert same_state(before, state_of(core))


def test_constant_inputs_stay_finite():
    core = running()
    constant = torch.full((B, HEADS, 1000, D), 1000.1)
    out = core(constant, constant, constant)
    torch.testing.assert_close(out, constant, rtol=1e-5, atol=0)
    alpha, beta = core.eval().statistics(constant, constant)
    assert (alpha < 1e3).all()
    assert (beta < 1e3).all()


@pytest.mark.parametrize("calls_before", [0, 2])
def test_causal_rows_never_see_the_future_through_statistics(calls_before):
    inputs = heads_of()
    changed = [tensor.clone() for tensor in inputs]
    for tensor in changed:
        tensor[:, :, 5:] *= 7.0
    outs = []
    for batch in (inputs, changed):
        core = running()
        torch.manual_seed(2)
        for _ in range(calls_before):
            core(*heads_of(scale=2.0), is_causal=True)
        outs.append(core(*batch, is_causal=True))
    torch.testing.assert_close(outs[0][:, :, :5], outs[1][:, :, :5], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(outs[0][:, :, 5:], outs[1][:, :, 5:])


@each_layer
def test_causal_with_sample_statistics_is_refused(kind):
    with pytest.raises(CausalStatisticsError, match="statistics='sample'"):
        layer_of(kind)(torch.randn(B, T, WIDTH), is_causal=True)


@pytest.mark.parametrize("statistics", ["running", "fixed", "learned"])
@pytest.mark.parametrize("join", JOINS)
def test_causal_modules(statistics, join):
    layer = layer_of(lln.LLNDiagAttention, statistics=statistics, join=join, block_size=4).eval()
    x = torch.randn(B, T, WIDTH)
    out = layer(x, is_causal=True)[0]
    torch.testing.assert_close(layer(x[:, :6], is_causal=True)[0], out[:, :6])
    assert not torch.allclose(layer(x)[0][:, :6], out[:, :6])


# Running statistics under activation checkpointing


def train(batches, reentrant=None, together=False, calls=1):
    """Gradients of every batch's queries, and the state at the end."""
    core, leaves, losses = running(), [], []
    for batch in batches:
        inputs = [tensor.clone().requires_grad_() for tensor in batch]
        leaves.append(inputs[0])
        out = inputs[0]
        for _ in range(calls):
            if reentrant is None:
                out = core(out, *inputs[1:])
            else:
                out = checkpoint(core, out, *inputs[1:], use_reentrant=reentrant)
        losses.append(out.square().sum())
        if not together:
            losses.pop().backward()
    if together:
        torch.stack(losses).sum().backward()
    return [leaf.grad for leaf in leaves], state_of(core)


def batches_of(*scales):
    return [heads_of(scale=scale) for scale in scales]


def same_training(batches, reentrant, **options):
    expected, expected_state = train(batches, **options)
    found, state = train(batches, reentrant, **options)
    assert same_state(state, expected_state)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@each_reentrant
def test_checkpointing_updates_once_and_keeps_the_gradient(reentrant):
    same_training(batches_of(1.0, 3.0, 0.5), reentrant)


@each_reentrant
@pytest.mark.parametrize("count", [4, 40])
def test_checkpointing_with_several_batches_before_backward(reentrant, count):
    same_training(batches_of(*torch.linspace(0.5, 4.0, count)), reentrant, together=True)


@each_reentrant
def test_checkpointing_a_module_that_is_used_twice(reentrant):
    same_training(batches_of(1.0, 3.0), reentrant, calls=2)


@each_reentrant
def test_checkpointing_a_batch_that_comes_again(reentrant):
    first, second = batches_of(1.0, 3.0)
    same_training([first, second, first], reentrant)


@each_reentrant
def test_checkpointing_after_a_nan_batch(reentrant):
    batches = batches_of(1.0, 1.0, 3.0, 0.5)
    for tensor in batches[1]:
        tensor.fill_(NAN)
    same_training(batches, reentrant)


@each_reentrant
def test_checkpointing_causal(reentrant):
    core, inputs = running(), [tensor.requires_grad_() for tensor in heads_of(scale=2.0)]
    expected = torch.autograd.grad(core(*inputs, is_causal=True).square().sum(), inputs)
    again = running()

    def attend(*tensors):
        return again(*tensors, is_causal=True)

    checkpoint(attend, *inputs, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(t.grad, g) for t, g in zip(inputs, expected, strict=True))
    assert again.statistics.updates.item() == 1


def test_checkpointing_after_a_move_to_another_device():
    core = running()
    core(*heads_of())
    core.to("meta")
    inputs = [tensor.to("meta").requires_grad_() for tensor in heads_of()]
    checkpoint(core, *inputs, use_reentrant=False, preserve_rng_state=False).sum().backward()
    assert inputs[0].grad.shape == inputs[0].shape


# Copies, dtypes, devices


@each_layer
@each_statistics
def test_deepcopy_and_pickle(kind, statistics):
    layer, x = layer_of(kind, statistics=statistics), torch.randn(B, T, WIDTH)
    layer(x)[0].sum().backward()
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    expected = layer(x)[0]
    for twin in copies:
        assert torch.equal(twin(x)[0], expected)
        assert twin.state_dict().keys() == layer.state_dict().keys()
        assert "statistics" in repr(twin)


@each_layer
@each_statistics
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(kind, statistics, dtype):
    layer = layer_of(kind, statistics=statistics).to(dtype)
    twin = copy.deepcopy(layer).float()
    x = torch.randn(B, T, WIDTH).to(dtype)
    for _ in range(2):
        found, expected = layer(x)[0], twin(x.float())[0]
    assert found.dtype == dtype
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: 1e-5}[dtype]
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    found.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_running_average_keeps_float32_digits(dtype):
    """Steps of one thousandth are below bfloat16's resolution and must not be lost."""
    core = running(momentum=1e-3).to(dtype)
    core(*heads_of(dtype=dtype))
    before = core.statistics.query_variance.clone()
    for _ in range(3):
        core(*heads_of(scale=2.0, dtype=dtype))
    moved = core.statistics.query_variance.float() / before.float() - 1
    assert (moved > 0.003).all()
    assert (moved < 0.03).all()


@each_layer
@each_statistics
def test_autocast(kind, statistics):
    layer, x = layer_of(kind, statistics=statistics), torch.randn(B, T, WIDTH)
    twin = copy.deepcopy(layer)
    expected = twin(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x, key_padding_mask=padding(T, T))[0]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=5e-2, atol=2e-2)
    found.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())
    if statistics == "running":
        for name, tensor in state_of(layer.core).items():
            torch.testing.assert_close(tensor, state_of(twin.core)[name], rtol=2e-2, atol=0)


@pytest.mark.parametrize("join", JOINS)
@each_statistics
def test_meta_device(statistics, join):
    layer = layer_of(lln.LLNDiagAttention, statistics=statistics, join=join).to("meta")
    x = torch.randn(B, T, WIDTH, device="meta")
    out = layer(x, key_padding_mask=padding(T, 6).to("meta"))[0]
    assert (out.shape, out.device.type) == (x.shape, "meta")
    built = layer_of(lln.LLNDiagAttention, statistics=statistics, join=join, device="meta")
    assert all(tensor.is_meta for tensor in built.state_dict().values())


def test_dtype_argument_is_for_the_projections():
    layer = layer_of(dtype=torch.bfloat16, statistics="running")
    assert layer.in_proj_weight.dtype == layer.out_proj.weight.dtype == torch.bfloat16
    assert layer.core.statistics.query_variance.dtype == torch.float32
    assert layer(torch.randn(B, T, WIDTH, dtype=torch.bfloat16))[0].dtype == torch.bfloat16


# torch.compile and several processes


@pytest.mark.parametrize("statistics", [pytest.param("sample", marks=pytest.mark.slow), "running"])
def test_compiled_module(statistics):
    torch._dynamo.reset()
    layer = layer_of(lln.LLNDiagAttention, statistics=statistics, join="gate", block_size=4)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x = torch.randn(B, T, WIDTH)
        found, expected = (
            module(x, key_padding_mask=padding(T, 6))[0] for module in (compiled, twin)
        )
        torch.testing.assert_close(found, expected)
    for one, other in zip(layer.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other)
    found.sum().backward()
    assert layer.in_proj_weight.grad.isfinite().all()


@each_reentrant
def test_checkpointed_compiled_module_updates_once(reentrant):
    """And keeps the gradient, batch after batch."""
    torch._dynamo.reset()
    batches = batches_of(1.0, 3.0, 0.5)
    expected, state = train(batches, together=False)
    core = running()
    compiled = torch.compile(core, backend="aot_eager")
    leaves = [[tensor.clone().requires_grad_() for tensor in batch] for batch in batches]
    for leaf in leaves:
        checkpoint(compiled, *leaf, use_reentrant=reentrant).square().sum().backward()
    assert core.statistics.updates.item() == 3
    for name, tensor in state_of(core).items():
        torch.testing.assert_close(tensor, state[name])
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf[0].grad, gradient, rtol=1e-4, atol=1e-4)


def test_checkpointed_compiled_module_refuses_a_second_batch_before_the_backward():
    torch._dynamo.reset()
    compiled = torch.compile(running(), backend="aot_eager")
    leaves = [[t.clone().requires_grad_() for t in batch] for batch in batches_of(1.0, 3.0)]
    outs = [checkpoint(compiled, *leaf, use_reentrant=False) for leaf in leaves]
    with pytest.raises(RuntimeError, match="every backward right after its forward"):
        torch.stack(outs).square().sum().backward()


WORKER = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
import lln

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
given = torch.load(f"{folder}/given.pt")
layer = lln.LLNAttention(16, 4, batch_first=True, statistics="running")
layer.load_state_dict(given["weights"], strict=True)
model = nn.parallel.DistributedDataParallel(layer)
outs = []
for x, lengths in given["steps"]:
    mask = torch.arange(x.shape[1]) >= lengths.unsqueeze(-1)
    share = slice(2 * rank, 2 * rank + 2)
    out = checkpoint(model, x[share], x[share], x[share], mask[share], use_reentrant=False)[0]
    outs.append(out.detach())
    out.square().sum().backward()
result = {"outs": outs, "state": layer.core.statistics.state_dict()}
result["grad"] = layer.in_proj_weight.grad
torch.save(result, f"{folder}/rank{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_share_one_average(tmp_path):
    layer = layer_of(statistics="running")
    steps = [
        (scale * torch.randn(4, T, WIDTH), torch.tensor(lengths))
        for scale, lengths in ((1.0, (10, 2, 7, 9)), (3.0, (3, 10, 0, 0)), (0.5, (0, 0, 1, 8)))
    ]
    torch.save({"weights": layer.state_dict(), "steps": steps}, tmp_path / "given.pt")
    command = [sys.executable, "-c", textwrap.dedent(WORKER)]
    workers = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for worker in workers:
        errors = worker.communicate(timeout=120)[1]
        assert worker.returncode == 0, errors[-2000:]
    found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]

    assert same_state(found[0]["state"], found[1]["state"])
    for step, (x, lengths) in enumerate(steps):
        out = layer(x, key_padding_mask=torch.arange(T) >= lengths.unsqueeze(-1))[0]
        out.square().sum().backward()
        both = torch.cat([result["outs"][step] for result in found])
        torch.testing.assert_close(both, out, rtol=1e-5, atol=1e-5)
    for name, tensor in state_of(layer.core).items():
        torch.testing.assert_close(found[0]["state"][name], tensor, rtol=1e-6, atol=0)
    # DDP averages the gradients of its two processes.
    torch.testing.assert_close(
        2 * found[0]["grad"], layer.in_proj_weight.grad, rtol=1e-4, atol=1e-4
    )


@each_statistics
def test_cores_are_built_on_the_meta_device(statistics):
    """As libraries do that load weights right after."""
    with torch.device("meta"):
        core = lln.LLNDiagCore(HEADS, D, statistics=statistics, join="gate")
    assert all(tensor.is_meta for tensor in (*core.parameters(), *core.buffers()))


def test_operator_that_asks_for_the_backward_is_well_formed():
    torch.library.opcheck(torch.ops.lln.inside_backward.default, (torch.randn(3),))
