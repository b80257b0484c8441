"""The kernels of select="query": their choice against plain PyTorch, the rest by the reference."""

import pytest
import torch
from tests.kernels.common import (
    DEVICE,
    DTYPES,
    HALF,
    ON_GPU,
    check_compiled,
    holes,
    let_auto_take_kernels,
)
from tests.kernels.keys.exact_keys import GIVEN, compare, run, set_size

import lln
from lln import instruments, observers, reference
from lln.kernels.keys import launch_choice, launch_keys, launch_list_choice, launch_lists
from lln.kernels.launching import limits
from lln.testing import assert_close, make_qkv

BOTH = ("triton", "eager")
# Every feature takes a program, and a program takes long in the interpreter.
WIDTH = 16 if ON_GPU else 4


def compare_lists(dtype=torch.float32, width=WIDTH, **call):
    compare(dtype, select="query", width=width, **call)


def coarse(tokens, width, dtype, **shape):
    """Queries and keys of few values, so that features and keys often tie."""
    sides = make_qkv(2, 2, tokens, width, dtype=dtype, device=DEVICE, **shape)
    return [(side * 2).round() / 2 for side in sides[:2]] + [sides[2]]


CALLS = [
    {"tokens": 65, "block_size": 16, "keys": 8},
    {"tokens": 1, "block_size": 16, "keys": 4},
    {"tokens": 40, "block_size": 64, "keys": 16},
    {"tokens": 70, "block_size": 32, "keys": 100},
    {"tokens": 33, "block_size": 16, "keys": 64, "value_width": 24},
    {"tokens": 48, "block_size": 16, "keys": 6, "width": 40, "value_width": 24},
    {"tokens": 48, "block_size": 16, "keys": 5, "key_heads": 1, "scale": -0.3},
]
LARGE = [
    {"tokens": 1025, "block_size": 64, "keys": 64, "width": 64},
    {"tokens": 1500, "block_size": 32, "keys": 256, "width": 64, "key_heads": 1},
    {"tokens": 257, "block_size": 64, "keys": 128, "width": 128, "value_width": 32},
    {"tokens": 700, "block_size": 64, "keys": 31, "width": 40},
    {"tokens": 2100, "block_size": 64, "keys": 32, "width": 16},
    {"tokens": 2100, "block_size": 32, "keys": 200, "width": 32, "value_width": 64},
]


# In the interpreter one type is enough for every change, and wide heads are for the night.
KINDS = [
    pytest.param(dtype, call, marks=pytest.mark.slow)
    if "width" in call or dtype not in HALF
    else (dtype, call)
    for dtype in DTYPES
    for call in CALLS
]


@pytest.mark.parametrize(("dtype", "call"), KINDS)
def test_outputs_and_gradients(dtype, call):
    compare_lists(dtype, **call)


def fits(dtype, width, block_size, value_width=0, **_):
    query = torch.empty(0, width, dtype=dtype, device=DEVICE)
    return limits.why_no_keys(query, max(width, value_width), block_size, block_size) is None


LARGE_CALLS = [
    (dtype, call) for dtype in DTYPES for call in LARGE if ON_GPU and fits(dtype, **call)
]


@pytest.mark.parametrize(("dtype", "call"), LARGE_CALLS)
def test_large_outputs_and_gradients(dtype, call):
    compare_lists(dtype, **call)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else HALF)
@pytest.mark.parametrize("key_heads", [None, 1] if ON_GPU else [1])
def test_learned_numbers(dtype, key_heads):
    compare_lists(dtype, tokens=50, block_size=16, keys=6, key_heads=key_heads, learned=True)


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else HALF)
def test_masks(dtype):
    mask = holes(2, 70)
    compare_lists(dtype, tokens=70, block_size=16, keys=6, key_mask=mask, learned=True)


@pytest.mark.slow
def test_masks_and_many_keys():
    compare_lists(HALF[0], tokens=70, block_size=32, keys=40, key_mask=holes(2, 70))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else HALF)
def test_ties(dtype):
    inputs = [side.requires_grad_() for side in coarse(50, WIDTH, dtype)]
    compare_lists(dtype, tokens=50, block_size=16, keys=12, inputs=inputs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else HALF)
def test_all_queries_share_their_features(dtype, monkeypatch):
    """Two features hold all entries: their lists are read tile by tile, in several runs."""
    set_size(monkeypatch, launch_lists, "RUN", 32)
    query, key, value = make_qkv(2, 2, 90, WIDTH, dtype=dtype, device=DEVICE)
    query[..., 1], query[..., 3] = 9.0, -8.0
    inputs = [side.requires_grad_() for side in (query, key, value)]
    compare_lists(dtype, tokens=90, block_size=16, keys=40, inputs=inputs)


@pytest.mark.slow
def test_lists_in_several_tiles(monkeypatch):
    """Longer lists than a tile of keys, and more than a tile of entries in a run."""
    set_size(monkeypatch, launch_lists, "ROWS", {"read": 16, "grad": 16})
    compare_lists(torch.float32, tokens=130, width=2, block_size=16, keys=160)


@pytest.mark.slow
def test_layouts():
    compare_lists(torch.float16, tokens=40, block_size=16, keys=6, layout="transposed")


def test_an_offset_that_leaves_out_the_slots():
    """The recipe for training from scratch: nothing but the own block and chosen keys."""
    inputs = make_qkv(1, 2, 50, WIDTH, device=DEVICE, requires_grad=True)
    options = {"block_size": 16, "keys": 6, "select": "query"}
    found, plain = (run(inputs, {**GIVEN, "offset": -1e4}, options, impl) for impl in BOTH)
    torch.testing.assert_close(found[0], plain[0], rtol=1e-5, atol=1e-6)
    for gradient, expected in zip(found[1], plain[1], strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_everything_masked_gives_zeros():
    mask = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    mask[0] = False
    inputs = make_qkv(2, 1, 40, WIDTH, device=DEVICE, requires_grad=True)
    options = {"block_size": 16, "keys": 4, "key_mask": mask, "select": "query"}
    out, grads = run(inputs, GIVEN, options, "triton")
    assert not out[0].any()
    assert all(not gradient[0].any() for gradient in grads)
    assert all(gradient.isfinite().all() for gradient in grads)


def test_padding_may_hold_anything():
    """NaN in padded rows reaches no other row and no gradient."""
    mask = torch.arange(40, device=DEVICE).expand(2, -1) < 33
    inputs = make_qkv(2, 1, 40, WIDTH, device=DEVICE)
    spoiled = [side.clone() for side in inputs]
    for side in spoiled:
        side[:, :, 33:] = torch.nan
    options = {"block_size": 16, "keys": 6, "key_mask": mask, "select": "query"}
    outs = []
    for sides in (inputs, spoiled):
        sides = [side.requires_grad_() for side in sides]
        out = lln.lln_keys_attention(*sides, **GIVEN, **options, impl="triton")
        kept = torch.where(mask[:, None, :, None], out, 0.0)
        outs.append((kept, *torch.autograd.grad(kept.square().sum(), sides)))
    for whole, broken in zip(*outs, strict=True):
        assert torch.equal(whole[:, :, :33], broken[:, :, :33])


def test_padding_does_not_change_the_order():
    """The order of queries by feature decides in which order gradients are added."""
    mask = torch.arange(40, device=DEVICE).expand(2, -1) < 33
    query, key, _ = make_qkv(2, 1, 40, WIDTH, device=DEVICE)
    other = torch.where(mask[:, None, :, None], query, -3.0 * query)
    found = [launch_list_choice.choose_lists(side, key, mask, 6, False) for side in (query, other)]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.slow
def test_pairs_in_several_slices(monkeypatch):
    inputs = make_qkv(1, 4, 34, WIDTH, key_heads=2, device=DEVICE, requires_grad=True)
    options = {"block_size": 16, "keys": 8, "select": "query"}
    whole = run(inputs, GIVEN, options, "triton")
    set_size(monkeypatch, launch_keys, "PAIR_SHARE", 0.0)
    sliced = run(inputs, GIVEN, options, "triton")
    assert all(torch.equal(*pair) for pair in zip(whole[1], sliced[1], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("tokens", "width", "keys"), [(130, 8, 8), (61, 40, 200), (150, 1, 7)])
def test_the_choice_is_that_of_plain_pytorch(dtype, masked, tokens, width, keys, monkeypatch):
    set_size(monkeypatch, launch_list_choice, "SEGMENT", 64)
    query, key, _ = coarse(tokens, width, dtype, key_heads=1)
    options = {"select": "query", "block_size": 16, "enable_gqa": True, "scale": -1.0}
    options["key_mask"] = holes(2, tokens) if masked else None
    expected = lln.choose_keys(query, key, keys, impl="eager", **options)
    assert torch.equal(lln.choose_keys(query, key, keys, impl="triton", **options), expected)


def test_auto_takes_the_kernels(monkeypatch):
    let_auto_take_kernels(monkeypatch)
    taken = []
    read = launch_keys.read_keys
    monkeypatch.setattr(launch_keys, "read_keys", lambda *sides: taken.append(1) or read(*sides))
    inputs = make_qkv(1, 1, 20, WIDTH, device=DEVICE)
    for options in ({}, {"keys": 0}, {"is_causal": True}, {"block_size": 8}):
        options = {"keys": 4, "block_size": 16, **options}
        lln.lln_keys_attention(*inputs, **GIVEN, select="query", **options)
    assert len(taken) == 1


def test_observers_get_indices():
    seen = []
    query, key, value = make_qkv(1, 2, 40, WIDTH, device=DEVICE)
    options = {"block_size": 16, "keys": 6, "select": "query"}
    observers.add_observer(seen.append)
    try:
        lln.lln_keys_attention(query, key, value, **GIVEN, **options, impl="triton")
    finally:
        observers.remove_observer(seen.append)
    expected = lln.choose_keys(query, key, 6, block_size=16, select="query", impl="eager")
    assert torch.equal(seen[0].indices, expected)


def test_instruments_choose_by_the_kernels(monkeypatch):
    query, key, _ = make_qkv(1, 2, 40, WIDTH, device=DEVICE)
    options = {"block_size": 16, "keys": 6, "select": "query", **GIVEN}
    with monkeypatch.context() as patch:
        let_auto_take_kernels(patch)
        found = instruments.entropy(query, key, kind="lln_keys", **options)
    chosen = lln.choose_keys(query, key, 6, block_size=16, select="query", impl="eager")
    expected = instruments.entropy(query, key, kind="lln_keys", **options | {"keys": chosen})
    torch.testing.assert_close(found, expected)


def test_bits_repeat():
    shape = (2, 2, 1000) if ON_GPU else (1, 1, 70)
    inputs = make_qkv(*shape, WIDTH, dtype=HALF[-1], device=DEVICE, requires_grad=True)
    options = {"block_size": 16, "keys": 32, "select": "query"}
    first = run(inputs, GIVEN, options, "triton")
    for _ in range(20 if ON_GPU else 1):
        again = run(inputs, GIVEN, options, "triton")
        assert torch.equal(first[0], again[0])
        assert all(torch.equal(*pair) for pair in zip(first[1], again[1], strict=True))


@pytest.mark.skipif(not ON_GPU, reason="takes half a minute in the interpreter")
def test_compiled():
    def attend(query, key, value):
        options = {"block_size": 16, "keys": 4, "select": "query", "impl": "triton"}
        return lln.lln_keys_attention(query, key, value, **GIVEN, **options)

    check_compiled(attend, 1, 1, [17, 33])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"is_causal": True}, "causal"),
        ({"block_size": 48}, "blocks of 48"),
        ({"block_size": 8}, "blocks of 8"),
        ({"keys": 300}, "at most 256"),
        ({"keys": 0}, "without keys"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(options, said):
    inputs = make_qkv(1, 1, 400, 16, device=DEVICE)
    with pytest.raises(lln.BackendUnavailableError, match=said):
        lln.lln_keys_attention(*inputs, **GIVEN, select="query", **options, impl="triton")


def test_softmax_where_every_key_is_exact():
    query, key, value = make_qkv(1, 2, 50, WIDTH, device=DEVICE)
    options = {**GIVEN, "keys": 50, "block_size": 64, "select": "query"}
    out, plain = (
        lln.lln_keys_attention(query, key, value, **options, impl=impl)
        for impl in ("triton", "eager")
    )
    expected = reference.softmax_attention(query, key, value)
    assert_close(out, expected, plain, what="output")


@pytest.mark.parametrize(
    ("keys", "key_heads", "scale", "masked"), [(6, 2, {}, True), (5, 1, {"scale": -0.3}, False)]
)
def test_the_kernels_choose_in_both_ways(monkeypatch, keys, key_heads, scale, masked):
    let_auto_take_kernels(monkeypatch)
    launches = []

    def count(module, name):
        launch = getattr(module, name)

        def counted(*arguments):
            launches.append(name)
            return launch(*arguments)

        monkeypatch.setattr(module, name, counted)

    count(launch_choice, "choose")
    count(launch_list_choice, "choose_lists")
    options = {"block_size": 16, "enable_gqa": True, **scale}
    query, key, _ = coarse(40, WIDTH, torch.float32, key_heads=key_heads)
    options["key_mask"] = holes(2, 40) if masked else None
    for select, launch in (("block", "choose"), ("query", "choose_lists")):
        options["select"] = select
        found = lln.choose_keys(query, key, keys, **options)
        assert launches == [launch]
        assert torch.equal(found, lln.choose_keys(query, key, keys, impl="eager", **options))
        assert launches == [launch]
        launches.clear()
