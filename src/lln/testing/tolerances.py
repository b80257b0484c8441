"""How far a result may be from the float64 reference.

The rule of FlashAttention and PyTorch, calibrated by the data: an implementation may err by a small
multiple of what plain PyTorch errs in the same dtype, plus the rounding of the result itself,

    error ≤ c · (error of eager at that dtype + ε(dtype) · max|reference|),

c = 2 forward, 3 backward, 1 in float64. Eager itself may err by the rounding of its arithmetic,
counted in `EAGER_ROUNDINGS` (three times as many backward), and by rounding its result once. These
numbers change only with a *Numerics* entry in the changelog.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lln.precision import accumulation_dtype

FORWARD_FACTOR = 2.0
BACKWARD_FACTOR = 3.0

# Roundings on the way of one output through eager attention, in units of the accumulation dtype's ε
# and of the largest output. Over the test grid the largest seen are 13 forward and 72 backward.
EAGER_ROUNDINGS = 32.0


def largest_error(found: Tensor, expected: Tensor) -> float:
    """Largest |found − expected|; infinite where one is finite and the other is not."""
    if found.shape != expected.shape:
        raise AssertionError(f"shape {tuple(found.shape)} is not {tuple(expected.shape)}")
    if found.numel() == 0:
        return 0.0
    difference = (found.double().cpu() - expected.double().cpu()).abs()
    same = (found.double().cpu() == expected.double().cpu()) | (
        found.cpu().isnan() & expected.cpu().isnan()
    )
    return torch.where(same, 0.0, difference).nan_to_num(torch.inf).max().item()


def size_of_sum(terms: Tensor, shape: Sequence[int]) -> float:
    """The ``magnitude`` of a sum, e.g. of the gradient of a scalar: √Σ term², the largest entry's.

    Where terms cancel, the sum does not show how much was rounded. Every term is rounded to ε of
    its own size. Summed in a tree, every level rounds partial sums again, and their squares add up
    to about Σ term². The roundings are independent, so their squares add up too: to a few
    ε · √Σ term², whatever the tree and the machine. The bound for every sum, ε · Σ|term|, is up to
    √n times as large and would hide larger errors. Where all terms have one sign the sum itself
    is larger than √Σ term², and `budget` takes the larger of both.

    Args:
        terms: What is summed.
        shape: That of the sum; terms are summed over the dimensions it lacks or has as 1.

    Example:
        >>> size_of_sum(torch.tensor([[3.0, -4.0], [5.0, 12.0]]), (2, 1))
        13.0
    """
    if terms.numel() == 0:
        return 0.0
    return terms.double().square().sum_to_size(shape).sqrt().max().item()


def budget(
    found: Tensor,
    expected: Tensor,
    eager: Tensor | None = None,
    *,
    backward: bool = False,
    magnitude: float | None = None,
) -> float:
    """The error allowed to ``found``.

    Args:
        found: The result; its dtype says how precise it can be.
        expected: The float64 reference.
        eager: The same from eager attention in the same dtype; None if ``found`` is eager itself.
        backward: Whether these are gradients.
        magnitude: Size of the numbers that were summed; None = max|expected|. Give it where terms
            cancel, e.g. for gradients, so that rounding is measured against what was rounded; see
            `size_of_sum`.
    """
    if expected.numel() == 0:
        return 0.0
    size = expected.double().abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    size = max(size, magnitude or 0.0)
    epsilon = torch.finfo(found.dtype).eps
    if eager is None:
        wide = accumulation_dtype(found.dtype)
        roundings = EAGER_ROUNDINGS * (BACKWARD_FACTOR if backward else 1.0)
        result = epsilon / 2 if wide != found.dtype else 0.0
        return (result + roundings * torch.finfo(wide).eps) * size
    factor = BACKWARD_FACTOR if backward else FORWARD_FACTOR
    if found.dtype == torch.float64:
        factor = 1.0
    return factor * (largest_error(eager, expected) + epsilon * size)


def assert_close(
    found: Tensor,
    expected: Tensor,
    eager: Tensor | None = None,
    *,
    backward: bool = False,
    magnitude: float | None = None,
    what: str = "output",
) -> None:
    """Fail if ``found`` is not finite where it should be, or errs beyond its budget."""
    if expected.isfinite().all() and not found.isfinite().all():
        raise AssertionError(f"{what} has {int((~found.isfinite()).sum())} non-finite entries")
    error = largest_error(found, expected)
    allowed = budget(found, expected, eager, backward=backward, magnitude=magnitude)
    if error > allowed:
        ratio = _root_mean_square(found.double().cpu() - expected.double().cpu()) / max(
            _root_mean_square(expected.double().cpu()), 1e-300
        )
        raise AssertionError(
            f"{what} errs by {error:.3e}, allowed {allowed:.3e} (RMS ratio {ratio:.2e}, "
            f"{found.dtype}, shape {tuple(found.shape)})"
        )


def _root_mean_square(tensor: Tensor) -> float:
    return tensor.square().mean().sqrt().item()
