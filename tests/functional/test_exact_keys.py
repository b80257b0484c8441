"""Exact keys against the float64 reference, softmax and one call per sequence."""

from itertools import accumulate, pairwise, product

import pytest
import torch
from tests.pairs import pairs
from torch.nn import functional as F

from lln import (
    choose_keys,
    lln_keys_attention,
    lln_keys_attention_varlen,
    match_moments,
    reference,
)
from lln.eager.key_blocks import blocks_in
from lln.observers import add_observer, remove_observer
from lln.testing import LAYOUTS, assert_close, make_qkv

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = [FP64, FP32, BF16, FP16]
# Queries that share their keys: all of a block, or none.
GROUPS = [None, 1]
MASKS = ["right", "left", "holes", "one_row", "all"]
LENGTHS = [0, 1, 2, 15, 63, 64, 65, 130, 257]
GIVEN = {"alpha": 0.8, "beta": 1.1, "offset": -2.5}


def sizes(batch=2, heads=2, tokens=40, width=8, **others):
    return {"batch": batch, "heads": heads, "tokens": tokens, "width": width, **others}


def make_mask(kind, batch, tokens):
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    if kind == "left":
        mask[:, : tokens // 3] = False
        mask[-1, : tokens // 2] = False
    elif kind == "right":
        mask[:, -(-2 * tokens // 3) :] = False
    elif kind == "one_row":
        mask[0] = False
    elif kind == "all":
        mask[:] = False
    elif kind == "holes":
        mask = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(5)) < 0.6
    return mask


def repeated(tensor, heads):
    return tensor.repeat_interleave(heads // max(tensor.shape[1], 1), 1)


def expected_of(sides, indices, *, block, group, mask=None, scale=None):
    """The reference on float64 sides: query, key, value, α, β, offset.

    Which pairs are exact, and which the summary holds, is found here in loops.
    """
    query, key, value, alpha, beta, offset = sides
    batch, heads, tokens, _ = query.shape
    pairs = torch.zeros(2, batch, heads, tokens, tokens, dtype=torch.bool)
    for sample in range(batch):
        valid = [True] * tokens if mask is None else mask[sample].tolist()
        first = valid.index(True) if any(valid) else 0
        places = [place + -first % block for place in range(tokens)]
        for head in range(heads):
            lists = [set(one) for one in indices[sample, head].tolist()]
            rows = []
            for place in places:
                chosen = lists[place // group]
                for column, other in enumerate(places):
                    own = place // block == other // block
                    rows.append((valid[column] and (own or column in chosen), valid[column]))
            found = torch.tensor(rows, dtype=torch.bool).view(tokens, tokens, 2)
            pairs[:, sample, head] = found.permute(2, 0, 1)
    exact, keep = pairs
    key, value = repeated(key, heads), repeated(value, heads)
    if beta.dim() == 4 and beta.shape[1] != 1:
        beta = repeated(beta, heads)
    return reference.lln_keys_attention(
        *(query, key, value, alpha, beta, exact, offset), keep=keep, scale=scale
    )


def check(shape, dtype, *, block=16, keys=5, mask=None, layout="contiguous", **more):
    """Output and all gradients of eager against the reference."""
    query, key, value = make_qkv(**shape, dtype=dtype, layout=layout, requires_grad=True)
    batch, heads, tokens, _ = query.shape
    key_mask = None if mask is None else make_mask(mask, batch, tokens)
    wide = FP64 if dtype == FP64 else FP32
    numbers = [
        torch.full((batch, heads, 1, 1), GIVEN[name], dtype=wide, requires_grad=True)
        for name in ("alpha", "beta", "offset")
    ]
    alpha, beta, offset = numbers
    options = {"block_size": block, "key_mask": key_mask, **more}
    options["enable_gqa"] = True
    found = lln_keys_attention(
        *(query, key, value), alpha=alpha, beta=beta, offset=offset, keys=keys, **options
    )
    assert found.dtype == dtype
    indices = choose_keys(query, key, keys, **options)
    leaves = [query, key, value, *numbers]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    group = more.get("group_size") or block
    where = {"block": block, "group": group, "mask": key_mask}
    expected = expected_of(exact, indices, **where, scale=more.get("scale"))
    assert_close(found, expected)
    generator = torch.Generator().manual_seed(7)
    upstream = torch.randn(found.shape, generator=generator, dtype=FP64).to(dtype)
    grads = torch.autograd.grad(found, leaves, upstream)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    # Gradients of query, key, α, β and the offset are sums of terms that cancel.
    size = max(grad.abs().max().item() if grad.numel() else 0.0 for grad in wanted)
    size = max(size, upstream.double().norm().item() if upstream.numel() else 0.0)
    for name, grad, exact_grad in zip(
        ("query", "key", "value", "alpha", "beta", "offset"), grads, wanted, strict=True
    ):
        what = f"gradient of {name}"
        assert_close(grad, exact_grad, backward=True, magnitude=size, what=what)


# Against the reference


@pairs(dtype=DTYPES, tokens=LENGTHS)
def test_lengths(tokens, dtype):
    batch, heads = (1, 1) if tokens > 60 else (2, 2)
    check(sizes(batch, heads, tokens), dtype)


@pytest.mark.parametrize("keys", [0, 3, 64])
@pytest.mark.parametrize("block", [1, 16, 64, 100])
def test_blocks_and_keys(block, keys):
    check(sizes(1, 2, 70), FP64, block=block, keys=keys)


@pytest.mark.parametrize("mask", [None, *MASKS])
@pytest.mark.parametrize("group", GROUPS)
def test_choices_and_masks(group, mask):
    check(sizes(2, 2, 45), FP64, block=8, group_size=group, mask=mask)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_masks_in_low_precision(dtype, mask):
    check(sizes(2, 2, 45), dtype, mask=mask)


@pytest.mark.parametrize("mask", [None, "left", "holes"])
@pytest.mark.parametrize("group", [1, 4, 8, 16])
def test_groups(group, mask):
    check(sizes(2, 2, 45), FP64, group_size=group, mask=mask)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    "shape",
    [
        sizes(1, 4, 40, key_heads=2),
        sizes(2, 6, 20, key_heads=2, value_width=5),
        sizes(1, 2, 40, value_width=1),
        sizes(1, 2, 40, width=3, value_width=9),
        sizes(1, 2, 40, width=1),
    ],
    ids=str,
)
def test_shapes(shape, group):
    check(shape, FP64, group_size=group, mask="holes")


@pytest.mark.parametrize("scale", [0.7, -0.7, 2])
@pytest.mark.parametrize("group", GROUPS)
def test_scales(scale, group):
    check(sizes(1, 2), FP64, scale=scale, group_size=group)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    check(sizes(), FP32, layout=layout, group_size=1, mask="left")


@pytest.mark.parametrize("mask", [None, "left", "holes"])
def test_reference_implementation_takes_the_same_arguments(mask):
    inputs = make_qkv(2, 4, 45, 8, key_heads=2, value_width=5)
    options = {**GIVEN, "beta": torch.rand(2, 2, 1, 1) + 0.5, "enable_gqa": True}
    options |= {"block_size": 8, "keys": 5, "group_size": 1}
    options["key_mask"] = None if mask is None else make_mask(mask, 2, 45)
    found, wanted = (
        lln_keys_attention(*inputs, **options, impl=impl) for impl in ("eager", "reference")
    )
    assert_close(found, wanted.double())


@pytest.mark.usefixtures("poisoned")
def test_results_do_not_come_from_fresh_memory():
    check(sizes(), FP32, mask="holes")


NUMBERS = {
    "number": lambda: 0.9,
    "integer": lambda: 1,
    "scalar": lambda: torch.tensor(0.9),
    "head": lambda: torch.rand(4, 1, 1) + 0.5,
    "sample": lambda: torch.rand(2, 1, 1, 1) + 0.5,
    "full": lambda: torch.rand(2, 4, 1, 1, dtype=FP64) + 0.5,
}


@pytest.mark.parametrize(
    ("kind", "name"), [*product(NUMBERS, ["alpha", "beta", "offset"]), ("key_head", "beta")]
)
def test_shapes_of_numbers(kind, name):
    query, key, value = make_qkv(2, 4, 20, 8, key_heads=2)
    given = torch.rand(2, 2, 1, 1) + 0.5 if kind == "key_head" else NUMBERS[kind]()
    options = {**GIVEN, name: given}
    found = lln_keys_attention(
        *(query, key, value), **options, block_size=8, keys=3, enable_gqa=True
    )
    indices = choose_keys(query, key, 3, block_size=8, enable_gqa=True)
    numbers = [torch.as_tensor(options[side]).float().double() for side in GIVEN]
    alpha, beta, offset = numbers
    sides = [query.double(), key.double(), value.double(), alpha, beta, offset]
    assert_close(found, expected_of(sides, indices, block=8, group=8))


# Against softmax attention


@pytest.mark.parametrize("keys", [50, 1000, "all"])
@pytest.mark.parametrize("block", [1, 16, 64])
@pytest.mark.parametrize("mask", [None, "right", "left", "holes"])
def test_every_key_exact_is_softmax(mask, block, keys):
    query, key, value = make_qkv(2, 2, 50, 8, dtype=FP64)
    key_mask = None if mask is None else make_mask(mask, 2, 50)
    if keys == "all":
        groups = blocks_in(50, block, mask is not None)
        keys = torch.arange(50).expand(2, 2, groups, -1)
    found = lln_keys_attention(query, key, value, block_size=block, keys=keys, key_mask=key_mask)
    bias = None if key_mask is None else key_mask[:, None, None]
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", [None, "left", "holes"])
@pytest.mark.parametrize("keys", [50, 51, 1000])
def test_as_many_keys_as_tokens_are_all_of_them(keys, mask):
    """A choice and a call must agree."""
    query, key, value = make_qkv(2, 2, 50, 8, dtype=FP64)
    key_mask = None if mask is None else make_mask(mask, 2, 50)
    keep = torch.ones(50, 50, dtype=torch.bool)
    keep = keep if mask is None else keep & key_mask[:, None, None]
    options = {"block_size": 8, "group_size": 1, "key_mask": key_mask}
    chosen = choose_keys(query, key, keys, **options)
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=keep).nan_to_num(0.0)
    for given in (keys, chosen):
        found = lln_keys_attention(query, key, value, keys=given, **options)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_packed_sequences_shorter_than_the_keys_see_all():
    query, key, value = (side[0].transpose(0, 1) for side in make_qkv(1, 2, 50, 8, dtype=FP64))
    bounds = torch.tensor([0, 20, 50])
    found = lln_keys_attention_varlen(
        query, key, value, bounds, block_size=8, keys=40, group_size=1
    )
    for start, end in ((0, 20), (20, 50)):
        sides = (side[start:end].transpose(0, 1) for side in (query, key, value))
        wanted = F.scaled_dot_product_attention(*sides).transpose(0, 1)
        torch.testing.assert_close(found[start:end], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("group", GROUPS)
def test_more_keys_are_closer_to_softmax(group):
    query, key, value = make_qkv(1, 4, 128, 16, scale=1.5, dtype=FP64)
    wanted = F.scaled_dot_product_attention(query, key, value)
    errors = [
        (lln_keys_attention(query, key, value, block_size=16, keys=keys, group_size=group) - wanted)
        .norm()
        .item()
        for keys in (0, 12, 40, 110)
    ]
    assert all(more < 0.97 * fewer for fewer, more in pairwise(errors)), errors


def test_no_keys_leave_block_and_slots():
    query, key, value = make_qkv(1, 2, 40, 8, dtype=FP64)
    found = lln_keys_attention(query, key, value, **GIVEN, block_size=8, keys=0)
    scores = (query @ key.mT) / 8**0.5
    place = torch.arange(40) // 8
    near = torch.where(place[:, None] == place, scores, -torch.inf).exp()
    centre = key.mean(2, keepdim=True)
    kernel = (GIVEN["alpha"] * query).exp() @ (GIVEN["beta"] * (key - centre)).exp().mT
    level = torch.exp(query @ centre.mT / 8**0.5 + GIVEN["offset"])
    weights = near + 32 / 40 * kernel * level
    wanted = weights @ value / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_an_offset_far_below_leaves_softmax_over_block_and_keys(spread):
    """At any temperature."""
    sides = [side.requires_grad_() for side in make_qkv(1, 2, 40, 8, dtype=FP64)]
    query, key, value = sides
    chosen = choose_keys(query, key, 6, block_size=8, group_size=1)
    found = lln_keys_attention(
        query, key, value, alpha=spread, beta=spread, offset=-1e4, block_size=8, keys=chosen,
        group_size=1,
    )  # fmt: skip
    place = torch.arange(40) // 8
    exact = (place[:, None] == place).repeat(1, 2, 1, 1)
    sample, head, row, column = (chosen >= 0).nonzero(as_tuple=True)
    exact[sample, head, row, chosen[sample, head, row, column]] = True
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=exact)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    grads = [torch.autograd.grad(out.square().sum(), sides) for out in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


# What does not reach the output


def keys_forms():
    for group in GROUPS:
        yield {"block_size": 8, "keys": 4, "group_size": group}


every_form = pytest.mark.parametrize(
    "options",
    list(keys_forms()),
    ids=lambda o: str(o["group_size"]),
)


@every_form
@pytest.mark.parametrize("garbage", [torch.nan, 3e38])
@pytest.mark.parametrize("side", ["left", "holes"])
def test_garbage_in_masked_tokens_has_no_effect(options, garbage, side):
    mask = make_mask(side, 2, 30)

    def results(fill):
        sides = make_qkv(2, 2, 30, 4)
        for tensor in sides:
            tensor.masked_fill_(~mask[:, None, :, None], fill)
            tensor.requires_grad_()
        numbers = {name: torch.tensor(number, requires_grad=True) for name, number in GIVEN.items()}
        out = lln_keys_attention(*sides, key_mask=mask, **options | numbers)
        out = out.masked_fill(~mask[:, None, :, None], 0.0)
        grads = torch.autograd.grad(out.square().sum(), (*sides, *numbers.values()))
        return [out, *grads]

    for found, wanted in zip(results(garbage), results(0.0), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@every_form
@pytest.mark.parametrize("side", [0, 1, 2], ids=["query", "key", "value"])
def test_nan_stays_in_its_sample_and_head(options, side):
    sides = make_qkv(2, 3, 30, 4)
    wanted = lln_keys_attention(*sides, **options)
    sides[side][1, 2, 9] = torch.nan
    found = lln_keys_attention(*sides, **options)
    assert found[1, 2].isnan().any()
    found[1, 2] = wanted[1, 2]
    assert torch.equal(found, wanted)


@every_form
@pytest.mark.parametrize("fill", [torch.inf, -torch.inf])
@pytest.mark.parametrize("side", [0, 1], ids=["query", "key"])
def test_infinity_shows_wherever_nan_does(options, side, fill):
    """Half of the infinities give a score of -inf, and so a weight of zero."""
    sides = make_qkv(2, 3, 30, 4)
    sides[side][1, 2, 9] = fill
    bounds = torch.tensor([0, 30, 60])
    packed = [tensor.transpose(1, 2).flatten(0, 1) for tensor in sides]
    both = lln_keys_attention(*sides, **GIVEN | options)
    found = lln_keys_attention_varlen(*packed, bounds, **GIVEN | options)
    for out in (both, found.unflatten(0, (2, 30)).transpose(1, 2)):
        rows = slice(9, 10) if side == 0 else slice(0, 30)
        assert not out[1, 2, rows].isfinite().all(-1).any()
        assert out[0].isfinite().all()
        assert out[:, :2].isfinite().all()


@every_form
def test_a_masked_sample_gives_zeros_and_no_gradients(options):
    sides = make_qkv(2, 2, 30, 4, requires_grad=True)
    mask = make_mask("one_row", 2, 30)
    out = lln_keys_attention(*sides, key_mask=mask, **options)
    assert not out[0].any()
    assert out[1].all()
    out.square().sum().backward()
    assert all(not side.grad[0].any() for side in sides)
    assert all(side.grad[1].any() for side in sides)


@every_form
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("batch", "heads", "tokens"), [(0, 2, 9), (2, 0, 9), (2, 2, 0)])
def test_empty_inputs(batch, heads, tokens, masked, options):
    sides = make_qkv(batch, heads, tokens, 4, value_width=6, requires_grad=True)
    mask = torch.ones(batch, tokens, dtype=torch.bool) if masked else None
    out = lln_keys_attention(*sides, key_mask=mask, **options)
    assert out.shape == (batch, heads, tokens, 6)
    out.sum().backward()
    assert all(side.grad is not None and not side.grad.any() for side in sides)
    names = ("block_size", "group_size")
    indices = choose_keys(*sides[:2], 4, key_mask=mask, **{name: options[name] for name in names})
    groups = blocks_in(tokens, 8, masked) * (8 // (options["group_size"] or 8))
    assert indices.shape[:3] == (batch, heads, groups)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tokens", [1, 2])
def test_short_sequences_are_finite(tokens, group):
    """One key has no spread to match."""
    sides = make_qkv(2, 2, tokens, 4, requires_grad=True)
    out = lln_keys_attention(*sides, block_size=1, keys=4, group_size=group)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(side.grad.isfinite().all() for side in sides)


def test_large_numbers_are_finite():
    query, key, value = make_qkv(1, 2, 40, 8, scale=1e4)
    assert lln_keys_attention(query, key, value, block_size=8, keys=4).isfinite().all()


@every_form
def test_padding_changes_nothing(options):
    sides = make_qkv(1, 2, 30, 4, dtype=FP64)
    wanted = lln_keys_attention(*sides, **options)
    for before, after in ((0, 11), (11, 0), (8, 3)):
        padded = [F.pad(side, (0, 0, before, after), value=7.0) for side in sides]
        mask = F.pad(torch.ones(1, 30, dtype=torch.bool), (before, after))
        found = lln_keys_attention(*padded, key_mask=mask, **options)[:, :, before : before + 30]
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@every_form
def test_results_repeat(options):
    sides = make_qkv(2, 2, 60, 8, dtype=BF16)
    wanted = lln_keys_attention(*sides, **options)
    assert all(torch.equal(lln_keys_attention(*sides, **options), wanted) for _ in range(5))


def test_inputs_stay_unmodified():
    sides = make_qkv(2, 2, 30, 4)
    indices = choose_keys(*sides[:2], 4, block_size=8)
    indices[..., 0] = indices[..., 1]
    before = [tensor.clone() for tensor in (*sides, indices)]
    lln_keys_attention(*sides, keys=indices, block_size=8)
    assert all(map(torch.equal, (*sides, indices), before))


# Packed sequences

PACKED = {
    "one": [37],
    "some": [5, 30, 1, 16],
    "empties": [0, 17, 0, 0, 33, 0],
    "singles": [1] * 6,
}


def bounds_of(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def packed_sides(lengths, dtype=FP64):
    shapes = ((4, 8), (2, 8), (2, 5))
    return [torch.randn(sum(lengths), *shape).to(dtype).requires_grad_() for shape in shapes]


def one_by_one(sides, lengths, numbers, **options):
    outs = []
    for index, (start, end) in enumerate(pairwise(accumulate(lengths, initial=0))):
        own = [side[start:end].transpose(0, 1)[None] for side in sides]
        given = {
            name: side[index : index + 1] if torch.is_tensor(side) and side.dim() == 4 else side
            for name, side in numbers.items()
        }
        out = lln_keys_attention(*own, **given, **options, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


@pairs(
    how=[
        ("matched", "eager"),
        ("fixed", "eager"),
        ("per_sequence", "eager"),
        ("per_sequence", "reference"),
    ],
    group=GROUPS,
    packing=PACKED,
)
def test_packed_equals_one_call_per_sequence(packing, group, how):
    form, impl = how
    lengths = PACKED[packing]
    sides = packed_sides(lengths)
    numbers = {} if form == "matched" else dict(GIVEN)
    if form == "per_sequence":
        numbers = {
            name: (torch.rand(len(lengths), 4, 1, 1, dtype=FP64) * number).requires_grad_()
            for name, number in GIVEN.items()
        }
    options = {"block_size": 8, "keys": 4, "group_size": group}
    found = lln_keys_attention_varlen(
        *sides, bounds_of(lengths), **numbers, **options, enable_gqa=True, impl=impl
    )
    wanted = one_by_one(sides, lengths, numbers, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    leaves = [*sides, *(side for side in numbers.values() if torch.is_tensor(side))]
    weight = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, leaves, weight),
        torch.autograd.grad(wanted, leaves, weight),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("matching", ["rest", "entropy", "variance"])
def test_packed_matching(matching):
    lengths = PACKED["some"]
    sides = packed_sides(lengths)
    found = lln_keys_attention_varlen(
        *sides, bounds_of(lengths), matching=matching, block_size=8, keys=4, enable_gqa=True
    )
    wanted = one_by_one(sides, lengths, {}, matching=matching, block_size=8, keys=4)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_packed_precision(dtype):
    lengths = PACKED["some"]
    sides = [side.detach() for side in packed_sides(lengths, dtype)]
    options = {**GIVEN, "block_size": 8, "enable_gqa": True}
    found = lln_keys_attention_varlen(*sides, bounds_of(lengths), keys=30, **options)
    wide = [side.double() for side in sides]
    wanted = lln_keys_attention_varlen(*wide, bounds_of(lengths), keys=30, **options)
    assert found.dtype == dtype
    assert_close(found, wanted)


def test_packed_keys_far_from_zero_keep_their_digits():
    """A mean that comes from running sums over all texts loses them."""
    lengths = [9_000, 5, 0, 3_000]
    query, key, value = (torch.randn(sum(lengths), 1, 8) for _ in range(3))
    sides = (query, key + 300, value)
    options = {**GIVEN, "block_size": 64, "keys": 0}
    found = lln_keys_attention_varlen(*sides, bounds_of(lengths), **options)
    wanted = one_by_one([side.double() for side in sides], lengths, {}, **options)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-5)


def test_a_huge_key_changes_no_other_packed_sequence():
    lengths = [40, 70, 30]
    query, key, value = (torch.randn(sum(lengths), 2, 8) for _ in range(3))
    options = {**GIVEN, "block_size": 8, "keys": 4}
    wanted = lln_keys_attention_varlen(query, key, value, bounds_of(lengths), **options)
    key[50] = 1e8
    found = lln_keys_attention_varlen(query, key, value, bounds_of(lengths), **options)
    assert torch.equal(found[:40], wanted[:40])
    assert torch.equal(found[110:], wanted[110:])


def test_packed_groups():
    lengths = PACKED["some"]
    sides = packed_sides(lengths)
    options = {"block_size": 8, "keys": 4, "group_size": 2}
    found = lln_keys_attention_varlen(*sides, bounds_of(lengths), **options, enable_gqa=True)
    wanted = one_by_one(sides, lengths, {}, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_packed_indices_of_other_sequences_do_not_count(impl):
    lengths, bounds = [16, 16], torch.tensor([0, 16, 32])
    sides = packed_sides(lengths)
    options = {**GIVEN, "block_size": 8, "enable_gqa": True, "impl": impl}
    keys = torch.full((4, 6, 3), -1)
    keys[:, 0] = torch.tensor([9, 20, 31])
    own = torch.full((4, 6, 3), -1)
    own[:, 0, 0] = 9
    found, wanted = (
        lln_keys_attention_varlen(*sides, bounds, keys=given, **options) for given in (keys, own)
    )
    assert torch.equal(found, wanted)
    keys[:, 0] = -1
    none = lln_keys_attention_varlen(*sides, bounds, keys=keys, **options)
    assert not torch.allclose(found[:8], none[:8])
    torch.testing.assert_close(found[8:], none[8:])


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("side", [0, 1, 2], ids=["query", "key", "value"])
def test_nan_stays_in_its_packed_sequence(side, group):
    lengths = [12, 20, 9]
    sides = [tensor.detach() for tensor in packed_sides(lengths)]
    options = {**GIVEN, "block_size": 8, "keys": 4, "group_size": group}
    options["enable_gqa"] = True
    wanted = lln_keys_attention_varlen(*sides, bounds_of(lengths), **options)
    sides[side][30] = torch.nan
    found = lln_keys_attention_varlen(*sides, bounds_of(lengths), **options)
    assert found[12:32].isnan().any()
    for where in (slice(0, 12), slice(32, 41)):
        assert torch.equal(found[where], wanted[where])


@pytest.mark.parametrize("bounds", [[0], [0, 0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_packed_without_tokens(group, bounds):
    sides = [torch.zeros(0, 2, 4, requires_grad=True) for _ in range(3)]
    out = lln_keys_attention_varlen(*sides, torch.tensor(bounds), group_size=group)
    assert out.shape == (0, 2, 4)
    out.sum().backward()
    assert all(side.grad is not None for side in sides)


def test_packed_without_tokens_gives_the_offset_a_zero_gradient():
    sides = [torch.zeros(0, 2, 4) for _ in range(3)]
    offset = torch.zeros(1, 2, 1, 1, requires_grad=True)
    options = {**GIVEN, "offset": offset}
    lln_keys_attention_varlen(*sides, torch.tensor([0, 0]), **options).sum().backward()
    assert offset.grad is not None


# Numbers that are not given


@pytest.mark.parametrize("matching", ["rest", "entropy", "variance", "paper"])
@pytest.mark.parametrize("masked", [False, True])
def test_matching_inside_is_matching_outside(matching, masked):
    query, key, value = make_qkv(2, 3, 50, 16)
    mask = make_mask("holes", 2, 50) if masked else None
    criterion = "entropy" if matching == "rest" else matching
    scope = "tensor" if matching == "paper" else "head"
    numbers = match_moments(query, key, criterion=criterion, scope=scope, key_mask=mask)
    factor = 0.5 if matching == "rest" else 1.0
    alpha, beta = (factor * number for number in numbers)
    options = {"block_size": 8, "keys": 4, "key_mask": mask}
    found = lln_keys_attention(query, key, value, matching=matching, **options)
    wanted = lln_keys_attention(query, key, value, alpha=alpha, beta=beta, **options)
    torch.testing.assert_close(found, wanted)


def test_the_offset_inside_is_the_closed_form():
    """G = p/2 - ln D - s², head by head."""
    query, key, value = make_qkv(2, 3, 50, 16, dtype=FP64)
    alpha, beta = match_moments(query, key)
    query_variance = query.square().mean((-1, -2))
    key_variance = key.var(-2, correction=0).mean(-1)
    spread = alpha[..., 0, 0].square() * query_variance
    offset = query_variance * key_variance / 2 - torch.tensor(16.0).log() - spread
    options = {"alpha": alpha, "beta": beta, "block_size": 8, "keys": 4}
    found = lln_keys_attention(query, key, value, **options)
    wanted = lln_keys_attention(query, key, value, offset=offset[..., None, None], **options)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


# Who watches


def announced(call):
    seen = []
    add_observer(seen.append)
    try:
        call()
    finally:
        remove_observer(seen.append)
    (one,) = seen
    return one


@pytest.mark.parametrize("group", GROUPS)
def test_calls_are_announced(group):
    query, key, value = make_qkv(2, 2, 30, 4)
    choice = {"block_size": 8, "group_size": group}
    call = announced(lambda: lln_keys_attention(query, key, value, keys=4, **choice))
    assert call.kind == "lln_keys"
    assert call.block_size == 8
    assert call.group_size == (group or 8)
    assert call.offset.shape == call.alpha.shape == call.beta.shape == (2, 2, 1, 1)
    wanted = choose_keys(query, key, 4, **choice)
    assert torch.equal(call.keys, wanted)
    again = lln_keys_attention(
        *(query, key, value),
        **{"alpha": call.alpha, "beta": call.beta, "offset": call.offset, "keys": call.keys},
        **{"block_size": 8, "group_size": call.group_size},
    )
    torch.testing.assert_close(again, lln_keys_attention(query, key, value, keys=4, **choice))


def test_packed_calls_are_announced():
    lengths = PACKED["some"]
    sides = packed_sides(lengths)
    bounds = bounds_of(lengths)
    call = announced(
        lambda: lln_keys_attention_varlen(
            *sides, bounds, block_size=8, keys=4, group_size=4, enable_gqa=True
        )
    )
    assert call.bounds is bounds
    assert call.group_size == 4
    assert call.offset.shape == (4, 4, 1, 1)
    assert call.keys.shape == (4, (52 // 8 + 4) * 2, 4)
