"""Causal LLN by compiled passes: within the budgets; PyTorch's walk takes what is unusual."""

import pytest
import torch
from tests.cpu.test_compiled_passes import (
    MASKS,
    check,
    check_further_gradients,
    outcome,
    sides_of,
)
from tests.eager.test_further_gradients import NUMBERS
from tests.pairs import pairs

import lln
from lln.cpu import compiled_passes
from lln.cpu.compiled_passes import PassCall

BOTH = ["forward_causal", "backward_causal"]
CAUSAL = {"is_causal": True, "alpha": 0.7, "beta": 1.3}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("transposed", [False, True])
def test_output_and_gradients(numbers, transposed, taken):
    alpha, beta = NUMBERS[numbers]
    sides = sides_of(150, transposed=transposed)
    check(sides, is_causal=True, alpha=alpha, beta=beta)
    assert taken == BOTH
    with torch.no_grad():
        out = lln.lln_attention(*sides, is_causal=True, alpha=alpha, beta=beta)
    assert torch.equal(out, lln.lln_attention(*sides, is_causal=True, alpha=alpha, beta=beta))


@pytest.mark.parametrize("tokens", [2, 63, 64, 65, 128, 300])
def test_lengths(tokens, taken):
    check(sides_of(tokens), is_causal=True)
    assert taken == BOTH


@pytest.mark.parametrize(
    ("width", "values"),
    [(16, 16), (16, 64), (64, 16), (80, 80), (128, 128), (1, 1), (20, 16), (16, 20), (72, 33)],
)
def test_widths(width, values, taken):
    check(sides_of(width=width, values=values), is_causal=True)
    assert taken == BOTH


@pytest.mark.parametrize("block_size", [16, 24, 64, 2**40])
def test_with_blocks(block_size, taken):
    check(sides_of(150), is_causal=True, block_size=block_size)
    assert taken == ["forward_causal", "forward", "backward", "backward_causal"]


@pairs(mask=MASKS, block_size=[0, 16, 24], transposed=[False, True])
def test_masks(mask, block_size, transposed, taken):
    sides = sides_of(150, transposed=transposed)
    check(sides, is_causal=True, block_size=block_size, key_mask=MASKS[mask])
    assert {"forward_causal", "backward_causal"} <= set(taken)


def test_a_sample_without_keys_is_zero(taken):
    mask = MASKS["left"].clone()
    mask[1] = False
    check(sides := sides_of(150), is_causal=True, key_mask=mask)
    assert not any(side[1].any() for side in outcome(sides, is_causal=True, key_mask=mask))
    assert taken == BOTH * 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_what_is_masked_is_not_seen(bad, taken):
    mask = MASKS["some"]
    clean = [side.detach() for side in sides_of(150)]
    sides = [side.clone() for side in clean]
    for side in sides[1:]:
        side[~mask[:, None].expand(side.shape[:3])] = bad
    options = {"is_causal": True, "key_mask": mask}
    found = outcome([side.requires_grad_() for side in sides], **options)
    expected = outcome([side.requires_grad_() for side in clean], **options)
    assert taken == BOTH * 2
    assert all(map(torch.equal, found, expected))
    assert all((side * ~mask[:, None, :, None] == 0).all() for side in found[2:])


@pytest.mark.parametrize("mask", ["left", "some"])
def test_rows_of_masked_calls_that_lose_their_digits(mask, taken, by_torch):
    sides = sides_of(150, heads=6)
    with torch.no_grad():
        sides[1][0, 1, 140] += 1e3
    sides[1].data[1, 2, 149] += 1e3
    options = {"is_causal": True, "key_mask": MASKS[mask] | (torch.arange(150) >= 135)}
    plain = by_torch(lambda: outcome(sides, **options))
    assert not taken
    check(sides, eager=plain, **options)
    assert taken == ["forward_causal", "forward_causal", "backward_causal"]


@pytest.mark.parametrize("step", [-150.0, 20.0, 150.0])
def test_peaks_that_move_between_tiles(step, taken, by_torch):
    """Steps of e^150: the state of earlier tiles vanishes, or that of later ones does."""
    query, key, value = (side.detach() for side in sides_of(200))
    key += step * torch.arange(200).div(64, rounding_mode="floor").unsqueeze(-1)
    sides = [side.requires_grad_() for side in (query, key, value)]
    plain = by_torch(lambda: outcome(sides, is_causal=True))
    assert not taken
    check(sides, eager=plain, is_causal=True)
    assert taken == BOTH


@pytest.mark.parametrize("size", [100.0, 1e3, 1e15])
def test_rows_that_lose_their_digits_are_computed_by_torch(size, taken, by_torch):
    sides = sides_of(100)
    with torch.no_grad():
        sides[1][:, :, 40] += size
    found = outcome(sides, is_causal=True)
    assert taken == ["forward_causal"]
    expected = by_torch(lambda: outcome(sides, is_causal=True))
    assert all(map(torch.equal, found, expected))
    assert all(side.isfinite().all() for side in found)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_not_a_number_goes_the_way_of_torch(bad, place, taken, by_torch):
    sides = [side.detach() for side in sides_of(150)]
    whole = lln.lln_attention(*sides, **CAUSAL)
    sides[place][1, 2, 70, 3] = bad
    found = lln.lln_attention(*sides, **CAUSAL)
    if place < 2:
        # Infinity as much as NaN: of e^−∞ = 0 nothing would be seen.
        sides[place][1, 2, 70, 3] = float("nan")
    expected = by_torch(lambda: lln.lln_attention(*sides, **CAUSAL))
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert not found[1, 2, 70].isfinite().any() or place == 2
    # Earlier chunks see nothing of it.
    torch.testing.assert_close(found[:, :, :64], whole[:, :, :64], rtol=0, atol=2e-6)
    # A value spoils no weights; of the rest the other heads stay compiled.
    assert taken == ["forward_causal"] * (2 if place == 2 else 3)


@pytest.mark.parametrize("place", [0, 1])
def test_nan_is_found_in_any_row(place, taken):
    sides = [side.detach() for side in sides_of(150)]
    assert (compiled_passes.forward_causal(PassCall(*sides, 0.7, 1.3))[-1] >= 1e-25).all()
    sides[place][0, 1, 3, 5] = float("nan")
    least = compiled_passes.forward_causal(PassCall(*sides, 0.7, 1.3))[-1]
    assert least.isnan().tolist() == [False, True, *[False] * 4]
    assert len(taken) == 2


def test_a_head_depends_on_no_other_and_on_no_number_of_threads(taken):
    sides = sides_of(192)
    threads = torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(outcome(sides, is_causal=True))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    alone = lln.lln_attention(*(side[1:, 2:] for side in sides), **CAUSAL)
    assert torch.equal(alone, found[0][0][1:, 2:])
    assert taken == [*BOTH * 3, "forward_causal"]


@pytest.mark.parametrize("bad", [1e3, float("nan"), -float("inf")])
@pytest.mark.parametrize("numbers", ["numbers", "samples and heads"])
def test_what_one_head_holds_changes_no_bit_of_another(bad, numbers, taken):
    alpha, beta = NUMBERS[numbers]
    options = {"is_causal": True, "alpha": alpha, "beta": beta}
    clean, sides = outcome(first := sides_of(150), **options), []
    for place, side in enumerate(first):
        sides.append(side.detach().clone())
        if place == 1:
            sides[1][0, 1, 40] += bad
        sides[place].requires_grad_()
    found = outcome(sides, **options)
    assert taken == [*BOTH, "forward_causal", *BOTH]
    held = torch.ones(2, 3, dtype=torch.bool)
    held[0, 1] = False
    for one, other in zip(found, clean, strict=True):
        assert torch.equal(one[held], other[held])
        assert not torch.equal(one[0, 1], other[0, 1])


def test_what_one_sample_holds_changes_no_bit_of_another_that_lost_digits(taken):
    sides = [side.detach() for side in sides_of(150)]
    sides[1][1, 1, 40] += 1e3
    expected = lln.lln_attention(*sides, **CAUSAL)
    sides[1][0, 2, 40] = float("nan")
    assert torch.equal(lln.lln_attention(*sides, **CAUSAL)[1], expected[1])
    assert taken == ["forward_causal"] * 4


@pytest.mark.parametrize("size", [1e9, 1e18])
def test_peaks_that_are_rounded(size, taken, by_torch):
    """βk is rounded by 64 at 10⁹. In every slot the first key is the largest."""
    query, key, value = (side.detach() for side in sides_of(130))
    key[:, :, 0] = 3 + key[:, :, 0].abs()
    sides = [side.requires_grad_() for side in (query, size * key.clamp(max=3.5), value)]
    plain = by_torch(lambda: outcome(sides, **CAUSAL))
    assert not taken
    check(sides, eager=plain, **CAUSAL)
    assert taken == BOTH


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_the_gradients_that_are_needed(wanted, taken):
    whole = outcome(sides := sides_of(), is_causal=True)
    plain = [side.detach() for side in sides]
    leaves = [plain[place].requires_grad_() for place in wanted]
    out = lln.lln_attention(*plain, **CAUSAL)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(out, leaves, gradient)
    assert all(torch.equal(one, whole[1 + place]) for one, place in zip(found, wanted, strict=True))
    assert taken == BOTH * 2


def test_second_derivatives_and_batches_of_gradients(taken):
    check_further_gradients(lambda sides: lln.lln_attention(*sides, **CAUSAL), sides_of(80))
    assert taken == ["forward_causal", *["backward_causal"] * 3]


def test_little_is_kept_for_the_backward_pass(taken):
    sides = sides_of(4096)
    known, kept = {side.data_ptr() for side in sides}, []

    def keep(tensor):
        kept.append(0 if tensor.data_ptr() in known else tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        lln.lln_attention(*sides, **CAUSAL)
    assert taken == ["forward_causal"]
    # The output, and two numbers for every row.
    assert sum(kept) == 6 * 4096 * (48 + 2)


def test_other_types_are_computed_by_torch(taken):
    lln.lln_attention(*(side.double() for side in sides_of()), **CAUSAL)
    assert not taken
