"""Heads of 65 to 256 channels in 16-bit types, which have kernels of their own."""

import pytest
import torch
from tests.kernels.common import DEVICE, HALF, compare, holes

import lln
from lln.functional import prepared_calls
from lln.kernels.launching import recipes, sizes
from lln.testing import make_qkv

QUERIES = {"query_rows_kernel", "slot_grad_kernel"}
OWN = {"summarise_slots_kernel", *QUERIES, "key_slot_major_kernel"}
JOINED = {"summarise_slots_kernel", *QUERIES, "joint_slot_major_kernel"}


@pytest.fixture
def steps(monkeypatch):
    """What a test launches."""
    found, record = [], recipes.Step.record

    def note(step, live):
        found.append(step)
        record(step, live)

    monkeypatch.setattr(recipes, "_recipes", {})
    prepared_calls.clear()
    monkeypatch.setattr(recipes.Step, "record", note)
    return found


@pytest.fixture
def launched(steps, monkeypatch):
    """The names of the kernels that a test launches."""
    # Enough multiprocessors that more than one tile of tokens is split.
    monkeypatch.setitem(sizes.overrides, "cores", 64)
    return lambda: {step.kernel.fn.__name__ for step in steps}


CALLS = {
    "one stretch": {"width": 128, "value_width": 128, "tokens": 64},
    "odd widths": {"width": 72, "value_width": 40},
    "mask": {"width": 96, "value_width": 96, "key_mask": holes(2, 70)},
    "shared summary": {"width": 72, "heads": 2, "key_heads": 1, "tokens": 40},
    "widest": {"width": 136, "value_width": 136, "heads": 1},
    "blocks": {"width": 128, "tokens": 64, "block_size": 16},
    "masked blocks": {
        "width": 72,
        "block_size": 16,
        "key_mask": holes(2, 70),
        "extra": {"alpha": 2.0, "beta": 2.0, "mix": 0.3},
    },
    "mix per channel": {
        "width": 72,
        "block_size": 16,
        "tokens": 40,
        "extra": {"alpha": 2.0, "beta": 2.0, "mix": torch.rand(1, 1, 1, 72)},
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_gradients(launched, name):
    compare(HALF[-1], **CALLS[name])
    own = {"mix per channel": {*QUERIES, "key_bwd_kernel"}}
    assert launched() >= own.get(name, JOINED if "blocks" in name else OWN)
    assert launched().isdisjoint({"key_slot_major_kernel", "key_bwd_kernel"}) == ("blocks" in name)
    # Nothing is left to merge or to gather where one program has all tokens.
    assert ("merge_kernel" in launched()) == (CALLS[name].get("tokens", 70) > 64)


def row_mix(tokens):
    return {"alpha": 2.0, "beta": 2.0, "mix": torch.linspace(0, 1, tokens).view(1, 1, tokens, 1)}


# Tokens, and whether the values of the next tile are loaded ahead.
TILES = {
    "full tiles": ({"tokens": 192}, True),
    "a shorter last tile": ({"tokens": 150, "value_width": 40}, True),
    "tiles that blocks do not fill": ({"tokens": 150, "block_size": 24}, True),
    "mix per row": ({"tokens": 150, "extra": row_mix(150)}, True),
    "mix per row, full tiles": ({"tokens": 128, "extra": row_mix(128)}, True),
    "mask": ({"tokens": 150, "key_mask": holes(2, 150)}, False),
    "mix per channel": (
        {"tokens": 128, "extra": {"alpha": 2.0, "beta": 2.0, "mix": torch.rand(1, 1, 1, 72)}},
        False,
    ),
}


@pytest.mark.parametrize("name", TILES)
def test_values_of_the_next_tile_wait_in_registers(steps, monkeypatch, name):
    call, ahead = TILES[name]
    for reader in ("joint_read", "ahead_read"):
        # One program reads all tiles of a head.
        monkeypatch.setitem(sizes.overrides, reader, sizes.Tile(64, 4, 2, programs=0))
    compare(HALF[-1], width=72, **{"block_size": 16, **call})
    reads = [step for step in steps if step.kernel.fn.__name__ == "read_kernel"]
    place = reads[0].kernel.arg_names.index("AHEAD")
    assert [step.arguments[place] for step in reads] == [ahead] * len(reads)
    assert {step.grid[0] for step in reads} == {1}


def test_rows_beyond_the_end_weigh_nothing_however_large_a_mass():
    """Their exponents are the log-masses, and e to that is infinite here."""
    compare(HALF[-1], width=72, tokens=40, offset=50.0)


def test_garbage_in_padded_tokens_reaches_no_gradient():
    mask = torch.arange(40, device=DEVICE)[None] < 30
    found = []
    for garbage in (0.0, float("nan")):
        inputs = make_qkv(1, 1, 40, 72, dtype=HALF[-1], device=DEVICE)
        for side in inputs:
            side[:, :, 30:] = garbage
            side.requires_grad_()
        out = lln.lln_attention(*inputs, alpha=2.0, beta=2.0, key_mask=mask, impl="triton")
        grads = torch.autograd.grad(out[:, :, :30].square().sum(), inputs)
        found.append([side[:, :, :30] for side in (out, *grads)])
    for clean, dirty in zip(*found, strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("name", ["blocks", "masked blocks"])
def test_gradients_of_large_blocks_in_a_pass_of_their_own(launched, monkeypatch, name):
    monkeypatch.setitem(sizes.overrides, "is_joined", False)
    compare(HALF[-1], **CALLS[name])
    assert launched() >= {*OWN, "key_bwd_kernel"}


# Dropout has no seeded reference, and in 16 bits dα and dβ are compared with the usual kernels'.
@pytest.mark.parametrize(
    ("packed", "blocks", "drop", "kernels"),
    [(False, {}, 0.0, OWN), (True, {}, 0.4, OWN), (True, {"block_size": 16}, 0.4, JOINED)],
    ids=["dense", "packed", "joined"],
)
def test_the_same_as_by_the_usual_kernels(
    steps, launched, monkeypatch, packed, blocks, drop, kernels
):
    inputs = make_qkv(1, 2, 40, 72, key_heads=1, device=DEVICE, dtype=HALF[-1], requires_grad=True)
    scales = [torch.tensor([1.5, 2.0], device=DEVICE).view(1, 2, 1, 1) for _ in range(2)]
    leaves = [*inputs, *(side.requires_grad_() for side in scales)]
    options = {"alpha": scales[0], "beta": scales[1], "enable_gqa": True, "impl": "triton"}
    options |= {"dropout_p": drop, **blocks}
    found = []
    for turned in (False, True):
        monkeypatch.setitem(sizes.overrides, "is_slot_major", turned)
        monkeypatch.setitem(sizes.overrides, "is_joined", turned and kernels == JOINED)
        steps.clear()
        torch.manual_seed(3)
        if packed:
            attend = lln.lln_diag_attention_varlen if blocks else lln.lln_attention_varlen
            tokens_first = [side[0].transpose(0, 1) for side in inputs]
            bounds = torch.tensor([0, 13, 13, 40], device=DEVICE)
            out = attend(*tokens_first, bounds, max_seqlen=27, **options)
        else:
            out = lln.lln_attention(*inputs, **options)
        upstream = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out).to(out)
        found.append((out, *torch.autograd.grad(out, leaves, upstream)))
        assert (launched() >= kernels) == turned
    for one, other in zip(*found, strict=True):
        size = one.abs().max().item()
        assert size > 0.01
        torch.testing.assert_close(one, other, rtol=0, atol=4 * torch.finfo(HALF[-1]).eps * size)


def sizes_of(dtype, width, value_width, block_size=0, samples=1, **options):
    sides = [torch.empty(1, 1, 64, w, dtype=dtype) for w in (width, width, value_width)]
    return sizes.choose_sizes(*sides, samples, 1, block_size, **options)


def test_tiles_and_passes():
    """Other kernels keep their tiles, and large blocks a pass of their own."""
    wide, own = torch.bfloat16, sizes.SLOT_MAJOR_TILES[128]["summarise"]
    assert sizes_of(wide, 128, 128).summarise == own
    for others in (sizes_of(wide, 128, 128, causal=True), sizes_of(wide, 64, 128)):
        assert others.summarise == sizes.WIDE_TILES[128]["summarise"] != own
    assert sizes_of(wide, 128, 128, block_size=64).is_joined
    assert not sizes_of(wide, 128, 128, block_size=128).is_joined
    assert not sizes_of(wide, 256, 128, block_size=64).is_joined


def test_where_they_are_used():
    def is_slot_major(dtype, width, value_width, causal=False):
        return sizes_of(dtype, width, value_width, causal=causal).is_slot_major

    assert is_slot_major(torch.bfloat16, 65, 16)
    assert is_slot_major(torch.float16, 128, 128)
    assert not is_slot_major(torch.float32, 128, 128)
    assert not is_slot_major(torch.bfloat16, 64, 64)
    assert not is_slot_major(torch.bfloat16, 64, 128)
    assert is_slot_major(torch.bfloat16, 129, 64)
    assert not is_slot_major(torch.bfloat16, 128, 256)
    assert not is_slot_major(torch.bfloat16, 128, 128, causal=True)
