"""The choice of keys against a slow loop, and what a caller's own indices count."""

import pytest
import torch

from lln import choose_keys, lln_keys_attention
from lln.eager import selection
from lln.testing import make_qkv

GIVEN = {"alpha": 0.8, "beta": 1.1, "offset": -2.5}


def best(scores, wanted, allowed):
    """The allowed positions with the largest scores; equal ones in the order of positions."""
    return sorted(allowed, key=lambda place: (-scores[place], place))[:wanted]


def slowly(query, key, keys, *, block, group, mask=None, flip=False):
    """Indices ``[B, H, G, K]`` by loops over samples, heads and groups."""
    batch, heads, tokens, _ = query.shape
    query = -query if flip else query
    wanted = min(keys, tokens)
    extra = block - 1 if mask is not None else 0
    groups = -(-(tokens + extra) // block) * (block // group)
    found = torch.full((batch, heads, groups, wanted), -1)
    for sample in range(batch):
        valid = [True] * tokens if mask is None else mask[sample].tolist()
        gap = -(valid.index(True) if any(valid) else 0) % block
        home = [(place + gap) // block for place in range(tokens)]
        for head in range(heads):
            own_key = key[sample, head * key.shape[1] // heads]
            for number in range(groups):
                here = number * group // block
                start = number * group - gap
                rows = [row for row in range(start, start + group) if 0 <= row < tokens]
                counted = [row for row in rows if valid[row]]
                others = {place for place in range(tokens) if valid[place] and home[place] != here}
                total = sum((query[sample, head, row] for row in counted), query.new_zeros(()))
                scores = (own_key * total / max(len(counted), 1)).sum(-1).tolist()
                listed = sorted(best(scores, wanted, others))
                found[sample, head, number, : len(listed)] = torch.tensor(listed).long()
    return found


def masks(kind, batch, tokens):
    if kind is None:
        return None
    mask = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(3)) < 0.7
    if kind == "left":
        mask = torch.arange(tokens) >= torch.tensor([[5], [11]])
    if kind == "all":
        mask[:] = False
    return mask


@pytest.mark.parametrize("kind", [None, "holes", "left", "all"])
@pytest.mark.parametrize("group", [8, 2, 1])
@pytest.mark.parametrize("keys", [1, 5, 100])
def test_the_choice_is_that_of_a_slow_loop(keys, group, kind):
    query, key, _ = make_qkv(2, 4, 29, 4, key_heads=2, dtype=torch.float64)
    mask = masks(kind, 2, 29)
    options = {"key_mask": mask, "enable_gqa": True}
    found = choose_keys(query, key, keys, block_size=8, group_size=group, **options)
    assert found.dtype == torch.int64
    wanted = slowly(query, key, keys, block=8, group=group, mask=mask)
    assert found.shape == wanted.shape
    assert torch.equal(found, wanted)


def test_a_negative_scale_turns_the_choice_around():
    query, key, _ = make_qkv(1, 2, 24, 4, dtype=torch.float64)
    found = choose_keys(query, key, 4, block_size=8, scale=-0.5)
    assert torch.equal(found, slowly(query, key, 4, block=8, group=8, flip=True))
    assert torch.equal(found, choose_keys(-query, key, 4, block_size=8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equal_scores_are_taken_in_the_order_of_positions(dtype):
    query = torch.ones(1, 1, 40, 4, dtype=dtype)
    key = torch.ones(1, 1, 40, 4, dtype=dtype)
    key[:, :, 37] = 2.0
    found = choose_keys(query, key, 5, block_size=8)[0, 0].tolist()
    first = [8, 9, 10, 11, 37]
    assert found == [first, *([[0, 1, 2, 3, 37]] * 3), [0, 1, 2, 3, 4]]


def test_the_choice_repeats_and_does_not_depend_on_stretches(monkeypatch):
    query, key, _ = make_qkv(2, 2, 100, 8, dtype=torch.bfloat16)
    options = {"block_size": 8}
    wanted = choose_keys(query, key, 7, **options)
    assert all(torch.equal(choose_keys(query, key, 7, **options), wanted) for _ in range(5))
    for most in (1, 1000, 2 * 2 * 100 * 5):
        monkeypatch.setattr(selection, "MOST_SCORES", most)
        assert torch.equal(choose_keys(query, key, 7, **options), wanted)


def test_the_largest_of_a_row():
    row = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [-torch.inf, 0.0, -torch.inf, -1.0, -torch.inf]])
    assert selection.largest(row, 2).tolist() == [[1, 2], [1, 3]]
    assert selection.largest(row, 4).tolist() == [[1, 2, 3, 4], [1, 3, -1, -1]]


def test_repeats_are_dropped():
    given = torch.tensor([[5, 2, 5, -1, 2], [-1, -1, -1, -1, -1], [4, 3, 2, 1, 0]])
    wanted = [[2, 5, -1, -1, -1], [-1] * 5, [0, 1, 2, 3, 4]]
    assert selection.drop_repeats(given).tolist() == wanted
    assert selection.drop_repeats(given[:, :0]).shape == (3, 0)


def test_indices_carry_no_gradient():
    query, key, _ = make_qkv(1, 1, 20, 4, requires_grad=True)
    assert not choose_keys(query, key, 3, block_size=4).requires_grad


# A caller's own indices


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("group", [8, 2, 1])
def test_chosen_indices_give_the_same_output(group, masked, dtype):
    query, key, value = make_qkv(2, 2, 29, 4)
    mask = masks("left", 2, 29) if masked else None
    shared = {"block_size": 8, "group_size": group, "key_mask": mask}
    wanted = lln_keys_attention(query, key, value, **GIVEN, **shared, keys=5)
    indices = choose_keys(query, key, 5, **shared)
    found = lln_keys_attention(query, key, value, **GIVEN, **shared, keys=indices.to(dtype))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("impl", ["eager", "reference"])
@pytest.mark.parametrize(
    "extra",
    [[9, 9], [9, 17], [0, 3], [20, 20], [999, -7], [-1, 29]],
    ids=["repeated", "both", "own", "masked", "nowhere", "beyond"],
)
def test_what_may_not_be_seen_does_not_count(extra, impl):
    """Group 2 of 8 tokens lies in block 2; 20 is masked, 17 its own, 9 counts once."""
    sides = make_qkv(1, 1, 29, 4, dtype=torch.float64)
    mask = torch.ones(1, 29, dtype=torch.bool)
    mask[0, 20] = mask[0, 12] = False
    plain, more = torch.full((2, 1, 1, 5, 4), -1).unbind()
    plain[..., 2, :2] = torch.tensor([2, 9])
    more[..., 2, :] = torch.tensor([9, *extra, 2])
    # For block 0: its own key, and a masked one.
    more[..., 0, :2] = torch.tensor([1, 12])
    if extra == [0, 3]:
        plain[..., 2, 2:] = torch.tensor(extra)
    options = {**GIVEN, "block_size": 8, "key_mask": mask, "impl": impl}
    found, wanted = (lln_keys_attention(*sides, keys=keys, **options) for keys in (more, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    none = lln_keys_attention(*sides, keys=torch.full_like(plain, -1), **options)
    assert not torch.allclose(found[:, :, 16:24], none[:, :, 16:24])


def test_own_indices_get_gradients_through_keys_only():
    query, key, value = make_qkv(1, 1, 24, 4, requires_grad=True)
    keys = torch.tensor([20, -1]).expand(1, 1, 3, -1)
    # The offset leaves the slots no weight.
    options = {**GIVEN, "offset": -1000.0, "block_size": 8, "keys": keys}
    out = lln_keys_attention(query, key, value, **options)
    out[:, :, :8].sum().backward()
    rows = value.grad.abs().sum((0, 1, 3)).nonzero().flatten().tolist()
    assert rows == [*range(8), 20]
