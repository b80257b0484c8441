"""Blocks longer than a tile: alone, and added in place to what LLN attention has written."""

import pytest
import torch
from tests.kernels.block_calls import compare as compare_blocks
from tests.kernels.common import (
    DEVICE,
    HALF,
    compare,
    let_auto_take_kernels,
    limit_chips,
)

import lln
from lln.checks.call import Call
from lln.functional.ways import prepare
from lln.kernels.blocks import launch_window
from lln.kernels.launching import sizes
from lln.kernels.launching.sizes import Tile
from lln.testing import make_qkv

PASSES = ("window_read", "window_query", "window_value", "window_key")
GIVEN = {"alpha": 2.0, "beta": 2.0}


def check_rounding(ours, theirs):
    """Two ways to round: they differ by a few digits of the largest number at most."""
    few = 4 * torch.finfo(theirs.dtype).eps * theirs.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=few)


@pytest.fixture
def small(monkeypatch):
    """A chip whose tiles hold 16 tokens of a block."""
    limit_chips(monkeypatch, block_tokens=16)


# Before the gradients of added blocks their own output is computed again.
ADDED = ["attend_window, added", "attend_window", "window_gradients, added"]
ALONE = ["attend_window", "window_gradients"]


@pytest.fixture
def added(monkeypatch):
    """The passes over blocks, forward and backward, and which of them add in place."""
    found = []
    for name, place in (("attend_window", 2), ("window_gradients", 5)):
        launch = getattr(launch_window, name)

        def note(*arguments, launch=launch, name=name, place=place):
            assert arguments[0].blocks
            mix = arguments[place] if len(arguments) > place else None
            found.append(name if mix is None else f"{name}, added")
            return launch(*arguments)

        monkeypatch.setattr(launch_window, name, note)
    return found


@pytest.fixture(params=[(32, 16), (16, 32)], ids=["long tiles", "short tiles"])
def tiles(request, monkeypatch):
    """Tiles of a side, and of the other one."""
    tokens, across = request.param
    for name in PASSES:
        monkeypatch.setitem(sizes.overrides, name, Tile(tokens, 4, 1, across=across))


CALLS = {
    "plain": {},
    "full tiles": {"tokens": 128, "block_size": 64},
    "causal": {"is_causal": True},
    "grouped": {"heads": 4, "key_heads": 2, "tokens": 80, "value_width": 24},
    "grouped causal": {"heads": 2, "key_heads": 1, "is_causal": True},
    "one block": {"tokens": 30, "layout": "transposed"},
    "little LLN": {"extra": {**GIVEN, "mix": 0.1}},
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", CALLS)
def test_added_to_lln_attention(small, added, tiles, dtype, name):
    compare(dtype, **{"block_size": 40, **CALLS[name]})
    assert added == ADDED


@pytest.mark.parametrize("heads", [1, 4], ids=["per sample", "per head"])
def test_gradients_of_temperatures(small, added, heads):
    """Blocks have none: the gradients are those of LLN attention, weighted."""
    mix = 0.3
    sides = make_qkv(2, 4, 70, 16, key_heads=2, device=DEVICE, dtype=HALF[-1], requires_grad=True)
    alpha, beta = (torch.rand(2, heads, 1, 1, device=DEVICE) + 1 for _ in range(2))
    scales = {"alpha": alpha.requires_grad_(), "beta": beta.requires_grad_(), "enable_gqa": True}
    sent = torch.randn_like(sides[0])
    blocks = {"mix": mix, "block_size": 40}

    def gradients(attend, impl="triton", **options):
        out = attend(*sides, **scales, **options, impl=impl)
        return torch.autograd.grad(out, (alpha, beta, *sides), sent)

    alone = gradients(lln.lln_attention)
    found = gradients(lln.lln_diag_attention, **blocks)
    for ours, of_lln in zip(found[:2], alone[:2], strict=True):
        torch.testing.assert_close(ours, of_lln * mix, rtol=1e-6, atol=0)
    wanted = gradients(lln.lln_diag_attention, impl="eager", **blocks)
    for ours, theirs in zip(found[2:], wanted[2:], strict=True):
        check_rounding(ours, theirs)
    assert added == ADDED


def test_values_in_slices(small, added):
    """LLN attention goes slice by slice; blocks are added once, to all channels."""
    limits = {"summary": 16 * 16, "summary_by_blocks": 16 * 16, "joint_summary": 16 * 16}
    with pytest.MonkeyPatch.context() as patch:
        limit_chips(patch, block_tokens=16, **limits)
        compare(HALF[-1], tokens=70, width=16, value_width=40, block_size=40)
    assert added == ADDED


GATED = {"extra": {**GIVEN, "mix": torch.rand(2, 1, 70, 1)}}


@pytest.mark.parametrize("call", [GATED, {**GATED, "is_causal": True}], ids=["", "causal"])
def test_beside_lln_attention_where_the_mix_is_a_tensor(small, added, tiles, call):
    compare(HALF[-1], block_size=40, **call)
    assert added == ALONE


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["plain", "full tiles", "grouped causal", "one block"])
def test_blocks_alone(small, added, tiles, dtype, name):
    compare_blocks(dtype, **{"block_size": 40, **CALLS[name]})
    assert added == ALONE


def test_gradients_repeat_bit_by_bit(small):
    sides = make_qkv(2, 2, 70, 16, device=DEVICE, dtype=HALF[-1], requires_grad=True)
    first, again = (
        torch.autograd.grad(
            lln.lln_diag_attention(*sides, **GIVEN, block_size=40, impl="triton").sum(), sides
        )
        for _ in range(2)
    )
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_dropped_keys_are_dropped_from_both_parts(small, added):
    """One value is 1 and the rest 0: where its key is dropped, nothing is left of it anywhere."""
    query, key, value = make_qkv(1, 1, 70, 16, device=DEVICE, dtype=HALF[-1])
    value.zero_()[:, :, 5] = 1
    options = {**GIVEN, "block_size": 40, "impl": "triton", "dropout_p": 0.5}
    seen = set()
    for seed in range(8):
        torch.manual_seed(seed)
        out = lln.lln_diag_attention(query, key, value, **options)
        near, far = out[0, 0, :40].abs().amin().item(), out[0, 0, 40:].abs().amin().item()
        assert (near > 0) == (far > 0)
        seen.add(near > 0)
    assert seen == {True, False}
    assert set(added) == {ADDED[0]}


def test_the_widest_heads_take_blocks_that_fit_a_tile_too(monkeypatch, added):
    """Beside LLN attention in one kernel their values would come in slices."""
    let_auto_take_kernels(monkeypatch)
    sides = make_qkv(1, 1, 40, 144, device=DEVICE, dtype=HALF[-1])
    call = Call("lln_diag", *sides, mix=0.5, block_size=32)
    plan = prepare(call, "auto")
    assert (plan.diagonal, plan.value_width) == ("added", 256)
    assert "others add blocks of 32 tokens, tile by tile" in str(plan)
    assert prepare(call.replace(is_causal=True), "auto").diagonal == "joint"
    mask = torch.ones(1, 40, dtype=torch.bool, device=DEVICE)
    plan = prepare(call.replace(key_mask=mask), "auto")
    assert (plan.diagonal, plan.value_width) == ("joint", 128)
    gate = torch.rand(1, 1, 40, 1, device=DEVICE)
    assert prepare(call.replace(mix=gate), "auto").diagonal == "joint"
    compare(HALF[-1], tokens=40, heads=1, width=144, value_width=144, block_size=32)
    assert added == ADDED


@pytest.mark.parametrize("shape", [(2, 0), (0, 70)])
def test_no_tokens_or_samples(small, shape):
    batch, tokens = shape
    sides = make_qkv(batch, 2, tokens, 16, device=DEVICE, dtype=HALF[-1], requires_grad=True)
    out = lln.lln_diag_attention(*sides, **GIVEN, block_size=40, impl="triton")
    assert out.shape == sides[0].shape
    assert all(side.shape == out.shape for side in torch.autograd.grad(out.sum(), sides))


def test_smaller_tiles_keep_both_sides():
    """Where a chip has too little room, stages go first, then tokens of both sides."""
    side = torch.empty(1, 1, 512, 256, dtype=torch.bfloat16)
    chosen = sizes.choose_sizes(side, side, side, 1, 1, 256)
    seen = [chosen]
    while (less := sizes.smaller(seen[-1])) is not None:
        seen.append(less)
    found = [(one.window_query.stages, *one.window_query[::6]) for one in seen]
    assert found[0] == (3, 128, 32)
    assert (1, 128, 32) in found
    assert found[-1] == (1, 16, 16)


def test_compiled_call(small, added):
    """A compiler sees two operators, whose outputs are mixed: rounded once more."""

    def attend(*sides):
        return lln.lln_diag_attention(*sides, **GIVEN, block_size=40, impl="triton")

    layer = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (70, 90):
        added.clear()
        sides = make_qkv(2, 2, tokens, 16, device=DEVICE, dtype=HALF[-1], requires_grad=True)
        found = [layer(*sides), attend(*sides)]
        assert added == ["attend_window", "attend_window, added"]
        check_rounding(*found)
        gradients = [torch.autograd.grad(out.sum(), sides) for out in found]
        for compiled, plain in zip(*gradients, strict=True):
            check_rounding(compiled, plain)
