"""Plain PyTorch over threads: one hand-over for a call, and the same numbers."""

import os
import subprocess
import sys
import textwrap
import threading
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lln
from lln.eager import workers
from lln.testing import make_qkv

GIVEN = {"alpha": 1.5, "beta": 1.2}
BLOCK = 8
CALLS = {
    "lln": partial(lln.lln_attention, **GIVEN),
    "matched": lln.lln_attention,
    "causal": partial(lln.lln_attention, **GIVEN, is_causal=True),
    "diag": partial(lln.block_diagonal_attention, block_size=BLOCK),
    "lln_diag": partial(lln.lln_diag_attention, **GIVEN, block_size=BLOCK),
    "keys": partial(lln.lln_keys_attention, **GIVEN, offset=-2.0, block_size=BLOCK, keys=3),
    "causal_keys": partial(
        lln.lln_keys_attention, **GIVEN, offset=-2.0, block_size=BLOCK, keys=3, is_causal=True
    ),
}
every_call = pytest.mark.parametrize("attend", CALLS.values(), ids=CALLS)


@pytest.fixture
def shared(monkeypatch):
    """A busy machine, where even the smallest call is shared out; counts what is handed over."""
    before, handed = torch.get_num_threads(), []
    original = workers.over_threads

    def counting(jobs):
        handed.append(len(jobs))
        return original(jobs)

    monkeypatch.setattr(workers, "over_threads", counting)
    monkeypatch.setattr("lln.functional.match.over_threads", counting)
    monkeypatch.setattr(workers, "_FEWEST", 1)
    monkeypatch.setattr(workers, "_is_crowded", lambda threads: True)
    torch.set_num_threads(3)
    yield handed
    torch.set_num_threads(before)


def plainly(attend, *args, **options):
    """The same call in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return attend(*args, **options)
    finally:
        torch.set_num_threads(threads)


def sides_of(batch=2, heads=4, tokens=21, **options):
    return make_qkv(batch, heads, tokens, 8, dtype=torch.float64, requires_grad=True, **options)


@every_call
@pytest.mark.parametrize(
    ("batch", "heads", "key_heads"), [(2, 4, 4), (1, 5, 5), (7, 1, 1), (1, 6, 3), (5, 4, 2)]
)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_the_same_numbers(shared, attend, batch, heads, key_heads, masked):
    sides = sides_of(batch, heads, key_heads=key_heads)
    options = {"enable_gqa": True}
    if masked:
        options["key_mask"] = torch.arange(21) >= torch.arange(batch)[:, None]
    upstream = torch.randn(batch, heads, 21, 8, dtype=torch.float64)

    def both():
        out = attend(*sides, **options)
        return out, *torch.autograd.grad(out, sides, upstream)

    found = both()
    assert shared
    assert set(shared) == {min(3, max(batch, key_heads))}
    for one, other in zip(found, plainly(both), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_only_a_busy_machine_needs_it(shared, monkeypatch):
    """Three threads on four cores, of which others keep none, one or two busy."""
    monkeypatch.undo()
    monkeypatch.setattr(workers, "_FEWEST", 1)
    monkeypatch.setattr(workers, "own_cpus", lambda: set(range(4)))
    query, key, _ = sides_of()
    axes = {"heads": (-3, -3)}
    for busy, expected in ((0.0, None), (1.2, None), (2.0, 3)):
        monkeypatch.setattr(workers._watch, "busy", lambda busy=busy: busy)
        cut = workers.cut_heads(query, key, axes)
        assert (None if cut is None else cut.pieces) == expected


@every_call
def test_one_hand_over_each_way(shared, attend):
    sides = sides_of()
    attend(*sides).sum().backward()
    matching = 1 if attend is lln.lln_attention else 0
    assert len(shared) == 2 + matching


@pytest.mark.parametrize("shape", [(), (4, 1, 1), (2, 1, 1, 1), (1, 4, 1, 1), (2, 4, 1, 1)])
def test_gradients_of_what_every_piece_shares(shared, shape):
    sides = sides_of()
    scales = [torch.full(shape, number, dtype=torch.float64) for number in (1.5, 1.2)]
    mix = torch.rand(1, 1, 21, 1, dtype=torch.float64)
    leaves = [*sides, *scales, mix]
    for leaf in leaves:
        leaf.requires_grad_()

    def grads():
        options = {"alpha": scales[0], "beta": scales[1], "mix": mix, "block_size": BLOCK}
        out = lln.lln_diag_attention(*sides, **options)
        return torch.autograd.grad(out.square().sum(), leaves)

    found = grads()
    assert shared
    for one, other in zip(found, plainly(grads), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(), (4, 1, 1), (2, 1, 1, 1), (2, 4, 1, 1)])
def test_gradients_of_the_offset(shared, shape):
    sides = sides_of()
    offset = torch.full(shape, -2.0, dtype=torch.float64, requires_grad=True)

    def grads():
        options = {**GIVEN, "offset": offset, "block_size": BLOCK, "keys": 3}
        out = lln.lln_keys_attention(*sides, **options)
        return torch.autograd.grad(out.square().sum(), (*sides, offset))

    found = grads()
    assert shared
    for one, other in zip(found, plainly(grads), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


# Matched temperatures carry no gradient, which a derivative by numbers would see.
# Exact keys take a minute and are handed over in the same way.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("causal", "diag", "lln_diag")))
        for name in sorted(CALLS.keys() - {"matched", "keys", "causal_keys"})
    ],
)
def test_derivatives_of_any_order(shared, name):
    sides = sides_of(1, 2, 5)
    assert torch.autograd.gradcheck(CALLS[name], sides)
    assert torch.autograd.gradgradcheck(CALLS[name], sides)
    assert shared


def test_threads_split_nothing_and_leave_others_alone(shared):
    before = torch.get_num_threads()
    CALLS["lln"](*sides_of())
    inside = workers.over_threads([torch.get_num_threads] * 3)
    born = []
    thread = threading.Thread(target=lambda: born.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert inside == [1, 1, 1]
    assert torch.get_num_threads() == before == born[0]


def test_small_calls_and_one_thread_are_not_handed_over(shared, monkeypatch):
    sides = sides_of()
    plainly(CALLS["lln"], *sides)
    monkeypatch.setattr(workers, "_FEWEST", sides[0].numel() + 1)
    CALLS["lln"](*sides)
    assert not shared


def test_who_watches_operations_sees_them(shared):
    class Watch(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Watch.seen += 1
            return function(*args, **(kwargs or {}))

    sides = [side.detach() for side in sides_of()]
    with Watch():
        CALLS["lln"](*sides)
    assert Watch.seen > 5
    assert not shared


def test_modes_of_the_calling_thread_hold(shared):
    sides = [side.detach().float() for side in sides_of()]
    expected = plainly(CALLS["lln_diag"], *sides)
    with torch.inference_mode():
        found = CALLS["lln_diag"](*[side.clone() for side in sides])
    assert found.is_inference()
    torch.testing.assert_close(found, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert CALLS["lln_diag"](*sides).dtype == torch.bfloat16
    assert len(shared) == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(shared, reentrant):
    sides = sides_of()
    expected = torch.autograd.grad(plainly(CALLS["lln_diag"], *sides).square().sum(), sides)
    out = checkpoint(CALLS["lln_diag"], *sides, use_reentrant=reentrant)
    out.square().sum().backward()
    for side, grad in zip(sides, expected, strict=True):
        torch.testing.assert_close(side.grad, grad, rtol=1e-10, atol=1e-10)


def test_inputs_changed_in_place_are_noticed(shared):
    sides = sides_of()
    key = sides[1] * 1
    out = CALLS["lln"](sides[0], key, sides[2])
    key.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_error_reaches_the_caller(shared):
    def fail():
        raise ArithmeticError("in a thread")

    with pytest.raises(ArithmeticError, match="in a thread"):
        workers.over_threads([fail, fail])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own():
    script = """
        import os, torch, lln
        from lln.eager import workers
        torch.set_num_threads(2)
        workers._is_crowded = lambda threads: True
        sides = torch.randn(3, 1, 4, 512, 64).unbind()
        expected = lln.lln_attention(*sides)
        child = os.fork()
        if child == 0:
            same = torch.allclose(lln.lln_attention(*sides), expected)
            os._exit(0 if same else 1)
        _, status = os.waitpid(child, 0)
        print("fine" if status == 0 else status)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "fine", done.stderr[-1000:]
