"""The compiled passes: within the budgets of PyTorch's, and only for the calls that they know."""

import pytest
import torch
import torch.utils.flop_counter
from tests.cpu.conftest import NAMES
from tests.eager.test_further_gradients import NUMBERS
from tests.pairs import pairs

import lln
from lln.cpu import library
from lln.errors import MemoryShortageError
from lln.observers import add_observer, remove_observer
from lln.testing.tolerances import budget, largest_error

GIVEN = {"alpha": 0.7, "beta": 1.3}


def sides_of(tokens=96, keys=None, width=32, values=48, transposed=False, heads=3, key_heads=None):
    """Query, key and value of two samples."""
    sizes = ((tokens, width, heads), (keys or tokens, width, key_heads or heads))
    sizes = (*sizes, (keys or tokens, values, key_heads or heads))
    sides = []
    for length, channels, own in sizes:
        side = torch.randn(2, length, own, channels).transpose(1, 2)
        sides.append((side if transposed else side.contiguous()).requires_grad_())
    return sides


def attention(sides, block_size=0, **options):
    """LLN, or LLN + Diag with blocks of a size."""
    options = {name: one for name, one in (GIVEN | options).items() if one is not None}
    if block_size:
        return lln.lln_diag_attention(*sides, block_size=block_size, **options)
    return lln.lln_attention(*sides, **options)


def outcome(sides, **options):
    """Output and gradients."""
    out = attention(sides, **options)
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(out.shape, generator=generator).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, sides, gradient)


def check(sides, eager=(None,) * 4, **options):
    """Compare output and gradients with the float64 reference, and with what PyTorch errs."""
    found = outcome(sides, **options)
    wide = [side.detach().double().requires_grad_() for side in sides]
    expected = outcome(wide, impl="reference", **options)
    size = max(side.abs().max().item() for side in expected[1:])
    for place, (one, other, plain) in enumerate(zip(found, expected, eager, strict=True)):
        rest = {"backward": True, "magnitude": size} if place else {}
        assert one.isfinite().all()
        assert largest_error(one, other) <= budget(one, other, plain, **rest)


@pytest.mark.parametrize("block_size", [0, 16])
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("transposed", [False, True])
def test_output_and_gradients(block_size, numbers, transposed, taken):
    alpha, beta = NUMBERS[numbers]
    sides = sides_of(transposed=transposed)
    check(sides, block_size=block_size, alpha=alpha, beta=beta)
    assert taken == ["forward", "backward"]
    with torch.no_grad():
        out = attention(sides, block_size, alpha=alpha, beta=beta)
    assert torch.equal(out, attention(sides, block_size, alpha=alpha, beta=beta))


@pytest.mark.parametrize("tokens", [1, 3, 63, 65, 128, 300])
def test_lengths(tokens, taken):
    check(sides_of(tokens))
    assert taken


@pytest.mark.parametrize(
    ("width", "values"),
    [(16, 16), (16, 64), (64, 16), (80, 80), (128, 128), (1, 1), (20, 16), (16, 20), (72, 33)],
)
def test_widths(width, values, taken):
    check(sides_of(width=width, values=values))
    check(sides_of(width=width, values=values), block_size=48)
    assert taken == ["forward", "backward"] * 2


@pytest.mark.parametrize("block_size", [32, 48, 64, 80, 160, 1, 3, 24, 70])
def test_blocks(block_size, taken):
    check(sides_of(tokens=2 * block_size), block_size=block_size)
    assert taken


@pytest.mark.parametrize("tokens", [1, 15, 40, 64, 65, 143])
@pytest.mark.parametrize("block_size", [16, 64, 2**40])
def test_a_last_block_that_is_shorter(tokens, block_size, taken):
    check(sides_of(tokens), block_size=block_size, mix=0.3)
    assert taken == ["forward", "backward"]


@pytest.mark.parametrize(("mix", "scale"), [(0.0, 0.3), (1.0, None), (0.25, 0.1)])
def test_mix_and_scale(mix, scale, taken):
    check(sides_of(), block_size=32, mix=mix, scale=scale)
    assert taken


@pytest.mark.parametrize(("tokens", "keys"), [(7, 150), (150, 7), (1, 65)])
def test_other_lengths_of_keys(tokens, keys, taken):
    check(sides_of(tokens, keys))
    assert taken


@pytest.mark.parametrize("size", [30.0, 1e3])
def test_concentrated_weights(size, taken, by_torch):
    """Each slot is one key's and each query one slot's; peaks differ by far more than e^87."""
    query, key, value = (side.detach() for side in sides_of())
    sides = [(size * query).requires_grad_(), (size * key).requires_grad_(), value.requires_grad_()]
    plain = by_torch(lambda: outcome(sides))
    assert not taken
    check(sides, eager=plain)
    assert taken


@pytest.mark.parametrize("size", [1e4, 1e15])
def test_large_numbers_stay_finite(size, taken):
    query, key, value = (side.detach() for side in sides_of())
    sides = [(size * query).requires_grad_(), (size * key).requires_grad_(), value.requires_grad_()]
    assert all(side.isfinite().all() for side in outcome(sides, block_size=16))
    assert taken


@pairs(
    sizes=[(1.0, 1e9), (1e9, 1e9), (1.0, 1e18), (1e5, 1e5)],
    numbers=["given", "matched"],
    width=[16, 64],
    block_size=[0, 16],
)
def test_peaks_that_are_rounded(sizes, numbers, width, block_size, taken, by_torch):
    """βk is rounded by 64 at 10⁹; the largest key of a slot must still have weight 1."""
    if numbers == "matched":
        sizes = sizes[0], min(sizes[1], 1e5)
    query, key, value = (side.detach() for side in sides_of(width=width))
    sides = [sizes[0] * query, sizes[1] * key, value]
    # Scores of blocks would be as large: their softmax is not what is tested.
    options = {"block_size": block_size, "scale": 1e-20} if block_size else {}
    options |= MATCHED if numbers == "matched" else {}
    sides = [side.requires_grad_() for side in sides]
    plain = by_torch(lambda: outcome(sides, **options))
    assert not taken
    check(sides, eager=plain, **options)
    assert taken == ["forward", "backward"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_not_a_number_shows_in_its_head_only(bad, place, taken):
    sides = [side.detach() for side in sides_of()]
    sides[place][1, 2, 5, 3] = bad
    out = attention(sides, 16)
    is_bad = ~out.isfinite().flatten(2).all(-1)
    expected = torch.zeros(2, 3, dtype=torch.bool)
    expected[1, 2] = True
    assert torch.equal(is_bad, expected)
    assert taken == ["forward"]


MASKS = {
    "right": torch.arange(150) < torch.tensor([[100], [33]]),
    "left": torch.arange(150) >= torch.tensor([[100], [33]]),
    "one key": torch.arange(150) == torch.tensor([[0], [149]]),
    "some": torch.rand(2, 150, generator=torch.Generator().manual_seed(3)) > 0.5,
    "columns first": (torch.rand(150, 2, generator=torch.Generator().manual_seed(4)) > 0.5).mT,
}


@pairs(mask=MASKS, block_size=[0, 16, 64, 160, 2**40], transposed=[False, True])
def test_masks(mask, block_size, transposed, taken):
    sides = sides_of(150, transposed=transposed)
    check(sides, block_size=block_size, key_mask=MASKS[mask], mix=0.3 if block_size else None)
    assert taken == ["forward", "backward"]


def test_a_mask_for_other_lengths_of_keys(taken):
    check(sides_of(40, 150), key_mask=MASKS["some"])
    assert taken == ["forward", "backward"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("block_size", [0, 32])
def test_what_is_masked_is_not_seen(bad, block_size, taken):
    mask = MASKS["some"]
    clean = [side.detach() for side in sides_of(150)]
    sides = [side.clone() for side in clean]
    for side in sides[1:]:
        side[~mask[:, None].expand(side.shape[:3])] = bad
    options = {"block_size": block_size, "key_mask": mask}
    found = outcome([side.requires_grad_() for side in sides], **options)
    expected = outcome([side.requires_grad_() for side in clean], **options)
    assert taken == ["forward", "backward"] * 2
    assert all(map(torch.equal, found, expected))
    assert all((side * ~mask[:, None, :, None] == 0).all() for side in found[2:])


def test_a_mask_that_changes_before_the_backward_pass_is_an_error(taken):
    sides, mask = sides_of(150), MASKS["some"].clone()
    out = attention(sides, key_mask=mask)
    mask[0, 0] = ~mask[0, 0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), sides)
    assert taken == ["forward"]


@pytest.mark.parametrize("impl", ["eager", "cpu"])
@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((), {}),
        ((1, 3, 1, 1), {"block_size": 16}),
        ((2, 3, 1, 1), {}),
        ((2, 3, 1, 1), {"block_size": 16, "dtype": torch.float64}),
        ((1, 3, 1, 1), {"is_causal": True}),
        ((2, 3, 1, 1), {"is_causal": True}),
    ],
)
def test_a_temperature_that_changes_before_the_backward_pass_is_an_error(
    impl, name, shape, options, taken
):
    options = dict(options)
    number = torch.full(shape, 0.7, dtype=options.pop("dtype", torch.float32))
    sides = sides_of()
    out = attention(sides, impl=impl, **options | {name: number})
    (before,) = torch.autograd.grad(out.sum(), sides[1], retain_graph=True)
    number += 1
    if impl == "eager" and number.dtype == torch.float64:
        # PyTorch keeps a copy of its own, rounded to the type of the queries.
        assert torch.equal(torch.autograd.grad(out.sum(), sides)[1], before)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out.sum(), sides)
    assert before.isfinite().all()
    assert bool(taken) == (impl == "cpu")


@pytest.mark.parametrize("block_size", [0, 16])
@pytest.mark.parametrize("options", [{}, {"alpha": None, "beta": None}])
def test_a_sample_without_keys_is_zero(block_size, options, taken):
    mask = MASKS["some"].clone()
    mask[1] = False
    sides = sides_of(150)
    check(sides, block_size=block_size, key_mask=mask, **options)
    found = outcome(sides, block_size=block_size, key_mask=mask, **options)
    assert not any(side[1].any() for side in found)
    alpha, beta = lln.match_moments(*sides[:2], key_mask=mask)
    assert alpha[1].flatten().tolist() == beta[1].flatten().tolist() == [1.0] * 3
    assert taken == ["forward", "backward"] * 2 + ["match"]


@pairs(
    key_heads=[1, 2, 3],
    block_size=[0, 16],
    options=[
        {},
        {"alpha": None, "beta": None},
        {"is_causal": True},
        {"beta": torch.linspace(0.5, 1.5, 12).view(2, 6, 1, 1)},
        {"key_mask": MASKS["left"]},
    ],
)
def test_grouped_queries(key_heads, block_size, options, taken):
    sides = sides_of(150, width=20, heads=6, key_heads=key_heads)
    check(sides, block_size=block_size, enable_gqa=True, **options)
    assert set(taken) <= set(NAMES)
    assert taken


def test_a_temperature_for_every_key_head(taken):
    beta = torch.tensor([0.5, 1.5]).view(1, 2, 1, 1)
    sides = sides_of(heads=6, key_heads=2)
    check(sides, beta=beta, enable_gqa=True)
    check(sides, beta=beta, enable_gqa=True, is_causal=True)
    check(sides, beta=beta, enable_gqa=True, block_size=24)
    assert len(taken) == 6


@pairs(
    block_size=[1, 16, 20, 64, 2**40],
    tokens=[1, 40, 143],
    is_causal=[False, True],
    mask=[None, "left", "some"],
)
def test_blocks_alone(block_size, tokens, is_causal, mask, taken):
    sides = sides_of(tokens, width=20, values=36, heads=4, key_heads=2)
    options = {"block_size": block_size, "enable_gqa": True, "is_causal": is_causal}
    if mask is not None:
        options["key_mask"] = MASKS[mask][:, 150 - tokens :]
    wide = [side.detach().double().requires_grad_() for side in sides]
    found, expected = [], []
    for given, impl, results in ((sides, "auto", found), (wide, "reference", expected)):
        out = lln.block_diagonal_attention(*given, impl=impl, **options)
        results += [out, *torch.autograd.grad(out.cos().sum(), given)]
    size = max(side.abs().max().item() for side in expected[1:])
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        rest = {"backward": True, "magnitude": size} if place else {}
        assert largest_error(one, other) <= budget(one, other, None, **rest)
    assert taken == ["forward", "backward"]


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_what_is_not_a_number_shows_in_its_block_only(bad, taken):
    sides = [side.detach() for side in sides_of()]
    sides[1][1, 2, 37, 3] = bad
    out = lln.block_diagonal_attention(*sides, block_size=16)
    rows = ~out.isfinite().all(-1)
    assert rows[1, 2].nonzero().flatten().tolist() == list(range(32, 48))
    assert rows.sum() == 16
    assert taken == ["forward"]


@pytest.mark.parametrize("shape", [(), (3, 1, 1), (1, 3, 96, 1), (48,)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_mix_that_learns(shape, is_causal, taken):
    mix = torch.full(shape, 0.3, requires_grad=True)
    options = {"block_size": 24, "is_causal": is_causal, "mix": mix}
    sides = sides_of()
    check(sides, **options)
    gradients = []
    for given, impl in ((sides, "auto"), ([side.double() for side in sides], "reference")):
        out = attention(given, impl=impl, **options)
        gradients += torch.autograd.grad(out.square().sum(), mix)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-4)
    assert taken


@pairs(
    block_size=[0, 24],
    mask=[None, "some", "left"],
    is_causal=[False, True],
    shape=[(), (3, 1, 1), (2, 3, 1, 1)],
)
def test_temperatures_that_learn(block_size, mask, is_causal, shape, taken):
    options = {"block_size": block_size, "is_causal": is_causal}
    options["key_mask"] = None if mask is None else MASKS[mask]
    sides = sides_of(150)
    if mask is not None:
        sides[1].data[~MASKS[mask][:, None].expand(sides[1].shape[:3])] = float("nan")
    alpha, beta = (torch.full(shape, one, requires_grad=True) for one in (0.7, 1.3))
    check(sides, alpha=alpha, beta=beta, **options)
    found = []
    for given, impl in ((sides, "auto"), ([side.double() for side in sides], "reference")):
        out = attention(given, impl=impl, alpha=alpha, beta=beta, **options)
        found.append(torch.autograd.grad(out.square().sum(), (alpha, beta)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert taken


def test_a_head_depends_on_no_other_and_on_no_number_of_threads(taken):
    sides = sides_of(tokens=192)
    threads = torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(outcome(sides, block_size=64))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    alone = attention([side[1:, 2:] for side in sides], 64)
    assert torch.equal(alone, found[0][0][1:, 2:])
    assert len(taken) == 7


def test_an_expanded_gradient_and_a_gradient_with_columns_first(taken):
    sides = sides_of()
    out = attention(sides, 16)
    ones = torch.ones(()).expand_as(out)
    columns = torch.randn(*out.shape[:2], *out.shape[:1:-1]).mT
    for gradient in (ones, columns):
        found = torch.autograd.grad(out, sides, gradient, retain_graph=True)
        expected = torch.autograd.grad(out, sides, gradient.clone().contiguous(), retain_graph=True)
        assert all(map(torch.equal, found, expected))
    assert taken.count("backward") == 4


def test_a_lazy_sign_is_seen(taken):
    sides = [side.detach() for side in sides_of()]
    negative = torch._neg_view(sides[1])
    assert negative.is_neg()
    found = attention((sides[0], negative, sides[2]))
    assert torch.equal(found, attention((sides[0], -sides[1], sides[2])))
    assert taken == ["forward"] * 2


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_the_gradients_that_are_needed(wanted, taken):
    whole = outcome(sides := sides_of(), block_size=16)
    plain = [side.detach() for side in sides]
    leaves = [plain[place].requires_grad_() for place in wanted]
    out = attention(plain, 16)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(out, leaves, gradient)
    assert all(torch.equal(one, whole[1 + place]) for one, place in zip(found, wanted, strict=True))
    assert taken == ["forward", "backward"] * 2


def check_further_gradients(attend, sides):
    """Compare batches of gradients with single ones, and second derivatives with float64's."""
    out = attend(sides)
    several = torch.randn(3, *out.shape)
    at_once = torch.autograd.grad(out, sides, several, retain_graph=True, is_grads_batched=True)
    for place, gradient in enumerate(several):
        alone = torch.autograd.grad(out, sides, gradient, retain_graph=True)
        for one, other in zip(at_once, alone, strict=True):
            torch.testing.assert_close(one[place], other, rtol=0, atol=1e-5)
    (first,) = torch.autograd.grad(out.sum(), sides[0], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), sides[0])
    wide = [side.detach().double().requires_grad_() for side in sides]
    (first,) = torch.autograd.grad(attend(wide).sum(), wide[0], create_graph=True)
    (expected,) = torch.autograd.grad(first.square().sum(), wide[0])
    atol = 5e-6 * expected.abs().max().item()
    torch.testing.assert_close(second.double(), expected, rtol=0, atol=atol)


def test_second_derivatives_and_batches_of_gradients(taken):
    check_further_gradients(lambda sides: attention(sides, 16), sides_of(tokens=32))
    assert taken.count("backward") == 3


def test_little_is_kept_for_the_backward_pass(taken):
    sides = sides_of(tokens=4096)
    known, kept = {side.data_ptr() for side in sides}, []

    def keep(tensor):
        kept.append(0 if tensor.data_ptr() in known else tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(sides, 64)
    assert taken == ["forward"]
    assert sum(kept) == 6 * 32 * (48 + 2)


@pytest.mark.parametrize("criterion", ["variance", "entropy"])
@pytest.mark.parametrize("mean", [0.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matching(criterion, mean, dtype, taken):
    query, key, _ = sides_of(tokens=700, keys=333, transposed=True)
    query, key = query.to(dtype), (key + mean).to(dtype)
    found = lln.match_moments(query, key, criterion=criterion)
    expected = lln.match_moments(query.double(), key.double(), criterion=criterion)
    assert taken == ["match"]
    for one, other in zip(found, expected, strict=True):
        assert one.shape == (2, 3, 1, 1)
        # Of keys around 300 float32 holds the mean to 1e-5 of their spread.
        torch.testing.assert_close(one.double(), other, rtol=1e-4 if mean else 2e-6, atol=0)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("tokens", [150, 40])
def test_matching_with_a_mask(mask, tokens, taken):
    """Of as many queries as keys the masked ones do not count, of others all do."""
    query, key, _ = (side.detach() for side in sides_of(tokens, 150))
    for side in (query, key):
        if side.shape[2] == 150:
            side[~MASKS[mask][:, None].expand(side.shape[:3])] = float("nan")
    found = lln.match_moments(query, key, key_mask=MASKS[mask])
    expected = lln.match_moments(query.double(), key.double(), key_mask=MASKS[mask])
    assert taken == ["match"]
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=0)


def test_matching_with_a_mask_knows_how_many_keys_a_sample_has(taken):
    """The curve of entropies depends on it."""
    query, key, _ = (side.detach() for side in sides_of(2000))
    mask = torch.arange(2000) < torch.tensor([[2000], [300]])
    options = {"criterion": "entropy", "key_mask": mask}
    found = lln.match_moments(query, key, **options)
    expected = lln.match_moments(query.double(), key.double(), **options)
    assert taken == ["match"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [1e-3, 1e3, 1e18, 1e37])
def test_matching_outside_the_fitted_range(size, taken):
    query, key, _ = sides_of()
    found = lln.match_moments(size * query, size * key)
    expected = lln.match_moments((size * query).double(), (size * key).double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=0)
    assert taken == ["match"]


def test_matching_of_constant_heads_and_of_nan(taken):
    query, key, _ = (side.detach() for side in sides_of())
    query[0, 0], key[0, 1], key[1, 1] = 0.0, 3.0, float("nan")
    found = lln.match_moments(query, key)
    expected = lln.match_moments(query.double(), key.double())
    assert taken == ["match"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=0, equal_nan=True)
        assert one[0, :2].flatten().tolist() == [1.0, 1.0]
        assert one[1, 1].isnan()


MATCHED = {"alpha": None, "beta": None}


@pytest.mark.parametrize("block_size", [0, 16])
@pytest.mark.parametrize("matching", ["variance", "entropy"])
@pytest.mark.parametrize("sizes", [{}, {"transposed": True}, {"tokens": 70, "keys": 70}])
def test_a_matched_call(block_size, matching, sizes, taken):
    """One pass finds the temperatures and uses them: the bits are those of two."""
    sides = sides_of(**sizes)
    alpha, beta = lln.match_moments(*sides[:2], criterion=matching)
    expected = outcome(sides, block_size=block_size, alpha=alpha, beta=beta)
    taken.clear()
    found = outcome(sides, block_size=block_size, matching=matching, **MATCHED)
    assert taken == ["forward", "backward"]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    check(sides, block_size=block_size, matching=matching, **MATCHED)


def test_a_matched_call_of_one_head_and_of_constant_ones(taken):
    single = [side[:1, :1].detach() for side in sides_of()]
    flat = [side.detach() for side in sides_of()]
    flat[0][0, 1] = 2.0e-7
    flat[1][1, 2] = 5.0
    for sides in (single, flat):
        alpha, beta = lln.match_moments(*sides[:2])
        taken.clear()
        found = lln.lln_attention(*sides)
        assert taken == ["forward"]
        assert torch.equal(found, lln.lln_attention(*sides, alpha=alpha, beta=beta))
    assert alpha[0, 1] == beta[1, 2] == 1.0


def test_further_gradients_of_a_matched_call(taken):
    check_further_gradients(lambda sides: attention(sides, 16, **MATCHED), sides_of(tokens=32))
    check_further_gradients(lambda sides: attention(sides, **MATCHED), sides_of(tokens=32))


def test_little_is_kept_of_a_matched_call(taken):
    sides = sides_of(tokens=4096)
    known, kept = {side.data_ptr() for side in sides}, []

    def keep(tensor):
        kept.extend([] if tensor.data_ptr() in known else [tensor.numel()])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(sides, 64, **MATCHED)
    # The temperatures of six heads, too.
    assert kept == [6, 6, 6 * 32 * (48 + 2)]


def test_who_looks_on_sees_matched_temperatures(taken):
    sides = [side.detach() for side in sides_of()]
    seen = []
    add_observer(seen.append)
    try:
        watched = lln.lln_attention(*sides)
    finally:
        remove_observer(seen.append)
    assert taken == ["match", "forward"]
    assert torch.equal(seen[0].alpha, lln.match_moments(*sides[:2])[0])
    assert torch.equal(watched, lln.lln_attention(*sides))


@pytest.mark.parametrize(
    "options",
    [
        {"key_mask": torch.arange(96) < torch.tensor([[96], [40]])},
        {"dropout_p": 0.3},
        {"matching": "paper"},
    ],
)
def test_matched_calls_take_one_pass(options, taken):
    sides = [side.detach() for side in sides_of()]
    assert lln.lln_attention(*sides, **options).isfinite().all()
    assert taken == ["forward"]


def test_other_types_and_ways_are_not_compiled(taken):
    sides = sides_of()
    attention([side.double() for side in sides])
    attention(sides, impl="reference")
    lln.match_moments(*sides[:2], criterion="paper")
    assert not taken


def test_whoever_traces_sees_torchs_operations(taken):
    sides = [side.detach() for side in sides_of()]
    found = torch.func.vmap(lambda *given: lln.lln_attention(*given))(
        *(side.unsqueeze(1) for side in sides)
    )
    assert found.isfinite().all()
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        attention(sides, 16)
    assert counter.get_total_flops() > 0
    assert not taken


def test_few_heads_leave_threads_without_work(taken, monkeypatch):
    sides = [side[:1, :1] for side in sides_of()]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    attention(sides)
    assert not taken
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    attention(sides)
    assert taken == ["forward"]


def test_no_memory_is_an_error(taken, without_memory, monkeypatch):
    """With a library whose requests for memory all fail."""
    sides, causal = sides_of(), {"is_causal": True}
    graphs = attention(sides, 16), attention(sides, **causal), lln.lln_keys_attention(*sides)
    monkeypatch.setattr(library, "_found", without_memory)
    calls = [lambda graph=graph: graph.sum().backward() for graph in graphs]
    calls += [lambda: attention(sides, 16), lambda: attention(sides, **causal)]
    calls += [lambda: attention(sides, **MATCHED), lambda: lln.match_moments(*sides[:2])]
    calls += [lambda: attention(sides, key_mask=torch.arange(96).expand(2, -1) < 90)]
    calls += [lambda: lln.block_diagonal_attention(*sides, block_size=24)]
    alone = [side.detach() for side in sides]
    calls += [lambda: lln.lln_keys_attention(*alone), lambda: lln.choose_keys(*alone[:2], 4)]
    calls += [lambda: lln.page_attention(*alone)]
    for call in calls:
        with pytest.raises(MemoryShortageError, match="compiled passes got no memory"):
            call()
    assert set(taken) == set(NAMES)
    assert issubclass(MemoryShortageError, MemoryError)
