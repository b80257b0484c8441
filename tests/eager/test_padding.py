"""Packed sequences as padded samples: which are together, and the way of every token."""

from itertools import accumulate

import pytest
import torch

from lln.eager.padding import group_sequences, pad_sequences

LENGTHS = {
    "one": [7],
    "equal": [6, 6, 6],
    "similar": [5, 8, 6],
    "empties": [0, 5, 0, 8, 0],
    "classes": [2, 40, 1, 0, 9, 3, 37],
    "reversed": [60, 1, 1, 1],
}


def padded(lengths, block_size=4, most=100):
    bounds = [0, *accumulate(lengths)]
    return pad_sequences(bounds, block_size, most, torch.device("cpu"))


def blocks(length, block_size=4):
    return -(-length // block_size)


@pytest.mark.parametrize("name", LENGTHS)
def test_every_token_goes_to_its_sample_and_back(name):
    lengths = LENGTHS[name]
    packed = torch.arange(1.0, sum(lengths) + 1).view(-1, 1, 1).expand(-1, 2, 3)
    padding = padded(lengths)
    places = padding.pad(packed)
    starts = [0, *accumulate(lengths)]
    for group, part in zip(padding.groups, places, strict=True):
        assert part.shape == (len(group.sequences), 2, group.longest, 3)
        for sequence, sample in zip(group.sequences, part, strict=True):
            own = packed[starts[sequence] : starts[sequence + 1]].transpose(0, 1)
            assert torch.equal(sample[:, : own.shape[1]], own)
            assert not sample[:, own.shape[1] :].any()
    assert torch.equal(padding.unpad(places), packed)
    assert sorted(s for group in padding.groups for s in group.sequences) == [
        sequence for sequence, length in enumerate(lengths) if length
    ]


@pytest.mark.parametrize("name", LENGTHS)
def test_masks_say_where_the_tokens_are(name):
    for group in padded(LENGTHS[name]).groups:
        if group.mask is None:
            assert set(group.lengths) == {group.longest}
        else:
            assert group.mask.sum(1).tolist() == group.lengths
            assert not (group.mask[:, 1:] & ~group.mask[:, :-1]).any()


@pytest.mark.parametrize("name", LENGTHS)
def test_gradients_take_the_way_back(name):
    lengths = LENGTHS[name]
    packed = torch.randn(sum(lengths), 1, 1, dtype=torch.float64, requires_grad=True)
    padding = padded(lengths)

    def there(side):
        return tuple(padding.pad(side))

    def back(side):
        return padding.unpad([2 * part for part in padding.pad(side)])

    assert torch.autograd.gradcheck(there, packed)
    assert torch.autograd.gradcheck(back, packed)
    assert torch.autograd.gradgradcheck(back, packed)


def test_what_the_padding_holds_has_no_gradient():
    padding = padded([2, 3])
    packed = torch.randn(5, 1, 1, requires_grad=True)
    (places,) = padding.pad(packed)
    # Behind the first sequence is a token of the second, and NaN in the gradient of its place.
    upstream = torch.tensor([[1.0, 1.0, torch.nan], [1.0, 1.0, 1.0]]).view(2, 1, 3, 1)
    (gradient,) = torch.autograd.grad(places, packed, upstream)
    assert gradient.flatten().tolist() == [1.0] * 5


def test_numbers_of_sequences():
    lengths = LENGTHS["classes"]
    padding = padded(lengths)
    sides = torch.arange(7.0, dtype=torch.float64).view(7, 1, 1, 1).requires_grad_()
    parts = padding.divide(sides)
    for group, part in zip(padding.groups, parts, strict=True):
        assert part.flatten().tolist() == group.sequences
    # The third one is empty.
    assert padding.join(parts).flatten().tolist() == [0, 1, 2, 0, 4, 5, 6]
    assert torch.autograd.gradcheck(lambda side: tuple(padding.divide(side)), sides)
    shared = torch.ones(1, 2, 1, 1)
    assert all(part is shared for part in padding.divide(shared))
    assert padding.divide(0.5) == [0.5] * len(padding.groups)


def test_equal_lengths_are_not_moved():
    packed = torch.randn(12, 2, 3)
    padding = padded([4, 4, 4])
    (places,) = padding.pad(packed)
    assert places.data_ptr() == packed.data_ptr()
    assert padding.groups[0].mask is None
    assert padding.unpad([places]).data_ptr() == packed.data_ptr()


def test_what_was_not_moved_may_be_changed_afterwards():
    packed = torch.randn(12, 2, 3, requires_grad=True)
    (places,) = padded([4, 4, 4]).pad(packed)
    with torch.no_grad():
        packed.mul_(2)
    # A view that was split off raises here.
    assert places.grad_fn is not None


def test_similar_lengths_are_one_group():
    assert group_sequences([5, 8, 6, 12], 4, 100) == [[0, 1, 2, 3]]


def test_groups_are_powers_of_two_of_blocks():
    found = group_sequences([1, 40, 4, 5, 0, 8, 9, 33], 4, 100)
    assert found == [[0, 2], [3, 5], [6], [1, 7]]


def test_groups_have_a_largest_size():
    assert group_sequences([5, 8, 6, 7, 5], 4, 2) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("seed", range(20))
def test_padding_at_most_doubles_the_blocks(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = (200 * torch.rand(30, generator=generator) ** (1 + seed)).long().tolist()
    groups = group_sequences(lengths, 4, 100)
    taken = sum(len(group) * max(blocks(lengths[s]) for s in group) for group in groups)
    assert taken <= 2 * sum(map(blocks, lengths))
