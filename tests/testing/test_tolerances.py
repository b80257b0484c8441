"""What a sum may err by follows what was summed, not what is left of it."""

import pytest
import torch

from lln.testing import budget, size_of_sum


def tree_sum(terms):
    """Pairs, pairs of pairs and so on, by additions that round the same on every machine."""
    while terms.numel() > 1:
        if terms.numel() % 2:
            terms = torch.cat((terms, terms.new_zeros(1)))
        terms = terms[0::2] + terms[1::2]
    return terms[0]


def cancelling(count, left, seed):
    """Terms in float32 whose sum is a small rest."""
    generator = torch.Generator().manual_seed(seed)
    terms = torch.randn(count, generator=generator, dtype=torch.float64)
    return (terms - terms.mean() + left / count).float()


def judged(found, terms, other):
    """Error of a sum in units of what it may err by."""
    exact = terms.double().sum()
    allowed = budget(found, exact, other, backward=True, magnitude=size_of_sum(terms, ()))
    return (found.double() - exact).abs().item() / allowed


@pytest.mark.parametrize("count", [16, 2240, 100_000])
@pytest.mark.parametrize("left", [0.0, 1e-3, 3.0])
def test_every_order_passes_and_wrong_sums_do_not(count, left):
    for seed in range(20):
        terms = cancelling(count, left, seed)
        other = tree_sum(terms)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        assert judged(tree_sum(terms[order]), terms, other) < 1
        missing = other - terms.abs().median()
        for wrong in (missing, other + 1e-4 * terms.norm()):
            assert judged(wrong, terms, other) > 1


def test_without_its_terms_a_sum_that_cancels_would_fail():
    terms = cancelling(2240, 1e-3, 0)
    errors = [
        (tree_sum(terms.roll(shift)).double() - terms.double().sum()).abs() for shift in range(9)
    ]
    exact = terms.double().sum()
    assert max(errors) > budget(terms[0], exact, exact.float(), backward=True)


def test_terms_are_summed_over_what_was_broadcast():
    terms = torch.tensor([[[3.0, -4.0], [0.0, 1.0]], [[5.0, -12.0], [6.0, 8.0]]])
    assert size_of_sum(terms, (2, 2, 1)) == 13
    assert size_of_sum(terms, (2, 1)) == (25 + 169) ** 0.5
    assert size_of_sum(terms, ()) == (25 + 1 + 169 + 100) ** 0.5
    assert size_of_sum(terms, terms.shape) == 12
    assert size_of_sum(terms[:0], (1, 1)) == 0


def test_a_sum_of_one_sign_is_judged_by_itself():
    terms = torch.rand(1000)
    assert size_of_sum(terms, ()) < terms.sum()
    allowed = budget(terms[0], terms.sum(), terms.sum(), magnitude=size_of_sum(terms, ()))
    assert allowed == budget(terms[0], terms.sum(), terms.sum())
