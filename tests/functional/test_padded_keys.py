"""Packed sequences with exact keys as padded samples, here in plain PyTorch and float64.

What the kernels make of the samples is in `tests/kernels/keys/test_padded_keys.py`.
"""

from itertools import accumulate, pairwise

import pytest
import torch
from tests.pairs import pairs

import lln
from lln.checks.call import Call
from lln.eager.run import attend_dense
from lln.functional import padded_keys, ways
from lln.functional.key_ways import KeyKernels
from lln.functional.plain_ways import Plain
from lln.functional.way import Prepared
from lln.observers import add_observer, remove_observer

FP64 = torch.float64
GIVEN = {"alpha": 0.8, "beta": 1.1, "offset": -2.5}
LENGTHS = {
    "one": [37],
    "one token": [1],
    "uneven": [5, 30, 1, 16],
    "equal": [20, 20],
    "empties": [0, 17, 0, 0, 33, 0],
    "classes": [3, 70, 0, 12, 1, 65, 9],
}


class Padded(Plain):
    """Plain PyTorch, to which packed calls come padded as for the kernels."""

    def __init__(self):
        self.batches = []

    def run(self, call, prepared):
        if call.query.shape[0] == 0:
            return super().run(call, prepared)
        return padded_keys.attend_padded(call, "eager", self.attend_group)

    def attend_group(self, call):
        self.batches.append(call.query.shape[0])
        return attend_dense(call)


@pytest.fixture
def padding(monkeypatch):
    """Calls are padded, as for the kernels; returns how many samples each dense call had."""
    padded = Padded()

    def prepare(call, impl):
        is_plain = impl != "auto" or call.bounds is None
        return Prepared(Plain() if is_plain else padded, call.block_size)

    monkeypatch.setattr(ways, "prepare", prepare)
    return padded.batches


def bounds_of(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def sides_of(lengths):
    shapes = ((4, 8), (2, 8), (2, 5))
    return [torch.randn(sum(lengths), *shape, dtype=FP64).requires_grad_() for shape in shapes]


def numbers_of(form, lengths):
    if form == "matched":
        return {}
    if form == "fixed":
        return dict(GIVEN)
    heads = {"alpha": 4, "beta": 2, "offset": 4}
    count = 1 if form == "shared" else len(lengths)
    return {
        name: (torch.rand(count, heads[name], 1, 1, dtype=FP64) * number).requires_grad_()
        for name, number in GIVEN.items()
    }


def call(sides, lengths, numbers, **options):
    bounds = bounds_of(lengths)
    return lln.lln_keys_attention_varlen(*sides, bounds, **numbers, **options, enable_gqa=True)


def one_by_one(sides, lengths, numbers, **options):
    outs = []
    for index, (start, end) in enumerate(pairwise(accumulate(lengths, initial=0))):
        own = [side[start:end].transpose(0, 1)[None] for side in sides]
        given = {
            name: side[index : index + 1] if torch.is_tensor(side) and len(side) > 1 else side
            for name, side in numbers.items()
        }
        out = lln.lln_keys_attention(*own, **given, **options, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def assert_same(found, wanted, leaves):
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    weight = torch.randn_like(found)
    pairs = (torch.autograd.grad(out, leaves, weight) for out in (found, wanted))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pairs(form=["matched", "fixed", "shared", "per sequence"], group=[8, 1], name=LENGTHS)
def test_equal_to_one_call_per_sequence(padding, name, group, form):
    lengths = LENGTHS[name]
    sides, numbers = sides_of(lengths), numbers_of(form, lengths)
    options = {"block_size": 8, "keys": 4, "group_size": group}
    leaves = [*sides, *(side for side in numbers.values() if torch.is_tensor(side))]
    found = call(sides, lengths, numbers, **options)
    assert sum(padding) == sum(length > 0 for length in lengths)
    assert len(padding) < max(2, sum(padding))
    assert_same(found, one_by_one(sides, lengths, numbers, **options), leaves)


def test_no_more_samples_than_a_grid_has_room_for(padding, monkeypatch):
    monkeypatch.setattr("lln.functional.padded_keys.MAX_GRID", 12)
    lengths = [5, 6, 7, 0, 8, 5]
    sides, options = sides_of(lengths), {"block_size": 8, "keys": 4}
    found = call(sides, lengths, GIVEN, **options)
    assert padding == [2, 2, 1]
    assert_same(found, one_by_one(sides, lengths, GIVEN, **options), sides)


@pytest.mark.parametrize("keys", [0, 1, 5, 16, 18, 100])
@pytest.mark.parametrize("group", [8, 1])
def test_as_many_keys_as_tokens_are_all(padding, group, keys):
    """A sequence that has no more tokens than keys sees all, also beside a longer one."""
    lengths = [5, 16, 20, 1]
    sides, options = sides_of(lengths), {"block_size": 8, "keys": keys, "group_size": group}
    found = call(sides, lengths, GIVEN, **options)
    assert_same(found, one_by_one(sides, lengths, GIVEN, **options), sides)
    if keys == 100:
        exact = [side.repeat_interleave(4 // side.shape[1], 1) for side in sides]
        for start, end in pairwise(accumulate(lengths, initial=0)):
            own = [side[start:end].transpose(0, 1) for side in exact]
            softmax = torch.nn.functional.scaled_dot_product_attention(*own)
            torch.testing.assert_close(found[start:end].transpose(0, 1), softmax)


@pytest.mark.parametrize("matching", ["rest", "entropy", "variance", "paper"])
@pytest.mark.parametrize("name", ["empties", "classes"])
def test_matching(padding, name, matching):
    lengths = LENGTHS[name]
    sides, options = sides_of(lengths), {"block_size": 8, "keys": 4, "matching": matching}
    found = call(sides, lengths, {}, **options)
    assert padding
    assert_same(found, call(sides, lengths, {}, **options, impl="eager"), sides)


@pytest.mark.parametrize("scale", [0.2, -0.3])
@pytest.mark.parametrize("group_size", [2, 8])
def test_groups_of_queries_and_scales(padding, group_size, scale):
    lengths = LENGTHS["classes"]
    sides = sides_of(lengths)
    options = {"block_size": 8, "keys": 4, "group_size": group_size, "scale": scale}
    found = call(sides, lengths, {}, **options)
    assert_same(found, one_by_one(sides, lengths, {}, **options), sides)


@pytest.mark.parametrize("group", [8, 1])
@pytest.mark.parametrize("side", [0, 1, 2], ids=["query", "key", "value"])
def test_nan_stays_in_its_sequence(padding, side, group):
    lengths = [12, 20, 9]
    sides, options = sides_of(lengths), {"block_size": 8, "keys": 4, "group_size": group}
    wanted = call(sides, lengths, GIVEN, **options)
    with torch.no_grad():
        sides[side][[12, 31]] = torch.nan
    found = call(sides, lengths, GIVEN, **options)
    (gradient,) = torch.autograd.grad(found.sum(), sides[1])
    assert found[12:32].isnan().any()
    for where in (slice(0, 12), slice(32, 41)):
        assert torch.equal(found[where], wanted[where])
        assert gradient[where].isfinite().all()


def groups_with_queries(lengths, block_size, group_size):
    """Which groups of queries of a packed call hold any: bool ``[G]``."""
    held = []
    for length in lengths:
        blocks = -(-length // block_size)
        starts = range(0, blocks * block_size, group_size)
        held += [start < length for start in starts]
    whole = (sum(lengths) // block_size + len(lengths)) * (block_size // group_size)
    return torch.tensor(held + [False] * (whole - len(held)))


def announced(act):
    seen = []
    add_observer(seen.append)
    try:
        act()
    finally:
        remove_observer(seen.append)
    (one,) = seen
    return one


@pytest.mark.parametrize("form", ["matched", "paper", "per sequence"])
@pytest.mark.parametrize("choice", [{}, {"group_size": 4}, {"group_size": 1}], ids=str)
@pytest.mark.parametrize("name", LENGTHS)
def test_announced_as_a_packed_call(padding, name, choice, form):
    lengths = LENGTHS[name]
    sides = [side.detach() for side in sides_of(lengths)]
    numbers = numbers_of("matched" if form == "paper" else form, lengths)
    options = {"block_size": 8, "keys": 5, **choice}
    options["matching"] = "paper" if form == "paper" else "rest"
    found, plain = (
        announced(lambda impl=impl: call(sides, lengths, numbers, **options, impl=impl))
        for impl in ("auto", "eager")
    )
    assert len(padding) > 0
    assert found.query is sides[0]
    assert torch.equal(found.bounds, plain.bounds)
    assert found.key_mask is None
    assert found.group_size == plain.group_size
    assert found.keys.shape == plain.keys.shape
    assert found.keys.dtype == plain.keys.dtype
    queries = groups_with_queries(lengths, 8, found.group_size)
    assert torch.equal(found.keys[:, queries], plain.keys[:, queries])
    assert not (found.keys[:, ~queries] >= 0).any()
    filled = torch.tensor(lengths) > 0
    for part in ("alpha", "beta", "offset"):
        one, other = getattr(found, part), getattr(plain, part)
        assert one.shape == other.shape
        if len(one) > 1:
            assert one.isfinite().all()
            one, other = one[filled], other[filled]
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("bounds", [[0], [0, 0], [0, 0, 0]], ids=str)
def test_without_tokens(padding, bounds):
    sides = [torch.zeros(0, 2, 4, requires_grad=True) for _ in range(3)]
    out = lln.lln_keys_attention_varlen(*sides, torch.tensor(bounds))
    assert out.shape == (0, 2, 4)
    out.sum().backward()
    assert all(side.grad is not None for side in sides)


def test_bounds_are_checked_when_they_are_read(padding, monkeypatch):
    """On a GPU nobody has read them before."""
    monkeypatch.setattr("lln.checks.bounds.values_are_readable", lambda _: False)
    sides = sides_of([10])
    with pytest.raises(lln.InvalidInputError, match="cu_seqlens must end at the number of tokens"):
        lln.lln_keys_attention_varlen(*sides, torch.tensor([0, 4, 12]), **GIVEN, enable_gqa=True)


def test_the_plan_explains_itself():
    packed = Call("lln_keys", *sides_of([5]), block_size=64, bounds=bounds_of([5]))
    assert str(KeyKernels().prepare(packed)) == (
        "The fused kernels choose keys and attend to them, to blocks of 64 tokens and to the "
        "slots, in sequences padded to similar lengths."
    )
