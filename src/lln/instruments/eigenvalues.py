"""The second largest eigenvalue modulus of a row-stochastic matrix, given or only multiplied with.

λ₁ = 1 with the eigenvector of ones, so x ↦ P·x − mean(P·x) has the eigenvalues 0, λ₂, …, λ_N
(Wielandt's deflation, appendix A.4.2), and its largest is found by Arnoldi iteration. A matrix with
zeros is first taken apart into the classes of its Markov chain: reducible and periodic chains have
clusters of equal and defective eigenvalues, where iterations fail and rounding is amplified to
ε^{1/N}, while the structure gives the answer exactly.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lln.errors import BackendUnavailableError

Product = Callable[[Tensor], Tensor]

# Below this size all eigenvalues cost less than an iteration.
DENSE = 128

# If the iteration stalls, all eigenvalues are computed up to this size: a minute, half a gigabyte.
_RESCUE = 4096

# Krylov dimensions and restarts of successive attempts.
_ATTEMPTS = ((60, 12), (200, 8))
_TOLERANCE = 1e-8
_RESIDUAL = 1e-6
_ROUGH_TOLERANCE = 1e-3


def second_modulus(matrix: Tensor) -> float:
    """|λ₂| of a row-stochastic matrix ``[N, N]`` in float64; 0 for N = 1."""
    if matrix.shape[0] == 1:
        return 0.0
    if bool((matrix == 0).any()):
        return _by_classes(matrix)
    return _irreducible(matrix)


def second_modulus_of_product(product: Product, size: int, device: torch.device) -> float:
    """|λ₂| of a row-stochastic matrix that is only known by X ↦ P·X, ``[N, n]`` to ``[N, n]``."""

    def deflated(vectors: Tensor) -> Tensor:
        image = product(vectors)
        return image - image.mean(0)

    return _largest_modulus(deflated, size, device)


def second_moduli(matrices: Tensor) -> Tensor:
    """|λ₂| of small row-stochastic matrices ``[G, n, n]``, from all their eigenvalues."""
    if matrices.shape[-1] < 2:
        return matrices.new_zeros(matrices.shape[0])
    moduli = _moduli(matrices).sort(-1, descending=True).values
    return moduli[:, 1].clamp_max(1.0).to(matrices.device)


def _moduli(matrices: Tensor) -> Tensor:
    """The moduli of all eigenvalues ``[..., n]``, on the CPU.

    By numpy, because its LAPACK is the same on every processor. PyTorch may use Intel's, which
    gives up on matrices with many equal eigenvalues.
    """
    return torch.from_numpy(np.abs(np.linalg.eigvals(matrices.detach().cpu().numpy())))


def _irreducible(matrix: Tensor) -> float:
    if matrix.shape[0] <= DENSE:
        return second_moduli(matrix[None]).item()
    return second_modulus_of_product(matrix.matmul, matrix.shape[0], matrix.device)


def _largest_modulus(product: Product, size: int, device: torch.device) -> float:
    """Largest eigenvalue modulus of x ↦ M·x."""
    linalg = _scipy("scipy.sparse.linalg")
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(size, 1, generator=generator, dtype=torch.float64, device="cpu")
    start -= start.mean()
    image = product(start.to(device)).cpu()
    if image.norm() <= 1e-14 * start.norm():
        # All rows alike (uniform, rank one): what is left is rounding.
        return 0.0

    def multiply(vector: Any) -> Any:
        return product(torch.as_tensor(vector, device=device).reshape(-1, 1)).cpu().numpy()

    operator = linalg.LinearOperator((size, size), matvec=multiply, dtype=start.numpy().dtype)

    def attempt(dimension: int, restarts: int, tolerance: float) -> float | None:
        try:
            effort = {"ncv": min(dimension, size - 1), "maxiter": restarts, "tol": tolerance}
            values, vectors = linalg.eigs(operator, k=1, v0=start[:, 0].numpy(), **effort)
        except linalg.ArpackError:
            return None
        vector = torch.from_numpy(vectors[:, 0])
        image = product(torch.view_as_real(vector).to(device)).cpu().contiguous()
        residual = (torch.view_as_complex(image) - values[0] * vector).norm().item()
        return abs(values[0]) if residual <= max(_RESIDUAL, 10 * tolerance) else None

    for dimension, restarts in _ATTEMPTS:
        found = attempt(dimension, restarts, _TOLERANCE)
        if found is not None:
            return min(found, 1.0)
    if size <= _RESCUE:
        unit = torch.eye(size, dtype=torch.float64, device=device)
        matrix = torch.cat([product(columns) for columns in unit.split(DENSE, 1)], 1)
        return min(_moduli(matrix).max().item(), 1.0)
    found = attempt(_ATTEMPTS[-1][0], 40, _ROUGH_TOLERANCE)
    warnings.warn(
        f"the spectral gap of a matrix of {size} tokens did not converge "
        f"({'known to about 1e-3' if found is not None else 'NaN is returned'}): many eigenvalues "
        "of nearly equal size, as in attention close to a permutation.",
        RuntimeWarning,
        stacklevel=2,
    )
    return math.nan if found is None else min(found, 1.0)


def _by_classes(matrix: Tensor) -> float:
    """|λ₂| from the communicating classes: the eigenvalues of P are those of its diagonal blocks.

    A closed class has one eigenvalue 1 (as many as its period on the unit circle), a class that
    leaks has all eigenvalues inside the circle.
    """
    graph, sparse = _scipy("scipy.sparse.csgraph"), _scipy("scipy.sparse")
    pattern = sparse.csr_array((matrix != 0).cpu().numpy())
    count, label = graph.connected_components(pattern, connection="strong")
    rows, columns = (torch.from_numpy(side).long() for side in pattern.nonzero())
    label = torch.from_numpy(label).long()
    leaks = torch.zeros(count, dtype=torch.bool, device="cpu")
    leaks[label[rows[label[rows] != label[columns]]]] = True
    if int((~leaks).sum()) > 1:
        return 1.0
    members = torch.bincount(label, minlength=count)
    alone = (members == 1)[label] & leaks[label]
    largest = matrix.diagonal().cpu()[alone].max().item() if bool(alone.any()) else 0.0
    for index in (members > 1).nonzero().flatten().tolist():
        inside = (label == index).nonzero().flatten()
        block = matrix[inside.to(matrix.device)][:, inside.to(matrix.device)]
        if leaks[index]:
            found = _radius(block)
        elif _period(pattern[inside.numpy()][:, inside.numpy()], graph) > 1:
            return 1.0
        else:
            found = _irreducible(block)
        largest = max(largest, found)
    return largest


def _radius(block: Tensor) -> float:
    """Spectral radius of a class that leaks."""
    if block.shape[0] <= DENSE:
        return _moduli(block).max().item()
    return _largest_modulus(block.matmul, block.shape[0], block.device)


def _period(pattern: Any, graph: Any) -> int:
    """Greatest common divisor of the lengths of all cycles of a strongly connected graph."""
    steps = graph.shortest_path(pattern, unweighted=True, indices=0)
    steps = torch.from_numpy(steps).long()
    rows, columns = (torch.from_numpy(side).long() for side in pattern.nonzero())
    return math.gcd(*(steps[rows] + 1 - steps[columns]).unique().tolist())


def _scipy(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        raise BackendUnavailableError(
            f"the spectral gap of this matrix needs scipy ({name}); install it with "
            "pip install 'lln[instruments]'."
        ) from None
