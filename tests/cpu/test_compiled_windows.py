"""Sliding windows by the compiled passes, against the float64 reference."""

import time

import pytest
import torch
from tests.cpu.test_compiled_passes import MASKS, sides_of

import lln
from lln.testing.tolerances import budget, largest_error

BOUNDS = torch.tensor([0, 0, 65, 66, 66, 150])


def outcome(sides, **options):
    """Output and gradients."""
    out = lln.window_attention(*sides, enable_gqa=True, **options)
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(out.shape, generator=generator).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, sides, gradient)


def check(sides, **options):
    found = outcome(sides, **options)
    wide = [side.detach().double().requires_grad_() for side in sides]
    expected = outcome(wide, impl="reference", **options)
    size = max(side.abs().max().item() for side in expected[1:])
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        rest = {"backward": True, "magnitude": size} if place else {}
        assert one.isfinite().all()
        assert largest_error(one, other) <= budget(one, other, None, **rest)


@pytest.mark.parametrize("window", [0, 1, 16, 63, 64, 65, 150, 2**40])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_and_windows(tokens, window, is_causal, taken):
    check(sides_of(tokens), window=window, is_causal=is_causal)
    assert taken == ["forward", "backward"]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("window", [0, 7, 80])
@pytest.mark.parametrize("is_causal", [False, True])
def test_masks(mask, window, is_causal, taken):
    check(sides_of(150), window=window, key_mask=MASKS[mask], is_causal=is_causal)
    assert taken == ["forward", "backward"]


@pytest.mark.parametrize(
    ("width", "values"), [(16, 16), (64, 16), (80, 80), (128, 128), (1, 1), (20, 36), (256, 256)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_widths(width, values, transposed, taken):
    check(sides_of(width=width, values=values, transposed=transposed), window=20)
    assert taken == ["forward", "backward"]


@pytest.mark.parametrize("key_heads", [1, 2, 3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_queries_and_scale(key_heads, is_causal, taken):
    sides = sides_of(150, heads=6, key_heads=key_heads)
    check(sides, window=11, is_causal=is_causal, scale=0.3, key_mask=MASKS["left"])
    assert taken == ["forward", "backward"]


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences(is_causal, taken):
    sides = [side[0].transpose(0, 1) for side in torch.randn(3, 1, 4, 150, 32)]
    options = {"window": 9, "is_causal": is_causal}
    found = lln.window_attention_varlen(*sides, BOUNDS, **options)
    wide = [side.double() for side in sides]
    expected = lln.window_attention_varlen(*wide, BOUNDS, impl="reference", **options)
    assert largest_error(found, expected) <= budget(found, expected, None)
    assert set(taken) == {"forward"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_summed_in_float32(dtype, taken):
    sides = [side.detach().to(dtype).requires_grad_() for side in sides_of(150)]
    check(sides, window=20, key_mask=MASKS["some"])
    assert taken


def test_a_sample_without_keys_is_zero(taken):
    mask = MASKS["some"].clone()
    mask[1] = False
    found = outcome(sides_of(150), window=8, key_mask=mask)
    assert not any(side[1].any() for side in found)
    assert taken == ["forward", "backward"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_what_is_masked_is_not_seen(bad, taken):
    mask = MASKS["some"]
    clean = [side.detach() for side in sides_of(150)]
    sides = [side.clone() for side in clean]
    for side in sides[1:]:
        side[~mask[:, None].expand(side.shape[:3])] = bad
    found = outcome([side.requires_grad_() for side in sides], window=7, key_mask=mask)
    expected = outcome([side.requires_grad_() for side in clean], window=7, key_mask=mask)
    assert all(map(torch.equal, found, expected))
    assert all((side * ~mask[:, None, :, None] == 0).all() for side in found[2:])
    assert taken == ["forward", "backward"] * 2


def test_what_is_not_a_number_shows_where_it_is_seen_and_not_far_away(taken):
    sides = [side.detach() for side in sides_of(400)]
    sides[1][1, 2, 200, 3] = float("nan")
    out = lln.window_attention(*sides, window=5)
    rows = ~out.isfinite().all(-1)
    assert rows[1, 2, 195:206].all()
    assert not rows[1, 2, :64].any()
    assert not rows[1, 2, 320:].any()
    assert rows[1, 2].sum() == rows.sum()
    assert taken == ["forward"]


def test_the_number_of_threads_changes_nothing(taken):
    sides, threads, found = sides_of(192), torch.get_num_threads(), []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(outcome(sides, window=30))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    assert taken == ["forward", "backward"] * 3


def test_hidden_keys_take_no_longer_than_others(taken):
    """They weigh less than the normal range holds, and processors take long over such numbers."""
    query, key, value = torch.randn(3, 1, 4, 512, 64).unbind()

    def seconds(is_causal):
        begin = time.process_time()
        options = {"block_size": 64, "is_causal": is_causal, "impl": "cpu"}
        lln.block_diagonal_attention(query, key, value, **options)
        return time.process_time() - begin

    times = [(seconds(True), seconds(False)) for _ in range(9)]
    assert min(hidden for hidden, _ in times[2:]) < 5 * min(seen for _, seen in times[2:])


def test_the_smallest_numbers_stay_for_others(taken):
    smallest = torch.full((64,), 1e-40)
    lln.window_attention(*sides_of(70), enable_gqa=True, window=9, impl="cpu")
    assert bool((smallest * 0.5 > 0).all())
