"""A rank's best keys for the groups of all ranks: the kernels choose as plain PyTorch does."""

import pytest
import torch
from tests.kernels.common import DEVICE, holes

from lln.kernels.keys.keys_ops import fused_candidates
from lln.parallel.key_choice import _candidates

# Samples begin in the whole sequence where ranks may: in a block, with one, far behind.
GAPS = {"first": (0, 7), "later": (640, 70)}
CASES = {
    "masked": {"held": 70, "keys": 5, "masked": True},
    "fewer keys than wanted": {"held": 6, "keys": 9, "gaps": "first"},
    "full tiles": {"held": 128, "keys": 8, "block_size": 16},
    "no key": {"held": 0, "keys": 3},
    "nothing wanted": {"held": 10, "keys": 0},
}


def small_integers(*shape):
    """Their products are exact in every precision, and many are equal."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(-2, 3, shape, generator=generator).float().to(DEVICE)


@pytest.mark.parametrize("name", CASES)
def test_candidates_are_those_of_plain_pytorch(name):
    case = {"gaps": "later", "block_size": 32, "masked": False, **CASES[name]}
    held, size, group = case["held"], case["block_size"], 16
    # Three blocks, the keys in the last one or behind; a head of keys for two of queries.
    mean, key = small_integers(2, 2, 3 * size // group, 8), small_integers(2, 1, held, 8)
    gaps = torch.tensor(GAPS[case["gaps"]], device=DEVICE)
    mask = holes(2, held) if case["masked"] else None
    if mask is not None:
        key[:, 0][~mask] = float("nan")
    home = (torch.arange(held, device=DEVICE) + gaps[:, None]) // size
    valid = torch.ones_like(home, dtype=torch.bool) if mask is None else mask
    expected = _candidates(mean, key, case["keys"], home, valid, size // group)
    sizes = {"block_size": size, "group_size": group}
    found = fused_candidates(mean, key, mask, gaps, case["keys"], **sizes)
    for side, want in zip(found, expected, strict=True):
        # Plain PyTorch leaves room for one group more.
        assert torch.equal(side, want[:, :, :-1].to(side.dtype))


def test_equal_scores_are_taken_in_the_order_of_positions():
    """Far more keys reach the threshold than there is room for."""
    mean, key = torch.ones(1, 1, 2, 8, device=DEVICE), torch.ones(1, 1, 100, 8, device=DEVICE)
    key[:, :, 90] = 2
    sizes = {"block_size": 16, "group_size": 16}
    scores, found = fused_candidates(mean, key, None, torch.tensor([10]).to(DEVICE), 4, **sizes)
    assert found.tolist() == [[[[6, 7, 8, 90], [0, 1, 2, 90]]]]
    assert scores.tolist() == [[[[8.0, 8.0, 8.0, 16.0]] * 2]]
