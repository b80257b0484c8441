"""The instruments over a matrix P that you already have: any peer, any model's attention map.

    >>> import torch
    >>> from lln.instruments import of_matrix
    >>> of_matrix.entropy(torch.full((2, 16, 16), 1 / 16)).tolist()
    [4.0, 4.0]

P is ``[..., T, S]`` and row-stochastic, which is checked; results are ``[...]`` in float64. Rows
are divided by their sums, so that the rounding of a half-precision P does not matter. A row of
zeros is a query that saw no key: it does not count, and where P is square, neither does its own
column if that is zero too. A matrix with a NaN or infinity, or without a row that counts, is NaN.

Dimension legend: G matrices, T rows, S columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lln import checks
from lln.checks.tensors import check_tensor
from lln.errors import InvalidInputError
from lln.instruments.eigenvalues import second_modulus
from lln.instruments.entropy import mean_row_entropy
from lln.instruments.log_normality import SHAPES, LogNormality, probabilities, shape_of_log_p
from lln.instruments.rows import TILE, Rows, RowTile
from lln.instruments.temperature import measured_temperature
from lln.instruments.variance import matrix_variance

# How far the sum of a row may be from 1. The wide dtypes allow for a P that was made in a narrower
# one, as most models do.
_TOLERANCE = {
    torch.float64: 1e-3,
    torch.float32: 1e-3,
    torch.float16: 5e-3,
    torch.bfloat16: 2e-2,
}


def entropy(matrix: Tensor) -> Tensor:
    """Mean entropy of the rows of P in bits, Eq. (7).

    Args:
        matrix: ``[..., T, S]``, row-stochastic.
    """
    return _measure(matrix, mean_row_entropy)


def variance(matrix: Tensor) -> Tensor:
    """Variance of the entries of P, zeros included (Theorem 3.4).

    Args:
        matrix: ``[..., T, S]``, row-stochastic.
    """
    return _measure(matrix, matrix_variance)


def temperature(matrix: Tensor) -> Tensor:
    """Measured temperature, 1/√(variance of log P inside a row), over entries that are not zero.

    Args:
        matrix: ``[..., T, S]``, row-stochastic.
    """
    return _measure(matrix, measured_temperature)


def log_normality(matrix: Tensor) -> LogNormality:
    """Moments of log P over entries that are not zero, and its distance from a normal distribution.

    Args:
        matrix: ``[..., T, S]``, row-stochastic.
    """
    check_tensor("matrix", matrix)
    found = _measure_all(matrix, shape_of_log_p, SHAPES)
    return LogNormality(*found, probabilities=probabilities(matrix.device))


def spectral_gap(matrix: Tensor) -> Tensor:
    """Spectral gap γ = 1 − |λ₂| (section 3.2.2).

    A P with zeros is first taken apart into the classes of its Markov chain, so that triangular,
    block-diagonal, one-hot and periodic matrices are exact as well; the rest is Arnoldi iteration.

    Args:
        matrix: ``[..., N, N]``, row-stochastic. Where a row is zero, its column must be zero too.
    """
    _check_stochastic(matrix)
    if matrix.shape[-1] != matrix.shape[-2]:
        raise InvalidInputError(
            f"spectral_gap needs a square matrix, got shape {checks.shape_of(matrix)}: eigenvalues "
            "exist for self attention only."
        )
    return _measure(matrix, _gaps)


def _gaps(rows: Rows) -> Tensor:
    if rows.shape[1] != rows.shape[2]:
        raise InvalidInputError(
            "a row of the matrix is zero but other rows attend to that token; zero its column too, "
            "or give the row a distribution."
        )
    found = []
    for part in rows.slices():
        matrices = torch.cat([tile.p for tile in part.tiles()], -2)
        found.extend(1 - second_modulus(matrix) for matrix in matrices)
    return torch.tensor(found, dtype=torch.float64).clamp(0.0, 1.0)


def _measure(matrix: Tensor, instrument: Callable[[Rows], Tensor]) -> Tensor:
    (found,) = _measure_all(matrix, lambda rows: (instrument(rows),), ((),))
    return found


def _measure_all(
    matrix: Tensor,
    instrument: Callable[[Rows], tuple[Tensor, ...]],
    shapes: tuple[tuple[int, ...], ...],
) -> tuple[Tensor, ...]:
    """The results of an instrument, ``[..., *shape]`` each."""
    sums = _check_stochastic(matrix)
    lead = tuple(matrix.shape[:-2])
    flat = matrix.detach().reshape(-1, *matrix.shape[-2:])
    healthy = sums.isfinite().all(-1)
    whole = healthy & (sums > 0).all(-1)
    out = tuple(
        torch.full((flat.shape[0], *shape), torch.nan, dtype=torch.float64, device=matrix.device)
        for shape in shapes
    )
    with torch.no_grad():
        if flat.shape[0] and bool(whole.all()):
            found = instrument(MatrixRows(flat))
            return tuple(part.to(matrix.device).reshape((*lead, *part.shape[1:])) for part in found)
        for index in healthy.nonzero().flatten().tolist():
            rows = flat[index] if whole[index] else _without_zero_rows(flat[index], sums[index] > 0)
            if rows.shape[0]:
                for result, part in zip(out, instrument(MatrixRows(rows[None])), strict=True):
                    result[index] = part[0]
    return tuple(part.reshape((*lead, *part.shape[1:])) for part in out)


def _without_zero_rows(matrix: Tensor, there: Tensor) -> Tensor:
    rows = matrix[there]
    if matrix.shape[0] == matrix.shape[1] and not bool(rows[:, ~there].any()):
        return rows[:, there]
    return rows


def _check_stochastic(matrix: Tensor) -> Tensor:
    """Refuse what is not row-stochastic; the sums of the rows ``[G, T]`` otherwise."""
    check_tensor("matrix", matrix)
    if matrix.is_meta:
        raise InvalidInputError("matrix is on the meta device, where it has no numbers to measure.")
    if matrix.dim() < 2 or 0 in matrix.shape[-2:]:
        raise InvalidInputError(
            f"matrix must be [..., T, S] with at least one row and column, got shape "
            f"{checks.shape_of(matrix)}."
        )
    if matrix.dtype not in checks.FLOAT_DTYPES:
        raise checks.wrong_dtype("matrix", matrix.dtype)
    if bool((matrix < 0).any()):
        raise InvalidInputError(
            f"matrix must hold probabilities, got the negative entry {matrix.min().item():g}."
        )
    sums = matrix.detach().sum(-1, dtype=torch.float64).reshape(-1, matrix.shape[-2])
    wrong = ((sums - 1).abs() > _TOLERANCE[matrix.dtype]) & (sums != 0) & sums.isfinite()
    if bool(wrong.any()):
        raise InvalidInputError(
            f"the rows of matrix must sum to 1 (or be all zero), got a row that sums to "
            f"{sums[wrong][0].item():g}; divide by matrix.sum(-1, keepdim=True)."
        )
    return sums


@dataclass(frozen=True)
class MatrixRows(Rows):
    """Rows of given matrices.

    Attributes:
        matrix: ``[G, T, S]``, no row zero.
    """

    matrix: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, T, S)."""
        count, rows, columns = self.matrix.shape
        return count, rows, columns

    def part(self, start: int, end: int) -> MatrixRows:
        """The matrices from ``start`` up to ``end``."""
        return MatrixRows(self.matrix[start:end])

    def tiles(self) -> Iterator[RowTile]:
        """All rows, in order."""
        count, rows, columns = self.shape
        step = max(TILE // (count * columns), 1)
        for start in range(0, rows, step):
            part = self.matrix[:, start : start + step].double()
            part = part / part.sum(-1, keepdim=True)
            yield RowTile(part.log(), start, 0, part)
