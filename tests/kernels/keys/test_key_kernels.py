"""The kernels of exact keys: their choice against plain PyTorch, the rest against the reference."""

import importlib

import pytest
import torch
from tests.kernels.common import DEVICE, DTYPES, HALF, ON_GPU, check_compiled, holes
from tests.kernels.keys.exact_keys import GIVEN, compare, run, set_size

import lln
from lln import reference
from lln.kernels.keys import launch_keys
from lln.kernels.launching import limits
from lln.testing import assert_close, make_qkv

CALLS = [
    {"tokens": 65, "block_size": 16, "keys": 8},
    {"tokens": 1, "block_size": 16, "keys": 4},
    {"tokens": 40, "block_size": 64, "keys": 16},
    {"tokens": 64, "block_size": 32, "keys": 0},
    {"tokens": 70, "block_size": 32, "group_size": 16, "keys": 100},
    {"tokens": 48, "block_size": 16, "keys": 5, "width": 40, "value_width": 24},
    {"tokens": 48, "block_size": 16, "keys": 5, "key_heads": 1, "scale": -0.3},
]
LARGE = [
    {"tokens": 1025, "block_size": 64, "keys": 64, "width": 64},
    {"tokens": 500, "block_size": 64, "group_size": 16, "keys": 130, "width": 64},
    {"tokens": 300, "block_size": 128, "keys": 64, "width": 32, "value_width": 128},
    {"tokens": 257, "block_size": 64, "keys": 32, "width": 128},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", CALLS if ON_GPU else CALLS[::2])
def test_outputs_and_gradients(dtype, call):
    compare(dtype, **call)


def fits(dtype, width=16, value_width=None, block_size=64, group_size=None, **_):
    query = torch.empty(0, width, dtype=dtype, device=DEVICE)
    group = group_size or block_size
    return limits.why_no_keys(query, value_width or width, block_size, group) is None


LARGE_CALLS = [
    (dtype, call) for dtype in DTYPES for call in LARGE if ON_GPU and fits(dtype, **call)
]


@pytest.mark.parametrize(("dtype", "call"), LARGE_CALLS)
def test_large_outputs_and_gradients(dtype, call):
    compare(dtype, **call)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key_heads", [None, 1] if ON_GPU else [1])
def test_learned_numbers(dtype, key_heads):
    compare(dtype, tokens=50, block_size=16, keys=6, key_heads=key_heads, learned=True)


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else HALF)
def test_masks(dtype):
    mask = holes(2, 70)
    compare(dtype, tokens=70, block_size=16, keys=6, key_mask=mask, learned=True)
    compare(dtype, tokens=70, block_size=32, group_size=16, keys=40, key_mask=mask)


def test_layouts():
    compare(torch.float16, tokens=40, block_size=16, keys=6, layout="transposed")


def test_everything_masked_gives_zeros():
    mask = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    mask[0] = False
    inputs = make_qkv(2, 2, 40, 16, device=DEVICE, requires_grad=True)
    out, grads = run(inputs, GIVEN, {"block_size": 16, "keys": 4, "key_mask": mask}, "triton")
    assert not out[0].any()
    assert all(not gradient[0].any() for gradient in grads)
    assert all(gradient.isfinite().all() for gradient in grads)


@pytest.mark.slow
def test_pairs_in_several_slices(monkeypatch):
    inputs = make_qkv(1, 4, 34, 16, key_heads=2, device=DEVICE, requires_grad=True)
    options = {"block_size": 16, "keys": 8}
    whole = run(inputs, GIVEN, options, "triton")
    set_size(monkeypatch, launch_keys, "PAIR_SHARE", 0.0)
    sliced = run(inputs, GIVEN, options, "triton")
    assert all(torch.equal(*pair) for pair in zip(whole[1], sliced[1], strict=True))


SELECTIONS = [
    {"tokens": 130, "keys": 8, "block_size": 64},
    {"tokens": 60, "keys": 200, "block_size": 16},
    pytest.param(
        {"tokens": 150, "keys": 40, "block_size": 64, "group_size": 32}, marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("call", SELECTIONS)
@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_choice_is_that_of_plain_pytorch(call, masked):
    tokens = call["tokens"]
    query, key, _ = make_qkv(2, 2, tokens, 16, key_heads=1, device=DEVICE)
    options = {**call, "key_mask": holes(2, tokens) if masked else None, "enable_gqa": True}
    del options["tokens"]
    expected = lln.choose_keys(query, key, impl="eager", **options)
    assert torch.equal(lln.choose_keys(query, key, impl="triton", **options), expected)


@pytest.mark.slow
def test_equal_scores_are_taken_in_order():
    """Far more keys reach the threshold than there is room for: the exact one is found."""
    query = torch.ones(1, 1, 192, 16, device=DEVICE)
    key = query.clone()
    key[:, :, 150] = 2
    found = lln.choose_keys(query, key, 4, block_size=64, impl="triton")
    assert found[0, 0].tolist() == [[64, 65, 66, 150], [0, 1, 2, 150], [0, 1, 2, 3]]


@pytest.mark.skipif(ON_GPU, reason="only the interpreter can be watched")
def test_a_group_without_queries_does_not_look_at_all_keys(monkeypatch):
    """Its scores are all equal, so that far more reach the threshold than there is room for."""
    keys_select = importlib.import_module("lln.kernels.keys.triton_keys_select")
    looks, score_few = [], keys_select.score_few

    def watched(*arguments):
        looks.append(arguments)
        return score_few(*arguments)

    query, key, _ = make_qkv(1, 1, 600, 16)
    key_mask = torch.ones(1, 600, dtype=torch.bool)
    key_mask[:, 64:128] = False
    monkeypatch.setattr(keys_select, "score_few", watched)
    found = lln.choose_keys(query, key, 4, block_size=64, key_mask=key_mask, impl="triton")
    # Ten groups, each of which scores its candidates in one or two looks.
    assert len(looks) <= 20
    monkeypatch.undo()
    expected = lln.choose_keys(query, key, 4, block_size=64, key_mask=key_mask, impl="eager")
    assert torch.equal(found, expected)
    assert found[0, 0, 1].tolist() == [0, 1, 2, 3]


@pytest.mark.skipif(not ON_GPU, reason="the interpreter runs programs one after the other")
def test_bits_repeat():
    inputs = make_qkv(2, 2, 1000, 16, dtype=HALF[-1], device=DEVICE, requires_grad=True)
    options = {"block_size": 16, "keys": 32}
    first = run(inputs, GIVEN, options, "triton")
    for _ in range(20):
        again = run(inputs, GIVEN, options, "triton")
        assert torch.equal(first[0], again[0])
        assert all(torch.equal(*pair) for pair in zip(first[1], again[1], strict=True))


@pytest.mark.skipif(not ON_GPU, reason="takes half a minute in the interpreter")
def test_compiled():
    def attend(query, key, value):
        options = {"block_size": 16, "keys": 4, "impl": "triton"}
        return lln.lln_keys_attention(query, key, value, **GIVEN, **options)

    check_compiled(attend, 1, 1, [17, 33])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_size": 48}, "blocks of 48"),
        ({"group_size": 8}, "groups of 8"),
        ({"keys": 300}, "at most 256"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(options, said):
    inputs = make_qkv(1, 1, 400, 16, device=DEVICE)
    with pytest.raises(lln.BackendUnavailableError, match=said):
        lln.lln_keys_attention(*inputs, **GIVEN, **options, impl="triton")


def test_the_reference_agrees_with_softmax_where_every_key_is_exact():
    query, key, value = make_qkv(1, 2, 50, 16, device=DEVICE)
    out, plain = (
        lln.lln_keys_attention(query, key, value, **GIVEN, keys=64, block_size=16, impl=impl)
        for impl in ("triton", "eager")
    )
    expected = reference.softmax_attention(query, key, value)
    assert_close(out, expected, plain, what="output")
