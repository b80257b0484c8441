"""Images stored as a JPEG stores them: quantised cosine coefficients of blocks of 8×8 pixels.

A block of pixels x, less 128, is written as a sum of 64 cosine patterns,

    x[i, j] = 128 + Σ_{u,v} a(u) a(v) F[u, v] cos((2i+1) u π / 16) cos((2j+1) v π / 16),

with a(0) = √(1/8) and a(u) = 1/2 otherwise; F[u, v] is a small integer times the quantisation
step of its frequency. The sum over u and v separates: x = 128 + Cᵀ F C for an 8×8 matrix C.

Dimension legend: n images, S pixels per side, K = (S / 8)² blocks per image.
"""

from __future__ import annotations

import numpy as np

from lln.errors import InvalidInputError

BLOCK = 8


def cosine_patterns() -> np.ndarray:
    """The matrix C above: float32 ``[u, i]``, its rows orthonormal."""
    frequency, place = np.mgrid[:BLOCK, :BLOCK]
    patterns = np.cos((2 * place + 1) * frequency * np.pi / 16) / 2
    patterns[0] = np.sqrt(1 / BLOCK)
    return patterns.astype(np.float32)


def decode_blocks(coefficients: np.ndarray, steps: np.ndarray, side: int) -> np.ndarray:
    """Images from the coefficients of their blocks.

    Args:
        coefficients: int8 ``[64, n, K]``; entry 8u + v of the first axis has vertical frequency
            u and horizontal frequency v, and blocks come row by row.
        steps: ``[8, 8]``, the quantisation step of every frequency.
        side: S.

    Returns:
        uint8 ``[n, S, S]``.

    Raises:
        InvalidInputError: If the shapes do not fit.
    """
    across = side // BLOCK
    wanted = (BLOCK * BLOCK, across * across)
    if coefficients.ndim != 3 or coefficients.shape[::2] != wanted or steps.shape != (8, 8):
        raise InvalidInputError(
            f"images of {side} pixels need coefficients [64, n, {across * across}] and steps "
            f"[8, 8], got {list(coefficients.shape)} and {list(steps.shape)}."
        )
    patterns = cosine_patterns()
    scaled = coefficients * steps.reshape(-1, 1, 1).astype(np.float32)
    # [u, (v, n, K)] → [i, v, (n, K)] → [j, i, (n, K)]: two small products instead of one sum.
    rows = (patterns.T @ scaled.reshape(BLOCK, -1)).reshape(BLOCK, BLOCK, -1)
    pixels = np.tensordot(patterns.T, rows, axes=(1, 1))
    grid = pixels.reshape(BLOCK, BLOCK, -1, across, across)
    images = grid.transpose(2, 3, 1, 4, 0).reshape(-1, side, side)
    return np.clip(np.rint(images + 128), 0, 255).astype(np.uint8)
