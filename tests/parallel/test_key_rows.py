"""The rows that groups chose, behind the tokens of their heads: what the kernels read."""

import pytest
import torch

from lln.parallel.key_rows import FarRows


@pytest.mark.parametrize("chosen", [6, 0])
def test_groups_find_their_rows_behind_the_tokens(chosen):
    # Two samples of two key heads, one of which nobody chose from; four query heads of two groups.
    head = torch.tensor([3, 0, 3, 1, 0, 3])[:chosen]
    rows = torch.randn(chosen, 5, requires_grad=True)
    source = torch.zeros(2, 4, 2, 3, dtype=torch.int64)
    for row, one in enumerate(head.tolist(), start=1):
        source[one // 2, one % 2 * 2 + row % 2, row // 4, row % 3] = row
    far = FarRows(rows, source, head, most=min(chosen, 3))
    own = (torch.randn(2, 2, 4, 3), torch.randn(2, 2, 4, 2))
    *sides, indices = far.behind(*own)
    assert torch.equal(indices < 0, source == 0)
    assert (indices[indices >= 0] >= 4).all()
    picked = []
    for side, before, want in zip(sides, own, far.spread(3), strict=True):
        assert torch.equal(side[:, :, :4], before)
        every = side.repeat_interleave(2, 1).flatten(0, 1)
        place = indices.flatten(0, 1).flatten(1).clamp_min(0).long().unsqueeze(-1)
        found = every.gather(1, place.expand(-1, -1, side.shape[-1])).view(want.shape)
        picked.append(torch.where(source.unsqueeze(-1) > 0, found, 0.0))
        assert torch.equal(picked[-1], want)
    # Every row is there once, also where there is none: its gradient comes back.
    (gradient,) = torch.autograd.grad(sum(side.sum() for side in picked), rows)
    assert torch.equal(gradient, torch.ones_like(rows))
