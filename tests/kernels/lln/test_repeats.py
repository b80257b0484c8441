"""Calls like an earlier one give the bits that the long way gives, and are recognised as such.

In the interpreter, which launches with tensors, addresses are turned back into tensors.
"""

import contextlib
import ctypes
import gc
import weakref

import pytest
import torch
from tests.kernels.common import DEVICE, HALF, ON_GPU, holes, let_auto_take_kernels
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lln
from lln import observers
from lln.functional import prepared_calls
from lln.functional.way import Way
from lln.kernels.launching import recipes
from lln.kernels.launching.recipes import Step
from lln.kernels.launching.sizes import overrides
from lln.kernels.lln import repeats
from lln.testing import make_qkv

LONG = 2100 if ON_GPU else 150


def at(address, dtype):
    """A few numbers at an address, enough to tell the interpreter where and what."""
    there = (ctypes.c_char * 16).from_address(address)
    return torch.frombuffer(there, dtype=torch.uint8).view(dtype)


@pytest.fixture(autouse=True)
def long_ways(monkeypatch):
    """How many calls took the long way; launches by address also in the interpreter."""
    monkeypatch.setattr(recipes, "_recipes", {})
    taken = []
    long_way = Way.run

    def counted(way, call, prepared):
        taken.append(call.kind)
        return long_way(way, call, prepared)

    monkeypatch.setattr(Way, "run", counted)
    if ON_GPU:
        return taken
    record = Step.record

    def by_address(self, live):
        record(self, live)
        given = self._filled(live)
        types = [side.dtype if isinstance(side, Tensor) else None for side in given]

        def runner(*arguments):
            pairs = zip(arguments, types, strict=True)
            tensors = [one if kind is None else at(one, kind) for one, kind in pairs]
            self.kernel[self.grid](*tensors, num_warps=self.warps)

        self.runner, self.code = runner, (None,) * 5
        # Behind the grid, the stream and the code.
        self.launch = lambda *arguments: runner(*arguments[9:])

    monkeypatch.setattr(Step, "record", by_address)
    monkeypatch.setattr(repeats, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(recipes, "current_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    let_auto_take_kernels(monkeypatch)
    return taken


def inputs_of(seed, tokens=40, dtype=torch.float32, key_heads=None, requires_grad=True, **how):
    heads = 2 if key_heads is None else 2 * key_heads
    sides = make_qkv(
        1, heads, tokens, 16, key_heads=key_heads, dtype=dtype, device=DEVICE, seed=seed, **how
    )
    return [side.requires_grad_(requires_grad) for side in sides]


def parts_of_a_projection(seed, **how):
    """Query, key and value as most models make them, in one tensor ``[B, N, 3, H, D]``."""
    sides = [side.transpose(1, 2) for side in inputs_of(seed, requires_grad=False, **how)]
    whole = torch.stack(sides, 2).requires_grad_()
    return whole, [side.transpose(1, 2) for side in whole.unbind(2)]


def outcome_of_parts(attend, seed):
    """Output, and the gradient of the projection."""
    whole, inputs = parts_of_a_projection(seed)
    out = attend(*inputs)
    rows = out.transpose(1, 2).flatten(-2)
    sent = torch.linspace(-1, 1, rows.numel(), device=DEVICE, dtype=rows.dtype)
    return [out, *torch.autograd.grad(rows, whole, sent.view(rows.shape))]


def outcome(attend, inputs, upstream=None):
    out = attend(*inputs)
    if not out.requires_grad:
        return [out]
    upstream = torch.ones_like(out) if upstream is None else upstream
    return [out, *torch.autograd.grad(out, inputs, upstream)]


def scales(*shape):
    generator = torch.Generator().manual_seed(5)
    return (1 + torch.rand(*shape, generator=generator)).to(DEVICE)


def with_options(**options):
    name = "lln_diag_attention" if "block_size" in options else "lln_attention"
    attend = getattr(lln, name)
    return lambda *inputs: attend(*inputs, **options, enable_gqa=True, impl="triton")


NUMBERS = {"alpha": 1.5, "beta": 2}
CALLS = {
    "numbers": NUMBERS,
    "tensors": {"alpha": scales(1, 2, 1, 1), "beta": scales(1, 2, 1, 1)},
    "one of each": {"alpha": 1.2, "beta": scales(1, 2, 1, 1)},
    "matched": {},
    "entropy": {"matching": "entropy"},
    "mask": {**NUMBERS, "key_mask": holes(1, 40)},
    "matched, mask": {"key_mask": holes(1, 40)},
    "blocks": {**NUMBERS, "block_size": 16, "mix": 0.3},
    "blocks, scale": {**NUMBERS, "block_size": 16, "scale": 0.1},
    "blocks, matched": {"block_size": 16},
    "blocks, mask": {**NUMBERS, "block_size": 16, "key_mask": holes(1, 40)},
    "causal": {**NUMBERS, "is_causal": True},
    "causal blocks": {**NUMBERS, "is_causal": True, "block_size": 16},
}


# In the interpreter a few are enough for every change.
QUICK = ("numbers", "blocks, matched")
CASES = [
    pytest.param(dtype, CALLS[name], id=f"{name}, {dtype}", marks=marks)
    for name in CALLS
    for dtype in (torch.float32, HALF[-1])
    for quick in [name in QUICK and dtype == torch.float32]
    for marks in [() if quick else pytest.mark.slow]
]


@pytest.mark.parametrize(("dtype", "options"), CASES)
def test_the_same_bits(dtype, options, long_ways):
    attend, seeds = with_options(**options), (0, 1)
    found = [outcome(attend, inputs_of(seed, dtype=dtype)) for seed in seeds]
    assert len(long_ways) == 1
    for seed, sides in zip(seeds, found, strict=True):
        prepared_calls.clear()
        expected = outcome(attend, inputs_of(seed, dtype=dtype))
        assert all(torch.equal(*pair) for pair in zip(sides, expected, strict=True)), seed
    assert len(long_ways) == 1 + len(seeds)


WAYS = {
    "without gradient": {"requires_grad": False},
    "long": {"tokens": LONG},
    "long, without gradient": {"tokens": LONG, "requires_grad": False},
    "groups": {"key_heads": 2},
    "transposed": {"layout": "transposed"},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("options", [NUMBERS, {**NUMBERS, "block_size": 16}])
def test_other_shapes(options, how, long_ways):
    attend = with_options(**options)
    outcome(attend, inputs_of(0, **how))
    found = outcome(attend, inputs_of(1, **how))
    assert len(long_ways) == 1
    prepared_calls.clear()
    expected = outcome(attend, inputs_of(1, **how))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.slow
def test_numbers_are_those_of_the_call(long_ways):
    inputs = inputs_of(0)
    outs = [
        lln.lln_diag_attention(*inputs, alpha=a, beta=b, mix=mix, block_size=16, impl="triton")
        for a, b, mix in ((1.0, 1.0, 0.5), (2.0, 1.0, 0.5), (1.0, 2.0, 0.5), (1.0, 1.0, 0.9))
    ]
    assert len(long_ways) == 1
    assert all(not torch.equal(outs[0], other) for other in outs[1:])
    wide = [side.detach().double() for side in inputs]
    options = {"alpha": 1.0, "beta": 1.0, "mix": 0.9, "block_size": 16}
    expected = lln.lln_diag_attention(*wide, **options, impl="eager")
    torch.testing.assert_close(outs[-1], expected.float(), rtol=1e-4, atol=1e-5)


def test_parts_of_one_projection(long_ways, monkeypatch):
    """Their gradients do not lie in memory as they do: nothing is between the rows."""
    differentiated, learn = [], repeats.Repeat.learn
    monkeypatch.setattr(
        repeats.Repeat, "learn", lambda *given: differentiated.append(learn(*given))
    )
    attend = with_options(**NUMBERS)
    found = [outcome_of_parts(attend, seed) for seed in (0, 1, 2, 3)]
    assert len(long_ways) == 1
    # The first pass of the kind, and none after it.
    assert len(differentiated) == 1
    with monkeypatch.context() as patch:
        patch.setattr(prepared_calls, "_prepared", {})
        expected = outcome_of_parts(attend, 3)
    for side, other in zip(found[3], expected, strict=True):
        assert torch.equal(side, other)
        assert side.stride() == other.stride()


@pytest.mark.slow
def test_gradients_that_lie_otherwise(long_ways):
    """A sum sends up one number for all places, with strides of zero."""
    attend = with_options(**NUMBERS)
    found = []
    for seed in (0, 1, 1, 1):
        inputs = inputs_of(seed)
        out = attend(*inputs)
        one = torch.ones((), device=DEVICE, dtype=out.dtype).expand(out.shape)
        turned = torch.ones_like(out.mT).mT
        for upstream in (torch.ones_like(out), one, turned):
            found.append(torch.autograd.grad(out, inputs, upstream, retain_graph=True))
    for other in found[4:]:
        for side, expected in zip(other, found[3], strict=True):
            torch.testing.assert_close(side, expected)
    assert len(long_ways) == 1


def test_saved_tensors_that_come_back_otherwise(long_ways):
    """Hooks may bring them back with other strides, as `torch.autograd.graph.save_on_cpu` does."""
    attend, found = with_options(**NUMBERS), []
    for is_hooked in (False, False, True, True, False):
        inputs = inputs_of(0, layout="transposed")
        hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.Tensor.contiguous)
        with hooks if is_hooked else contextlib.nullcontext():
            out = attend(*inputs)
        sent = torch.ones(out.shape, device=DEVICE).transpose(1, 2).contiguous().transpose(1, 2)
        found.append(torch.autograd.grad(out, inputs, sent))
    assert len(long_ways) == 1
    for other in found[1:]:
        for side, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(side, expected)


def test_what_has_no_kind_takes_the_long_way(long_ways):
    inputs = inputs_of(0)
    learned = scales(1, 2, 1, 1).requires_grad_()
    gate = torch.full((1, 2, 40, 1), 0.5, device=DEVICE)
    for _ in range(2):
        lln.lln_attention(*inputs, **NUMBERS, dropout_p=0.1, impl="triton")
        lln.lln_attention(*inputs, alpha=learned, beta=2.0, impl="triton")
        lln.lln_diag_attention(*inputs, **NUMBERS, mix=gate, block_size=16, impl="triton")
        lln.lln_attention(*inputs, matching="paper", impl="triton")
        lln.lln_attention(*inputs, **NUMBERS, impl="eager")
    assert len(long_ways) == 10


def test_observers_hear_of_every_call():
    inputs, heard = inputs_of(0), []
    attend = with_options(**NUMBERS)
    attend(*inputs)
    observers.add_observer(heard.append)
    try:
        attend(*inputs)
        attend(*inputs)
    finally:
        observers.remove_observer(heard.append)
    assert len(heard) == 2


def test_settings_of_kernels_count(long_ways, monkeypatch):
    attend, inputs = with_options(**NUMBERS), inputs_of(0)
    attend(*inputs)
    monkeypatch.setitem(overrides, "precision", "ieee")
    attend(*inputs)
    monkeypatch.delitem(overrides, "precision")
    attend(*inputs)
    assert len(long_ways) == 2


def test_checkpoints_repeat_either_way(long_ways):
    """The first forward takes the long way and the repeated one the short way, or not at all."""
    attend = with_options()
    for seed in (0, 1):
        inputs = inputs_of(seed)
        out = checkpoint(attend, *inputs, use_reentrant=False)
        found = torch.autograd.grad(out, inputs, torch.ones_like(out))
        expected = outcome(attend, inputs)[1:]
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert len(long_ways) == 1


@pytest.mark.slow
def test_second_derivatives_are_refused():
    attend = with_options(**NUMBERS)
    for seed in (0, 1):
        inputs = inputs_of(seed)
        (first,) = torch.autograd.grad(attend(*inputs).sum(), inputs[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            first.sum().backward()


def kept_inputs(calls):
    """Which inputs are still alive after some calls, when their owner has dropped them."""
    attend, inputs = with_options(), inputs_of(0)
    for _ in range(calls):
        outcome(attend, inputs)
    seen = [weakref.ref(side) for side in inputs]
    del inputs
    gc.collect()
    return [reference for reference in seen if reference() is not None]


def test_no_tensor_is_kept(long_ways):
    assert not kept_inputs(2)


def test_preparing_later_calls_takes_no_memory(monkeypatch):
    """At the end of a backward pass memory is as full as it gets."""
    made, learned, learn = [], [], repeats.Repeat.learn

    def watched(*arguments):
        with monkeypatch.context() as patch:
            for name in ("empty", "empty_like"):
                patch.setattr(torch, name, lambda *given, **options: made.append(given))
            learned.append(learn(*arguments))

    monkeypatch.setattr(repeats.Repeat, "learn", watched)
    for seed in range(2):
        outcome(with_options(**NUMBERS), inputs_of(seed))
    assert len(learned) == 1
    assert not made


@pytest.mark.slow
def test_old_kinds_are_forgotten(monkeypatch):
    monkeypatch.setattr(prepared_calls, "MOST_LAYOUTS", 2)
    monkeypatch.setattr(prepared_calls, "_prepared", {})
    for tokens in (3, 4, 5):
        with_options(**NUMBERS)(*inputs_of(0, tokens=tokens))
    assert len(prepared_calls._prepared) == 2
