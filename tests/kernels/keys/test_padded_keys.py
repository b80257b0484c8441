"""Packed sequences with exact keys by the kernels: equal to the reference, sequence by sequence.

What padding does by itself is in `tests/functional/test_padded_keys.py`, without the interpreter.
"""

from itertools import accumulate, pairwise

import pytest
import torch
from tests.kernels.common import DEVICE, DTYPES, HALF, ON_GPU, let_auto_take_kernels, upstream_of
from tests.kernels.keys.exact_keys import GIVEN, sizes_of_numbers

import lln
from lln import instruments
from lln.checks.call import Call
from lln.functional.ways import prepare
from lln.kernels.keys import keys_ops
from lln.observers import add_observer, remove_observer
from lln.testing import assert_close, make_qkv, poison_empty

# A program takes long in the interpreter.
WIDTH = 16 if ON_GPU else 4


def bounds_of(lengths):
    return torch.tensor([0, *accumulate(lengths)], device=DEVICE, dtype=torch.int32)


def sides_of(lengths, dtype=torch.float32, key_heads=1, value_width=None):
    shape = {"key_heads": key_heads, "value_width": value_width, "dtype": dtype, "device": DEVICE}
    sides = make_qkv(1, 2, sum(lengths), WIDTH, **shape)
    return [side[0].transpose(0, 1) for side in sides]


def numbers_of(lengths, key_heads):
    heads = {"alpha": 2, "beta": key_heads, "offset": 2}
    return {
        name: torch.linspace(0.7, 1.1, len(lengths) * count, device=DEVICE).view(-1, count, 1, 1)
        for name, count in heads.items()
    }


def learning(sides, dtype=None):
    """Copies of all tensors, in another type if one is given, that ask for gradients."""
    return [
        side.detach().to(dtype or side.dtype).requires_grad_() if torch.is_tensor(side) else side
        for side in sides
    ]


def outcome(sides, numbers, lengths, impl, **options):
    """Output, and the gradients of all tensors."""
    given = dict(zip(GIVEN, numbers, strict=True)) if numbers else {}
    bounds = bounds_of(lengths)
    out = lln.lln_keys_attention_varlen(
        *sides, bounds, **given, **options, enable_gqa=True, impl=impl
    )
    leaves = [side for side in (*sides, *numbers) if torch.is_tensor(side)]
    return out, torch.autograd.grad(out, leaves, upstream_of(out))


def watched(call):
    """What a call returns, and how it was announced."""
    seen = []
    add_observer(seen.append)
    try:
        found = call()
    finally:
        remove_observer(seen.append)
    (one,) = seen
    return found, one


def sizes_of_sequences(sides, gradients, lengths):
    """The sizes of the gradients of α, β and offset, the largest over the sequences."""
    sizes = []
    for start, end in pairwise(accumulate(lengths, initial=0)):
        if start < end:
            own, grads = (
                [side[start:end].transpose(0, 1)[None] for side in some[:3]]
                for some in (sides, gradients)
            )
            sizes.append(sizes_of_numbers(own, grads, GIVEN))
    return {name: max(size[name] for size in sizes) for name in GIVEN}


def compare(lengths, dtype=torch.float32, key_heads=1, value_width=None, numbers=(), **options):
    """Kernels against the reference and plain PyTorch, forward and backward, within budget.

    All have the keys that the kernels chose and announced. Those are plain PyTorch's, but among
    many keys scores may be too close to tell them apart.
    """
    is_certain = max(lengths) < 200
    sides = learning(sides_of(lengths, dtype, key_heads, value_width))
    numbers = learning(numbers)
    with poison_empty():
        (found, grads), call = watched(
            lambda: outcome(sides, numbers, lengths, "triton", **options)
        )
    (_, _), plain = watched(lambda: outcome(sides, numbers, lengths, "eager", **options))
    size, group = options["block_size"], call.group_size
    held = []
    for length in lengths:
        held += [start < length for start in range(0, -(-length // size) * size, group)]
    queries = torch.tensor(held).nonzero()[:, 0].to(DEVICE)
    if is_certain:
        assert torch.equal(call.keys[:, queries], plain.keys[:, queries])
    assert call.bounds.tolist() == plain.bounds.tolist()
    options |= {"keys": call.keys, "group_size": group}
    if not numbers:
        numbers = [call.alpha, call.beta, call.offset]
        grads = [*grads, *(None,) * 3]
    wide, wide_numbers = learning(sides, torch.float64), learning(numbers, torch.float64)
    expected, wanted = outcome(wide, wide_numbers, lengths, "reference", **options)
    eager, simple = outcome(learning(sides), learning(numbers), lengths, "eager", **options)
    assert found.dtype == dtype
    assert_close(found, expected, eager, what="output")
    largest = max(gradient.abs().max().item() for gradient in wanted[:3])
    sums = sizes_of_sequences(wide, wanted, lengths)
    names = ("query", "key", "value", *GIVEN)
    for name, got, want, other in zip(names, grads, wanted, simple, strict=False):
        if got is None:
            continue
        if name in sums:
            # The kernels take rowsum(dO ∘ O) from the rounded output.
            got, other = got.to(dtype), other.to(dtype)
        what, terms = f"gradient of {name}", sums.get(name, largest)
        assert_close(got, want, other, backward=True, magnitude=terms, what=what)


CASES = {
    # One group, padded; empty sequences at both ends and between; one token.
    "block": {"lengths": [0, 1, 0, 33, 0], "keys": 5, "value_width": 6},
    "half": {"lengths": [17, 0, 18, 33], "keys": 17, "dtype": HALF[0]},
}
SLOW = {
    "one sequence": {"lengths": [40], "keys": 6},
    "equal": {"lengths": [33, 33], "keys": 6, "key_heads": 2},
    "no keys": {"lengths": [1, 20, 33], "keys": 0},
    "all keys": {"lengths": [1, 20, 33], "keys": 50},
    "groups": {"lengths": [20, 33], "keys": 6, "block_size": 32, "group_size": 16},
    "classes": {"lengths": [3, 0, 17, 1, 1, 70], "keys": 6},
    "negative scale": {"lengths": [18, 33], "keys": 6, "scale": -0.3},
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name):
    case = {"block_size": 16, **CASES[name]}
    compare(**case, numbers=numbers_of(case["lengths"], 1).values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", {**CASES, **SLOW})
def test_more_outputs_and_gradients(name, dtype):
    case = {"block_size": 16, **{**CASES, **SLOW}[name], "dtype": dtype}
    numbers = GIVEN
    if dtype == torch.float32 and "scale" not in case:
        numbers = numbers_of(case["lengths"], case.get("key_heads", 1))
    compare(**case, numbers=numbers.values())


LARGE = {
    "mixed": [1, 700, 64, 0, 65, 1500, 3],
    "similar": [700, 900, 650],
    "many": [5 + 7 * number for number in range(60)],
}


@pytest.mark.skipif(not ON_GPU, reason="takes minutes in the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LARGE)
def test_large_outputs_and_gradients(name, dtype):
    lengths = LARGE[name]
    options = {"block_size": 64, "keys": 64}
    compare(lengths, dtype, numbers=numbers_of(lengths, 1).values(), **options)


@pytest.mark.parametrize("matching", ["rest", "paper"])
def test_matched_numbers(matching):
    """α, β and offset of every sequence; "paper" has one statistic over all tokens."""
    lengths = [4, 0, 17]
    sides = sides_of(lengths)
    options = {"block_size": 16, "keys": 3, "matching": matching, "enable_gqa": True}

    def call(impl):
        return lln.lln_keys_attention_varlen(*sides, bounds_of(lengths), **options, impl=impl)

    found, one = watched(lambda: call("triton"))
    plain, other = watched(lambda: call("eager"))
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)
    for name in GIVEN:
        mine, wanted = getattr(one, name), getattr(other, name)
        assert mine.shape == wanted.shape
        if len(mine) > 1:
            mine, wanted = mine[[0, 2]], wanted[[0, 2]]
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="sums may be divided otherwise in a larger batch")
def test_every_sequence_is_a_dense_call_to_the_bit():
    lengths = [18, 33]
    sides, numbers = learning(sides_of(lengths)), learning(numbers_of(lengths, 1).values())
    options = {"block_size": 16, "keys": 6, "scale": -0.3}
    found, gradients = outcome(sides, numbers, lengths, "triton", **options)
    start = 0
    for index, length in enumerate(lengths):
        at = slice(start, start + length)
        own = learning([side[at].transpose(0, 1)[None] for side in sides])
        given = learning([side[index : index + 1] for side in numbers])
        out = lln.lln_keys_attention(
            *own, **dict(zip(GIVEN, given, strict=True)), **options, enable_gqa=True, impl="triton"
        )
        assert torch.equal(out[0].transpose(0, 1), found[at])
        upstream = upstream_of(found)[at].transpose(0, 1)[None]
        wanted = torch.autograd.grad(out, (*own, *given), upstream)
        for gradient, want in zip(gradients[:3], wanted[:3], strict=True):
            assert torch.equal(gradient[at], want[0].transpose(0, 1))
        for gradient, want in zip(gradients[3:], wanted[3:], strict=True):
            assert torch.equal(gradient[index], want[0])
        start += length


def test_one_sequence_is_the_dense_call():
    query, key, value = make_qkv(1, 1, 20, WIDTH, device=DEVICE)
    options = {**GIVEN, "block_size": 16, "keys": 3, "impl": "triton"}
    dense = lln.lln_keys_attention(query, key, value, **options)
    sides = [side[0].transpose(0, 1) for side in (query, key, value)]
    found = lln.lln_keys_attention_varlen(*sides, bounds_of([20]), **options)
    assert torch.equal(found, dense[0].transpose(0, 1))


@pytest.mark.skipif(not ON_GPU, reason="the interpreter runs programs one after the other")
def test_bits_repeat():
    lengths = [300, 1, 0, 500, 40]
    sides = learning(sides_of(lengths, HALF[-1]))
    numbers = learning(numbers_of(lengths, 1).values())
    options = {"block_size": 16, "keys": 4}
    first = outcome(sides, numbers, lengths, "triton", **options)
    for _ in range(20):
        again = outcome(sides, numbers, lengths, "triton", **options)
        assert torch.equal(first[0], again[0])
        assert all(torch.equal(*pair) for pair in zip(first[1], again[1], strict=True))


def request_of(**options):
    sides = sides_of([5, 20])
    options = {
        "block_size": 16,
        "group_size": 16,
        "keys": 4,
        "bounds": bounds_of([5, 20]),
    } | options
    return Call("lln_keys", *sides, 0.8, 0.9, offset=-1.0, **options)


def test_auto_takes_the_kernels(monkeypatch):
    let_auto_take_kernels(monkeypatch)
    plan = prepare(request_of(), "auto")
    assert plan.impl == "triton"
    assert "padded" in str(plan)
    others = ({"block_size": 48}, {"keys": 300})
    for options in (*others, {"keys": torch.zeros(2, 3, 4)}):
        plan = prepare(request_of(**options), "auto")
        assert str(plan).startswith("Plain PyTorch computes the call")


def test_without_tokens():
    sides = [torch.zeros(0, 2, 4, device=DEVICE, requires_grad=True) for _ in range(3)]
    out = lln.lln_keys_attention_varlen(*sides, bounds_of([0, 0]), impl="triton")
    assert out.shape == (0, 2, 4)
    out.sum().backward()
    assert all(side.grad is not None for side in sides)


def test_instruments_measure_what_the_kernels_would_compute(monkeypatch):
    """They complete the packed call, where nothing is padded."""
    x = torch.randn(23, 1, 4).to(DEVICE)
    options = {"kind": "lln_keys", "cu_seqlens": bounds_of([3, 20]), "block_size": 16, "keys": 3}
    plain = instruments.entropy(x, x, **options)
    let_auto_take_kernels(monkeypatch)
    torch.testing.assert_close(instruments.entropy(x, x, **options), plain)


def test_every_attention_is_a_kernel(monkeypatch):
    """Sequences in two groups are two calls of the kernels, and none in plain PyTorch."""
    taken = []
    monkeypatch.setattr(
        "lln.functional.key_calls.fused_choice",
        lambda query, *_, **__: torch.zeros(query.shape[0], 2, 6, 1, dtype=torch.int32),
    )
    monkeypatch.setattr(
        "lln.functional.key_ways.fused_keys",
        lambda query, *_, **__: taken.append(tuple(query.shape)) or query.clone(),
    )
    monkeypatch.setattr("lln.functional.plain_ways.attend_packed_keys", None)
    monkeypatch.setattr("lln.functional.key_calls.choose", None)
    query, key, value = sides_of([1, 1, 1, 70], key_heads=2)
    options = {**GIVEN, "block_size": 16, "keys": 1, "impl": "triton"}
    out = lln.lln_keys_attention_varlen(query, key, value, bounds_of([1, 1, 1, 70]), **options)
    assert taken == [(3, 2, 1, WIDTH), (1, 2, 70, WIDTH)]
    assert torch.equal(out, query)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_size": 48}, "blocks of 48"),
        ({"group_size": 8}, "groups of 8"),
        ({"keys": 300}, "at most 256"),
        ({"keys": torch.zeros(2, 2, 3, dtype=torch.int64)}, "no indices of keys in packed"),
    ],
    ids=str,
)
def test_what_the_kernels_do_not_take_is_refused(options, said):
    sides = sides_of([5, 20], key_heads=2)
    if torch.is_tensor(options.get("keys")):
        options = {"keys": options["keys"].to(DEVICE)}
    with pytest.raises(lln.BackendUnavailableError, match=said):
        lln.lln_keys_attention_varlen(*sides, bounds_of([5, 20]), **GIVEN, **options, impl="triton")


def test_lengths_that_cannot_be_read_are_refused(monkeypatch):
    hidden = Call("lln_keys", *sides_of([5, 20]), block_size=16, keys=4, group_size=16)
    hidden = hidden.replace(bounds=torch.empty(3, dtype=torch.int32, device="meta"))
    with pytest.raises(lln.BackendUnavailableError, match="which a compiler or transform hides"):
        prepare(hidden, "triton")
    monkeypatch.setattr("lln.functional.key_ways.is_capturing", lambda: True)
    with pytest.raises(lln.BackendUnavailableError, match="which a CUDA graph cannot wait for"):
        prepare(request_of(), "triton")


@pytest.mark.slow
def test_a_compiled_call_stays_in_plain_pytorch(monkeypatch):
    let_auto_take_kernels(monkeypatch)
    monkeypatch.setattr(keys_ops, "attend_keys", None)
    sides = sides_of([5, 20], key_heads=2)

    def attend(query, key, value, bounds):
        options = {**GIVEN, "block_size": 16, "keys": 3}
        return lln.lln_keys_attention_varlen(query, key, value, bounds, **options)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found = compiled(*sides, bounds_of([5, 20]))
    options = {**GIVEN, "block_size": 16, "keys": 3, "impl": "eager"}
    plain = lln.lln_keys_attention_varlen(*sides, bounds_of([5, 20]), **options)
    torch.testing.assert_close(found, plain)
