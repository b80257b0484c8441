"""Legal edge cases and the value each must have."""

import pytest
import torch

from lln import (
    KeySummary,
    LLNAttention,
    LLNDiagAttention,
    LLNKeysAttention,
    block_diagonal_attention,
    calibrate,
    choose_keys,
    decode_step,
    lln_attention,
    lln_attention_varlen,
    lln_diag_attention,
    lln_diag_attention_varlen,
    lln_keys_attention,
    lln_keys_attention_varlen,
    match_moments,
    reference,
)
from lln.testing import assert_close, make_qkv
from lln.testing.tolerances import EAGER_ROUNDINGS

CRITERIA = ["variance", "entropy", "paper"]
GIVEN = {"alpha": 1.5, "beta": 2.0}


def lln(*qkv, **options):
    return lln_attention(*qkv, **options)


def causal(*qkv, **options):
    return lln_attention(*qkv, **GIVEN, is_causal=True, **options)


def block(*qkv, **options):
    return block_diagonal_attention(*qkv, block_size=4, **options)


def diag(*qkv, **options):
    return lln_diag_attention(*qkv, block_size=4, **options)


def causal_diag(*qkv, **options):
    return lln_diag_attention(*qkv, block_size=4, **GIVEN, is_causal=True, **options)


FORMS = [lln, causal, block, diag, causal_diag]
SELF_MATCHED = [lln, diag]


def zero_gradients(out, leaves):
    out.sum().backward()
    return all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


# No batch, no heads, no queries, no keys.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("batch", "heads", "tokens"), [(0, 2, 70), (2, 0, 70), (2, 2, 0)])
def test_empty_input_gives_empty_output(batch, heads, tokens, form):
    leaves = make_qkv(batch, heads, tokens, 4, value_width=6, requires_grad=True)
    out = form(*leaves)
    assert out.shape == (batch, heads, tokens, 6)
    assert zero_gradients(out, leaves)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("batch", "tokens"), [(0, 9), (2, 0)])
def test_empty_input_with_empty_mask(batch, tokens, form):
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    out = form(*make_qkv(batch, 2, tokens, 4), key_mask=mask)
    assert out.shape == (batch, 2, tokens, 4)


@pytest.mark.parametrize("form", SELF_MATCHED)
@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize(("batch", "heads", "tokens"), [(0, 2, 7), (2, 0, 7), (2, 2, 0)])
def test_empty_input_can_be_matched(batch, heads, tokens, criterion, form):
    out = form(*make_qkv(batch, heads, tokens, 4), matching=criterion)
    assert out.shape == (batch, heads, tokens, 4)


@pytest.mark.parametrize("learned", ["alpha", "beta"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_input_gives_learned_temperatures_a_zero_gradient(learned, is_causal):
    scales = {name: torch.tensor(1.5, requires_grad=name == learned) for name in GIVEN}
    inputs = make_qkv(2, 2, 0, 4, requires_grad=True)
    lln_attention(*inputs, **scales, is_causal=is_causal).sum().backward()
    assert scales[learned].grad == 0


@pytest.mark.parametrize("options", [GIVEN, *({"matching": name} for name in CRITERIA)], ids=str)
def test_no_keys_give_zeros(options):
    leaves = make_qkv(2, 3, 5, 4, keys=0, value_width=6, requires_grad=True)
    out = lln_attention(*leaves, **options)
    assert out.shape == (2, 3, 5, 6)
    assert not out.any()
    assert zero_gradients(out, leaves)


@pytest.mark.parametrize("form", FORMS)
def test_values_without_width(form):
    assert form(*make_qkv(2, 2, 7, 4, value_width=0)).shape == (2, 2, 7, 0)


@pytest.mark.parametrize("attend", [lln_attention_varlen, lln_diag_attention_varlen])
@pytest.mark.parametrize("bounds", [[0], [0, 0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("options", [GIVEN, *({"matching": name} for name in CRITERIA)], ids=str)
def test_no_packed_tokens(attend, bounds, options):
    out = attend(*torch.randn(3, 0, 2, 4), torch.tensor(bounds), **options)
    assert out.shape == (0, 2, 4)


@pytest.mark.parametrize("module", [LLNAttention, LLNDiagAttention])
@pytest.mark.parametrize("statistics", ["sample", "running", "fixed", "learned"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("batch", "tokens"), [(0, 7), (2, 0)])
def test_modules_take_no_samples_and_no_tokens(batch, tokens, training, statistics, module):
    layer = module(16, 2, batch_first=True, statistics=statistics).train(training)
    x = torch.randn(batch, tokens, 16, requires_grad=True)
    for padding in (None, torch.zeros(batch, tokens, dtype=torch.bool)):
        out, _ = layer(x, x, x, key_padding_mask=padding)
        assert out.shape == x.shape
        assert zero_gradients(out, [x, *layer.parameters()])
    assert all(buffer.isfinite().all() for buffer in layer.buffers())


@pytest.mark.parametrize("scope", ["head", "batch"])
@pytest.mark.parametrize(("batch", "heads"), [(0, 2), (2, 0)])
def test_nothing_to_calibrate_with_gives_one(batch, heads, scope):
    """No sequences or no heads; sequences without tokens are refused."""
    query, key, _ = make_qkv(batch, heads, 7, 4)
    for found in calibrate(query, key, scope=scope):
        assert found.shape == (1 if scope == "batch" else batch, heads, 1, 1)
        assert (found == 1).all()


def test_no_sequences_to_decode():
    summary = KeySummary.empty(0, 2, 4, 6, beta=2.0)
    query, key, value = make_qkv(0, 2, 1, 4, value_width=6)
    assert decode_step(query, key, value, summary, alpha=2.0).shape == (0, 2, 1, 6)


# Everything masked.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 9, 150])
@pytest.mark.parametrize("fill", [1.0, torch.nan])
def test_fully_masked_batch_is_zero(fill, tokens, form):
    leaves = make_qkv(2, 2, tokens, 4)
    leaves = [(fill * tensor).requires_grad_() for tensor in leaves]
    out = form(*leaves, key_mask=torch.zeros(2, tokens).bool())
    assert not out.any()
    assert zero_gradients(out, leaves)


@pytest.mark.parametrize("form", SELF_MATCHED)
@pytest.mark.parametrize("criterion", CRITERIA)
def test_fully_masked_batch_is_zero_when_matched(criterion, form):
    out = form(*make_qkv(2, 2, 9, 4), matching=criterion, key_mask=torch.zeros(2, 9).bool())
    assert torch.equal(out, torch.zeros(2, 2, 9, 4))


@pytest.mark.parametrize("form", FORMS)
def test_fully_masked_sample_is_zero_and_alone(form):
    inputs = make_qkv(3, 2, 150, 4, value_width=5)
    for tensor in inputs:
        tensor[1] = torch.nan
    mask = torch.ones(3, 150, dtype=torch.bool)
    mask[1] = False
    out = form(*inputs, key_mask=mask)
    assert not out[1].any()
    others = [0, 2]
    alone = form(*(tensor[others] for tensor in inputs), key_mask=mask[others])
    torch.testing.assert_close(out[others], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_fully_masked_sample_stays_out_of_the_statistics(criterion):
    query, key, _ = make_qkv(3, 2, 50, 4)
    mask = torch.ones(3, 50, dtype=torch.bool)
    mask[1] = False
    scope = "tensor" if criterion == "paper" else "head"
    found = match_moments(query, key, criterion=criterion, scope=scope, key_mask=mask)
    key[1], query[1] = 1e6, -1e6
    changed = match_moments(query, key, criterion=criterion, scope=scope, key_mask=mask)
    assert all(map(torch.equal, found, changed))


@pytest.mark.parametrize("is_causal", [False, True])
def test_fully_masked_block_is_zero(is_causal):
    query, key, value = make_qkv(1, 2, 12, 4)
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[:, 4:8] = False
    out = block_diagonal_attention(
        query, key, value, block_size=4, key_mask=mask, is_causal=is_causal
    )
    assert not out[:, :, 4:8].any()
    assert out[:, :, :4].all()
    assert out[:, :, 8:].all()


# Sequences of no length.


@pytest.mark.parametrize("options", [GIVEN, GIVEN | {"is_causal": True}, {}], ids=str)
@pytest.mark.parametrize("attend", [lln_attention_varlen, lln_diag_attention_varlen])
def test_empty_sequences_are_skipped(attend, options):
    packed = torch.randn(3, 12, 2, 4)
    plain = attend(*packed, torch.tensor([0, 5, 12]), **options)
    sparse = attend(*packed, torch.tensor([0, 0, 5, 5, 5, 12, 12]), **options)
    torch.testing.assert_close(sparse, plain, rtol=0, atol=1e-6)


def test_bounds_of_any_layout():
    packed = torch.randn(3, 12, 2, 4)
    bounds = torch.tensor([0, 9, 5, 9, 12, 9])[::2]
    assert not bounds.is_contiguous()
    found = lln_diag_attention_varlen(*packed, bounds)
    assert torch.equal(found, lln_diag_attention_varlen(*packed, bounds.contiguous()))


# Constants, single tokens, single features.


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("level", [0.0, 0.3, -1e3])
def test_constant_keys_fall_back_to_one(level, tokens, criterion):
    query, key, _ = make_qkv(2, 3, tokens, 4)
    key.fill_(level)
    scope = "tensor" if criterion == "paper" else "head"
    alpha, beta = match_moments(query, key, criterion=criterion, scope=scope)
    assert (alpha == 1).all()
    assert (beta == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("level", [0.0, 0.3, -1e3])
def test_constant_keys_average_the_values(level, dtype):
    query, key, value = make_qkv(2, 3, 20, 4, dtype=dtype)
    key.fill_(level)
    found = lln_attention(query, key, value)
    assert_close(found, value.double().mean(2, keepdim=True).expand(found.shape))


@pytest.mark.parametrize("form", FORMS)
def test_one_token_gives_its_value(form):
    query, key, value = make_qkv(2, 3, 1, 4)
    torch.testing.assert_close(form(query, key, value), value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", SELF_MATCHED)
@pytest.mark.parametrize("criterion", CRITERIA)
def test_one_element(criterion, form):
    query, key, value = make_qkv(1, 1, 1, 1)
    found = form(query, key, value, matching=criterion)
    torch.testing.assert_close(found, value, rtol=1e-6, atol=0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_feature_ignores_the_query(is_causal):
    query, key, value = make_qkv(2, 3, 70, 1, value_width=4)
    found = lln_attention(query, key, value, **GIVEN, is_causal=is_causal)
    other = lln_attention(-3 * query, key, value, **GIVEN, is_causal=is_causal)
    torch.testing.assert_close(found, other, rtol=0, atol=1e-6)
    keep = reference.causal_keep(70) if is_causal else None
    doubles = (tensor.double() for tensor in (query, key, value))
    assert_close(found, reference.lln_attention(*doubles, *GIVEN.values(), keep=keep))


# Blocks far beyond the sequence.

FAR = 2**40


KEYS = {**GIVEN, "offset": -2.0, "keys": 3}
HUGE_BLOCKS = {
    "diag": (block_diagonal_attention, {}),
    "causal diag": (block_diagonal_attention, {"is_causal": True}),
    "lln_diag": (lln_diag_attention, GIVEN),
    "causal lln_diag": (lln_diag_attention, GIVEN | {"is_causal": True}),
    "keys": (lln_keys_attention, KEYS),
    "own keys": (lln_keys_attention, KEYS | {"group_size": 1}),
    "large groups": (lln_keys_attention, KEYS | {"group_size": FAR // 2}),
}


@pytest.mark.parametrize("mask", [None, "left"])
@pytest.mark.parametrize("impl", ["eager", "reference"])
@pytest.mark.parametrize("name", HUGE_BLOCKS)
def test_a_block_far_beyond_the_sequence_is_one_block(name, impl, mask):
    attend, options = HUGE_BLOCKS[name]
    inputs = make_qkv(2, 2, 128, 8)
    options = options | {"impl": impl}
    if mask is not None:
        options["key_mask"] = torch.arange(128) >= torch.tensor([[0], [21]])
    found = attend(*inputs, block_size=FAR, **options)
    group = options.get("group_size")
    if group is not None:
        options["group_size"] = min(group, 128)
    assert torch.equal(found, attend(*inputs, block_size=128, **options))


@pytest.mark.parametrize(
    ("attend", "options"),
    [
        (lln_diag_attention_varlen, GIVEN),
        (lln_diag_attention_varlen, GIVEN | {"is_causal": True}),
        (lln_keys_attention_varlen, KEYS),
    ],
    ids=["diag", "causal diag", "keys"],
)
def test_a_block_far_beyond_packed_sequences_is_one_block(attend, options):
    bounds = torch.tensor([0, 40, 41, 41, 105])
    inputs = torch.randn(3, 105, 2, 8)
    found = attend(*inputs, bounds, block_size=FAR, **options)
    wanted = attend(*inputs, bounds, block_size=64, **options)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_keys_chosen_with_a_block_far_beyond_the_sequence_are_taken():
    query, key, value = make_qkv(2, 2, 70, 8)
    mask = torch.arange(70) >= torch.tensor([[0], [21]])
    options = {"block_size": FAR, "group_size": 1, "key_mask": mask}
    chosen = choose_keys(query, key, 3, **options)
    assert chosen.shape[2] == 256
    found = lln_keys_attention(query, key, value, keys=chosen, **options)
    assert torch.equal(found, lln_keys_attention(query, key, value, keys=3, **options))


@pytest.mark.parametrize("module", [LLNDiagAttention, LLNKeysAttention])
def test_modules_take_a_block_far_beyond_the_sequence(module):
    x = torch.randn(2, 64, 16)
    padding = torch.arange(64) < torch.tensor([[0], [9]])
    layers = [module(16, 2, batch_first=True, block_size=size) for size in (FAR, 64)]
    layers[1].load_state_dict(layers[0].state_dict())
    found, wanted = (layer(x, x, x, key_padding_mask=padding)[0] for layer in layers)
    assert torch.equal(found, wanted)


# Not a number, and infinity.


def elsewhere(tensor, batch=0, head=0):
    keep = torch.ones(tensor.shape[:2], dtype=torch.bool)
    keep[batch, head] = False
    return tensor[keep]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spoiled", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("fill", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_input_stays_in_its_head(fill, spoiled, form):
    clean = make_qkv(2, 2, 70, 4)
    inputs = [tensor.clone() for tensor in clean]
    inputs[spoiled][0, 0, 10, 1] = fill
    leaves = [tensor.requires_grad_() for tensor in inputs]
    out = form(*leaves)
    torch.testing.assert_close(elsewhere(out), elsewhere(form(*clean)), rtol=0, atol=1e-6)
    elsewhere(out).sum().backward()
    assert all(elsewhere(leaf.grad).isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spoiled", range(3), ids=["query", "key", "value"])
def test_nan_shows_in_its_own_row(spoiled, form):
    inputs = make_qkv(2, 2, 70, 4)
    inputs[spoiled][0, 0, 10, 1] = torch.nan
    assert form(*inputs)[0, 0, 10].isnan().any()


def given(*qkv, **options):
    return lln_attention(*qkv, **GIVEN, **options)


@pytest.mark.parametrize("form", [given, causal, block, causal_diag])
@pytest.mark.parametrize("mask", [None, "left"])
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("spoiled", [0, 1], ids=["query", "key"])
@pytest.mark.parametrize("fill", [torch.inf, -torch.inf])
def test_infinity_shows_wherever_nan_does(fill, spoiled, grad, mask, form):
    """An exponential would turn -inf into a weight of zero, and nobody would notice."""
    inputs = make_qkv(2, 2, 70, 4)
    inputs[spoiled][0, 0, 42, 1] = fill
    inputs[0].requires_grad_(grad)
    options = {}
    if mask is not None:
        options["key_mask"] = (torch.arange(70) >= 3).expand(2, -1)
    bad = ~form(*inputs, **options)[0, 0].isfinite().any(-1)
    if spoiled == 0:
        rows = slice(42, 43)
    elif form is block:
        rows = slice(40, 44) if mask is None else slice(39, 43)
    else:
        rows = slice(3, 70) if form is given else slice(42, 70)
    assert bad[rows].all()


@pytest.mark.parametrize("fill", [torch.inf, -torch.inf])
def test_infinity_shows_in_a_summary(fill):
    query, key, value = make_qkv(1, 2, 9, 4)
    summary = KeySummary.of(key, value, beta=2.0)
    query[0, 0, 5, 1] = fill
    assert summary.read(query, 1.5)[0, 0, 5].isnan().all()
    key[0, 0, 3, 1] = fill
    spoilt = KeySummary.of(key, value, beta=2.0).read(torch.randn_like(query), 1.5)
    assert spoilt[0, 0].isnan().all()
    assert spoilt[0, 1].isfinite().all()


PACKED = torch.tensor([0, 70, 75, 140])


def spoil_packed(spoiled, sequence, fill):
    """Packed inputs, clean and with one bad entry, and the tokens of the other sequences."""
    clean = torch.randn(3, 140, 2, 4)
    start, end = PACKED[sequence : sequence + 2].tolist()
    inputs = clean.clone()
    inputs[spoiled, start, 0, 1] = fill
    others = torch.ones(140, dtype=torch.bool)
    others[start:end] = False
    return clean, inputs, others


@pytest.mark.parametrize("options", [GIVEN, GIVEN | {"is_causal": True}, {}], ids=str)
@pytest.mark.parametrize("attend", [lln_attention_varlen, lln_diag_attention_varlen])
@pytest.mark.parametrize("spoiled", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("sequence", [0, 1, 2])
def test_nan_stays_in_its_sequence(sequence, spoiled, attend, options):
    clean, inputs, others = spoil_packed(spoiled, sequence, torch.nan)
    out = attend(*inputs, PACKED, **options)
    assert out[PACKED[sequence]].isnan().any()
    wanted = attend(*clean, PACKED, **options)
    torch.testing.assert_close(out[others], wanted[others], rtol=0, atol=2e-6)


@pytest.mark.parametrize("attend", [lln_attention_varlen, lln_diag_attention_varlen])
@pytest.mark.parametrize("spoiled", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("fill", [torch.inf, -torch.inf])
@pytest.mark.parametrize("sequence", [0, 1, 2])
def test_infinity_stays_in_its_sequence(sequence, spoiled, fill, attend):
    clean, inputs, others = spoil_packed(spoiled, sequence, fill)
    found, wanted = (attend(*side, PACKED, **GIVEN) for side in (inputs, clean))
    torch.testing.assert_close(found[others], wanted[others], rtol=0, atol=2e-6)
    own = found[~others, 0]
    assert not (own[:1] if spoiled == 0 else own).isfinite().all(-1).any()


@pytest.mark.parametrize("attend", [lln_attention_varlen, lln_diag_attention_varlen])
@pytest.mark.parametrize("spoiled", [0, 2], ids=["query", "value"])
@pytest.mark.parametrize("sequence", [0, 1, 2])
def test_nan_reaches_no_causal_gradient_of_another_sequence(sequence, spoiled, attend):
    _, inputs, others = spoil_packed(spoiled, sequence, torch.nan)
    inputs.requires_grad_()
    attend(*inputs, PACKED, **GIVEN, is_causal=True)[others].sum().backward()
    assert inputs.grad[:, others].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fill", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_masked_garbage_has_no_effect(fill, form):
    clean = make_qkv(2, 2, 70, 4)
    inputs = [tensor.clone() for tensor in clean]
    mask = torch.rand(2, 70) < 0.6
    for tensor in inputs:
        tensor.masked_fill_(~mask[:, None, :, None], fill)
    valid = mask[:, None, :, None].expand(2, 2, 70, 4)
    found, wanted = form(*inputs, key_mask=mask), form(*clean, key_mask=mask)
    torch.testing.assert_close(found[valid], wanted[valid], rtol=0, atol=1e-6)


# Very small, very large.


def matched_reference(query, key, value, is_causal):
    """α, β as eager takes them, the float64 result, and the size of the exponents."""
    alpha, beta = match_moments(query, key)
    keep = reference.causal_keep(query.shape[2]) if is_causal else None
    doubles = [tensor.double() for tensor in (query, key, value, alpha, beta)]
    exponent = max((doubles[3] * doubles[0]).abs().max(), (doubles[4] * doubles[1]).abs().max())
    return alpha, beta, reference.lln_attention(*doubles, keep=keep), exponent.item()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [1e-40, 1e-3, 1.0, 8.0, 32.0, 1e2, 1e3, 1e4])
def test_every_scale_is_finite_and_in_budget(scale, dtype, is_causal):
    query, key, value = make_qkv(1, 2, 100, 8, dtype=dtype, scale=scale)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    alpha, beta, wanted, exponent = matched_reference(
        *(tensor.detach() for tensor in leaves), is_causal
    )
    out = lln_attention(*leaves, alpha=alpha, beta=beta, is_causal=is_causal)
    # Rounding an exponent of size x changes its weight by x·ε: the question itself is blurred.
    blurred = exponent / EAGER_ROUNDINGS * wanted.abs().max().item()
    assert_close(out, wanted, magnitude=min(blurred, 1e3))
    out.square().sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_float16_extremes():
    largest = torch.finfo(torch.float16).max
    query, key, value = make_qkv(1, 2, 70, 4, dtype=torch.float16)
    for tensor in (query, key, value):
        tensor[..., 3, 0], tensor[..., 4, 1] = largest, -largest
    for is_causal in (False, True):
        out = lln_attention(query, key, value, **GIVEN, is_causal=is_causal)
        keep = reference.causal_keep(70) if is_causal else None
        doubles = (tensor.double() for tensor in (query, key, value))
        assert_close(out, reference.lln_attention(*doubles, *GIVEN.values(), keep=keep))


@pytest.mark.parametrize("form", FORMS)
def test_subnormal_values_survive(form):
    query, key, _ = make_qkv(1, 2, 20, 4)
    value = torch.full((1, 2, 20, 4), 1e-40)
    out = form(query, key, value)
    torch.testing.assert_close(out, value, rtol=1e-3, atol=0)
