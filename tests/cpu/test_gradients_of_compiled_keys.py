"""Gradients of exact keys by compiled passes, against the float64 reference."""

import pytest
import torch
from tests.cpu.test_compiled_keys import BOUNDS, GIVEN, attention
from tests.cpu.test_compiled_passes import MASKS, check_further_gradients, sides_of
from tests.pairs import pairs

import lln
from lln.testing.tolerances import budget, largest_error

BOTH = ["forward_keys", "backward_keys"]


def gradients(sides, impl="cpu", numbers=(), **options):
    """Of the sides, and of α, β and the offset if they are tensors that learn."""
    out = attention(sides, impl, **options)
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(out.shape, generator=generator).to(out.dtype)
    return torch.autograd.grad(out, (*sides, *numbers), gradient)


def check(sides, **options):
    """Compare with the reference, which has the same keys, and with what PyTorch errs."""
    found = gradients(sides, **options)
    names = ("block_size", "group_size", "key_mask", "scale")
    where = {name: options[name] for name in names if name in options}
    if isinstance(options.get("keys", 64), int):
        plain = [side.detach() for side in sides[:2]]
        number = options.get("keys", 64)
        options["keys"] = lln.choose_keys(*plain, number, enable_gqa=True, impl="cpu", **where)
    wide = [side.detach().double().requires_grad_() for side in sides]
    expected = gradients(wide, "reference", **options)
    eager = gradients(sides, "eager", **options)
    size = max(side.abs().max().item() for side in expected)
    for one, other, plain in zip(found, expected, eager, strict=True):
        assert one.isfinite().all()
        assert one.dtype == plain.dtype
        allowed = budget(one, other, plain, backward=True, magnitude=size)
        assert largest_error(one, other) <= allowed


@pairs(
    tokens=[1, 3, 16, 63, 64, 65, 130, 200],
    block_size=[1, 16, 24, 64, 2**40],
    keys=[0, 1, 7, 300],
)
def test_lengths_blocks_and_keys(tokens, block_size, keys, taken):
    check(sides_of(tokens), block_size=block_size, keys=keys)
    assert taken[:2] == BOTH


@pairs(block_size=[16, 64], group_size=[1, 2, 16], mask=[None, *MASKS], keys=[0, 9, 150])
def test_groups_and_masks(block_size, group_size, mask, keys, taken):
    options = {"block_size": block_size, "group_size": group_size, "keys": keys}
    check(sides_of(150), key_mask=MASKS[mask] if mask else None, **options)
    assert taken[:2] == BOTH


@pytest.mark.parametrize(
    ("width", "values"),
    [(16, 16), (64, 16), (80, 80), (128, 128), (1, 1), (20, 36), (256, 256), (24, 40)],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_widths(width, values, transposed, taken):
    check(sides_of(width=width, values=values, transposed=transposed), block_size=16, keys=10)
    assert taken[:2] == BOTH


@pytest.mark.parametrize("key_heads", [1, 2, 3])
@pytest.mark.parametrize("scale", [None, 0.3, -0.2])
def test_grouped_queries_and_scale(key_heads, scale, taken):
    sides = sides_of(150, heads=6, key_heads=key_heads)
    check(sides, block_size=16, keys=11, scale=scale, key_mask=MASKS["left"])
    assert taken[:2] == BOTH


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [None, "some"])
def test_half_types_are_summed_in_float32(dtype, mask, taken):
    sides = [side.detach().to(dtype).requires_grad_() for side in sides_of(150)]
    check(sides, block_size=16, keys=11, key_mask=MASKS[mask] if mask else None)
    assert taken[:2] == BOTH


@pairs(
    shape=[(), (6, 1, 1), (2, 6, 1, 1), (2, 1, 1, 1)],
    mask=[None, "some", "left"],
    group_size=[4, 16],
    key_heads=[3, 6],
)
def test_numbers_that_learn(shape, mask, group_size, key_heads, taken):
    """An entry per head, per sample or one of all; of β also per key head."""
    found = []
    where = {"block_size": 16, "group_size": group_size, "key_mask": mask and MASKS[mask]}
    sides = sides_of(150, heads=6, key_heads=key_heads)
    keys = lln.choose_keys(*sides[:2], 9, enable_gqa=True, impl="cpu", **where)
    shapes = {"alpha": shape, "beta": shape and (key_heads, 1, 1), "offset": shape}
    for given, impl in ((sides, "cpu"), ([side.double() for side in sides], "reference")):
        numbers = {
            name: torch.full(own, GIVEN[name], dtype=given[0].dtype, requires_grad=True)
            for name, own in shapes.items()
        }
        out = attention(given, impl, keys=keys, **where, **numbers)
        found.append(torch.autograd.grad(out.square().sum(), tuple(numbers.values())))
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
    assert taken == ["choose", *BOTH]


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_what_is_missing_is_matched(kind, taken):
    found = []
    for dtype, impl in ((torch.float32, "cpu"), (torch.float64, "eager")):
        torch.manual_seed(0)
        sides = sides_of(150)
        keys = lln.choose_keys(*sides[:2], 9, block_size=16)
        sides = [side.detach().to(dtype).requires_grad_() for side in sides]
        options = {"keys": keys, "block_size": 16, "impl": impl}
        given = sides
        if kind == "packed":
            given = [side[0].transpose(0, 1) for side in sides]
            out = lln.lln_keys_attention_varlen(*given, BOUNDS, **options | {"keys": 9})
        else:
            out = lln.lln_keys_attention(*given, **options)
        found.append(torch.autograd.grad(out.square().sum(), sides))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)
    assert "backward_keys" in taken


def test_indices_of_a_caller_are_taken(taken):
    indices = torch.randint(-1, 150, (2, 3, 11, 9))
    check(sides_of(150), block_size=16, keys=indices, key_mask=MASKS["some"])
    assert taken == BOTH


def test_all_keys_exact_is_softmax(taken):
    sides = sides_of(100)
    found = gradients(sides, keys=100, block_size=16)
    wide = [side.detach().double().requires_grad_() for side in sides]
    out = torch.nn.functional.scaled_dot_product_attention(*wide)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
    for one, other in zip(found, torch.autograd.grad(out, wide, gradient), strict=True):
        assert largest_error(one, other) <= budget(one, other, backward=True)
    assert taken == BOTH


def test_a_vector_added_to_all_keys_changes_nothing(taken):
    query, key, value = sides_of(150)
    keys = lln.choose_keys(query, key, 12, block_size=16)
    moved = (key + 30 * torch.randn(32)).detach().requires_grad_()
    found = gradients((query, moved, value), keys=keys, block_size=16)
    expected = gradients((query, key, value), keys=keys, block_size=16)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=0)
    assert taken == ["choose", *BOTH, *BOTH]


def test_a_sample_without_keys_has_no_gradient(taken):
    mask = MASKS["some"].clone()
    mask[1] = False
    found = gradients(sides_of(150), keys=9, block_size=16, key_mask=mask)
    assert all(side[0].any() and not side[1].any() for side in found)
    assert taken == BOTH


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_what_is_masked_is_not_seen(bad, taken):
    mask, clean = MASKS["some"], sides_of(150)
    sides = [side.detach().clone() for side in clean]
    for side in sides:
        side[~mask[:, None].expand(side.shape[:3])] = bad
    sides = [side.requires_grad_() for side in sides]
    options = {"keys": 9, "block_size": 16, "key_mask": mask}
    found = [
        torch.autograd.grad((attention(given, **options) * mask[:, None, :, None]).sum(), given)
        for given in (sides, clean)
    ]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert not one[~mask[:, None].expand(one.shape[:3])].any()
    assert taken == BOTH * 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_not_a_number_shows_in_its_head_only(bad, place, taken):
    sides = sides_of(150)
    sides[place].data[1, 2, 100, 3] = bad
    for found in gradients(sides, keys=9, block_size=16):
        assert found[0].isfinite().all()
        assert found[1, :2].isfinite().all()
    assert not gradients(sides, keys=9, block_size=16)[1][1, 2].isfinite().all()
    assert taken == BOTH * 2


def test_a_head_depends_on_no_other_and_on_no_number_of_threads(taken):
    sides, threads, found = sides_of(400, heads=6, key_heads=3), torch.get_num_threads(), []
    options = {"keys": 20, "block_size": 32, "group_size": 16}
    try:
        for number in (1, 2, 5, 40):
            torch.set_num_threads(number)
            found.append(gradients(sides, "auto", **options))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    alone = gradients([side[1:].detach().requires_grad_() for side in sides], **options)
    assert alone[0].shape == (1, 6, 400, 32)
    assert taken == BOTH * 5


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_the_gradients_that_are_needed(wanted, taken):
    sides, options = sides_of(), {"keys": 9, "block_size": 16}
    whole = gradients(sides, **options)
    plain = [side.detach() for side in sides]
    leaves = [plain[place].requires_grad_() for place in wanted]
    out = attention(plain, **options)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(out, leaves, gradient)
    assert all(torch.equal(one, whole[place]) for one, place in zip(found, wanted, strict=True))
    assert taken == BOTH * 2


def test_second_derivatives_and_batches_of_gradients(taken):
    sides = sides_of(tokens=64)
    keys = lln.choose_keys(*sides[:2], 9, block_size=16)

    def attend(given):
        return attention(given, "auto", keys=keys, block_size=16)

    check_further_gradients(attend, sides)
    found = []
    for dtype in (torch.float32, torch.float64):
        given = [side.detach().to(dtype).requires_grad_() for side in sides]
        given.append(torch.tensor(0.8, dtype=dtype, requires_grad=True))
        out = attention(given[:3], "auto", keys=keys, block_size=16, alpha=given[3])
        (first,) = torch.autograd.grad(out.square().sum(), given[3], create_graph=True)
        found.append(torch.autograd.grad(first, given))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)
    # The last one on the way from the output's square.
    assert taken.count("backward_keys") == 4


def test_little_is_kept_for_the_backward_pass(taken):
    sides = sides_of(tokens=4096)
    known, kept = {side.data_ptr() for side in sides}, []

    def keep(tensor):
        kept.append(0 if tensor.data_ptr() in known else tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(sides, keys=20)
    assert taken == ["forward_keys"]
    # The keys of 64 groups in each of six heads.
    assert sum(kept) == 6 * 64 * 20


@pytest.mark.parametrize("what", ["mask", "keys", "alpha", "offset"])
def test_what_changes_before_the_backward_pass_is_an_error(what, taken):
    options = {
        "mask": MASKS["some"].clone(),
        "keys": torch.zeros(2, 3, 11, 4, dtype=torch.int64),
        "alpha": torch.full((2, 3, 1, 1), 0.8),
        "offset": torch.full((2, 3, 1, 1), -1.0),
    }
    changed = options[what]
    options["key_mask"] = options.pop("mask")
    # Repeated indices are dropped into a tensor of their own.
    out = attention(sides := sides_of(150), block_size=16, **options)
    changed += True if what == "mask" else 1
    if what == "keys":
        assert torch.autograd.grad(out.sum(), sides)[0].isfinite().all()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out.sum(), sides)
    assert taken[0] == "forward_keys"


def test_packed_sequences(taken):
    sides = [side[0].transpose(0, 1).detach().requires_grad_() for side in sides_of(150)]
    options = {"keys": 9, "block_size": 16, "group_size": 4}
    found = []
    for impl, given in (("cpu", sides), ("reference", [side.double() for side in sides])):
        out = lln.lln_keys_attention_varlen(*given, BOUNDS, impl=impl, **GIVEN, **options)
        found.append(torch.autograd.grad(out.square().sum(), sides))
    for one, other in zip(*found, strict=True):
        assert largest_error(one, other) <= budget(one, other.double(), backward=True)
    assert sorted(taken) == sorted(BOTH * 3)
