"""Figure 3's sum: both parts with their weights, whether a gradient is needed or not."""

import pytest
import torch

import lln
from lln.eager.run import join


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tracked", [(), (0,), (1,), (0, 1)], ids=str)
def test_weights_of_both_parts(mix, tracked):
    torch.manual_seed(0)
    parts = [torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(2)]
    expected = mix * parts[0] + (1 - mix) * parts[1]
    given = [part.clone() for part in parts]
    for place in tracked:
        given[place].requires_grad_()
    found = join(*given, mix)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)
    # Only the memory of the short range may be used again.
    assert torch.equal(given[0], parts[0])
    if tracked:
        assert torch.equal(given[1], parts[1])
        wanted = [given[place] for place in tracked]
        for place, gradient in zip(tracked, torch.autograd.grad(found.sum(), wanted), strict=True):
            weight = torch.full_like(gradient, (mix, 1 - mix)[place])
            torch.testing.assert_close(gradient, weight)


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_inputs_of_a_call_stay_as_they_are(mix):
    torch.manual_seed(1)
    sides = [torch.randn(1, 2, 24, 8) for _ in range(3)]
    before = [side.clone() for side in sides]
    options = {"alpha": 2.0, "beta": 1.5, "mix": mix, "block_size": 8}
    found = lln.lln_diag_attention(*sides, **options)
    for side, old in zip(sides, before, strict=True):
        assert torch.equal(side, old)
    exact = [side.double() for side in sides]
    reference = lln.lln_diag_attention(*exact, impl="reference", **options)
    torch.testing.assert_close(found.double(), reference, rtol=0, atol=1e-5)
