"""Boards and stamps of Pathfinder: sets of pixels as integers, and how dashes and discs look.

A board has a bit per pixel, so that shifting, joining and intersecting drawings are single
operations. A stamp is drawn once per angle, finely, and shrunk to pixels.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np

SIDE = 32
# Pixels at the border that stay empty.
PADDING = 1
LENGTH, THICKNESS, MARGIN = 2, 0.5, 1
MARKER_RADIUS = 1.5

# A board is wider than the image, so that nothing near the border wraps around.
EDGE = 8
WIDTH = SIDE + 2 * EDGE
# How far from its anchor a dash draws.
REACH = LENGTH + 2 * MARGIN
# The place of its anchor on a board that holds one stamp, and all places of such a board.
ANCHOR = REACH * WIDTH + REACH
STAMP_SIZED = (1 << 2 * ANCHOR + 1) - 1
# Cells per pixel and direction of the fine drawing.
FINE = 8


def bit(y: int, x: int) -> int:
    """The place of a pixel on a board."""
    return (y + EDGE) * WIDTH + x + EDGE


@cache
def square(border: int) -> int:
    """All pixels with at least so many others between them and the border, as a board."""
    allowed = range(border, SIDE - border)
    return sum(1 << bit(y, x) for y in allowed for x in allowed)


INSIDE = square(PADDING)
WALLS = ((1 << WIDTH * WIDTH) - 1) ^ INSIDE


def moved(y: int, x: int, angle: float, distance: float) -> tuple[int, int]:
    """The pixel nearest to a point at this distance from another pixel."""
    return (
        math.floor(y + distance * math.sin(angle) + 0.5),
        math.floor(x + distance * math.cos(angle) + 0.5),
    )


# Stamps: what a dash or a disc looks like, once per angle


def from_dash(y: np.ndarray, x: np.ndarray, angle: float) -> np.ndarray:
    """Distances of points from a dash that starts at (0, 0)."""
    along = np.clip(y * math.sin(angle) + x * math.cos(angle), 0, LENGTH)
    return np.hypot(y - along * math.sin(angle), x - along * math.cos(angle))


def lanczos() -> np.ndarray:
    """Weights ``[pixels, fine cells]`` that shrink a fine drawing of a stamp to its pixels."""
    pixels = np.arange(-REACH, REACH + 1)
    cells = (np.arange(len(pixels) * FINE) + 0.5) / FINE - REACH - 0.5
    distance = pixels[:, None] - cells
    weights = np.where(abs(distance) < 3, np.sinc(distance) * np.sinc(distance / 3), 0)
    return weights / weights.sum(1, keepdims=True)


def shrunk(is_ink: np.ndarray) -> np.ndarray:
    """Grey values from 0 to 1 of a fine drawing."""
    weights = lanczos()
    return np.clip(weights @ is_ink @ weights.T, 0, 1)


def fine_grid() -> tuple[np.ndarray, np.ndarray]:
    """Coordinates y and x of the fine cells of a stamp, its anchor at (0, 0)."""
    cells = (np.arange((2 * REACH + 1) * FINE) + 0.5) / FINE - REACH - 0.5
    return cells[:, None], cells[None, :]


class Stamp(NamedTuple):
    """A dash at one angle.

    Attributes:
        ink: Grey values around the anchor, ``[2 REACH + 1, 2 REACH + 1]``.
        offsets: Where the pixels within the margin lie on a board, from the place of the anchor.
        surroundings: The same pixels as a board, its anchor at `ANCHOR`.
    """

    ink: np.ndarray
    offsets: tuple[int, ...]
    surroundings: int

    def at(self, y: int, x: int) -> int:
        """The surroundings with the anchor at a pixel."""
        return self.surroundings << (bit(y, x) - ANCHOR)


@cache
def stamp(angle: float) -> Stamp:
    """The dash that starts at its anchor and runs in this direction (radians, y downwards)."""
    y, x = np.mgrid[-REACH : REACH + 1, -REACH : REACH + 1]
    near = np.argwhere(from_dash(y, x, angle) <= MARGIN + 1e-9) - REACH
    offsets = tuple(int(dy) * WIDTH + int(dx) for dy, dx in near)
    ink = shrunk(from_dash(*fine_grid(), angle) <= THICKNESS / 2)
    return Stamp(ink, offsets, sum(1 << (ANCHOR + offset) for offset in offsets))


@cache
def disc() -> np.ndarray:
    """Grey values of a marker, its centre in the middle."""
    return shrunk(np.hypot(*fine_grid()) <= MARKER_RADIUS)
