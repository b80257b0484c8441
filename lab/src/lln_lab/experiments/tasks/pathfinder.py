"""Pathfinder, 32 × 32: are the two discs the ends of one dashed path?

Two long dashed paths start near the middle of the image and wander through it without touching;
short paths are there to distract. One disc lies on the start of one long path. The other lies on
the end of the same path (label 1) or of the other one (label 0). Nothing near a disc tells which:
a model has to follow a path across the image, which a sequence of 1024 pixels scatters widely.

Sizes are those of the long range arena: dashes of 2 pixels with a margin of 1, 14 of them in a path
(9 and 6 in its easier variants, 3 to begin with), distractors of a third of that. A path grows at
its pivot:

1. the pivot moves 4 pixels on, in the direction of the last dash;
2. the pixels on a circle of 3 around it are where the next dash may end. Pixels next to the
   surroundings of other dashes are left out; a turn by Δ has the weight cos² Δ, one of 90° or more
   has none;
3. the dash is the last 2 of those 3 pixels. If its surroundings meet other surroundings it is drawn
   again, up to 3 times; then the path is given up.

Where this differs from the program that drew the published images, on purpose: a dash avoids the
newest dash of the other long path too, the gaps between dashes count as taken, and distractors
avoid the last dashes of both long paths, so that paths do not cross; coordinates are rounded to the
nearest pixel, not up, so that paths do not drift to one corner; surroundings are the pixels within
the margin of a dash, not a blurred drawing of them; only the start of the first dash has to lie in
the middle, not all of it; lines are drawn eight times finer before they are shrunk, not twice. Grey
levels are the published ones, by which distractors are a third brighter than the long paths.

Tokens are the grey values plus one, row by row: ids 1 to 256. A harness that takes the grey value
itself as the id gives black pixels the id of padding and hides nearly the whole image.

Speed comes from boards (`lln_lab.experiments.tasks.pathfinder_stamps`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from random import Random
from typing import Literal, overload

import numpy as np

from lln_lab.experiments.tasks.pathfinder_stamps import (
    ANCHOR,
    EDGE,
    INSIDE,
    LENGTH,
    MARGIN,
    PADDING,
    REACH,
    SIDE,
    STAMP_SIZED,
    WALLS,
    WIDTH,
    bit,
    disc,
    moved,
    square,
    stamp,
)
from lln_lab.experiments.tasks.task import Examples, Task

CONTOUR_LENGTHS = (3, 6, 9, 14)
SEED_DISTANCE = 7
# Dashes of all distractors together.
DISTRACTING = 20
DASH_TRIALS, DISTRACTOR_TRIALS = 3, 5
LEAST_FREE = 0.01
TARGET_LEVEL, DISTRACTOR_LEVEL, MARKER_LEVEL = 1.5, 2.0, 1.0
# Images that a process draws before it is given more.
SHARE = 1000


# Paths


@dataclass(slots=True)
class Path:
    """A path that grows.

    Attributes:
        anchors: Pixel and direction of the stamp of every dash.
        tail: The pixel where it starts.
        head: The pixel where it ends.
        pivot: The pixel around which the last dash was turned.
        angle: Direction of the last dash.
        body: Surroundings of all dashes but the last.
        last: Surroundings of the last dash, which the next one need not avoid.
    """

    anchors: list[tuple[int, int, float]]
    tail: tuple[int, int]
    head: tuple[int, int]
    pivot: tuple[int, int]
    angle: float
    body: int
    last: int

    @classmethod
    def start(cls, tail: tuple[int, int], angle: float) -> Path:
        """A path of one dash."""
        return cls(
            anchors=[(*tail, angle)],
            tail=tail,
            head=moved(*tail, angle, LENGTH),
            pivot=moved(*tail, angle, -MARGIN),
            angle=angle,
            body=0,
            last=stamp(angle).at(*tail),
        )

    @property
    def board(self) -> int:
        """Surroundings of all dashes."""
        return self.body | self.last

    def extend(self, random: Random, others: int) -> bool:
        """Add a dash that meets neither `others` nor the path itself; whether there was one."""
        y, x = moved(*self.pivot, self.angle, LENGTH + 2 * MARGIN)
        taken = others | self.body
        near = taken >> (bit(y, x) - ANCHOR) & STAMP_SIZED
        near |= near << 1 | near >> 1 | near << WIDTH | near >> WIDTH
        choices, total = [], 0.0
        for place, dy, dx, angle, weight in turns(self.angle):
            if not near & place:
                total += weight
                choices.append((total, y + dy, x + dx, angle))
        if total < 1e-4:
            return False
        for _ in range(DASH_TRIALS):
            drawn = random.random() * total
            _, *head, angle = next(choice for choice in choices if choice[0] > drawn)
            backwards = angle - math.pi
            # With the pivot, so that no other path slips through between two dashes.
            surroundings = stamp(backwards).at(*head) | 1 << bit(y, x)
            if not surroundings & taken:
                self.body, self.last = self.board, surroundings
                self.anchors.append((*head, backwards))
                self.head, self.pivot, self.angle = (head[0], head[1]), (y, x), angle
                return True
        return False

    def ends(self) -> np.ndarray:
        """Both ends (y, x) of every dash, from tail to head: ``[dashes, 2, 2]``."""
        starts = np.array([anchor[:2] for anchor in self.anchors], dtype=float)
        angles = np.array([anchor[2] for anchor in self.anchors])
        run = LENGTH * np.stack([np.sin(angles), np.cos(angles)], axis=1)
        both = np.stack([starts, starts + run], axis=1)
        # All dashes but the first are drawn backwards, from the pixel where they end.
        both[1:] = both[1:, ::-1]
        return both


@cache
def turns(angle: float) -> list[tuple[int, int, int, float, float]]:
    """Where the next dash may end: a board around the pivot, y, x, its direction, its weight."""
    radius = LENGTH + MARGIN
    circle = {moved(0, 0, math.radians(degree), radius) for degree in range(360)}
    found = []
    for dy, dx in sorted(circle):
        turned = math.atan2(dy, dx)
        weight = max(0.0, math.cos(turned - angle)) ** 2
        if weight > 1e-9:
            found.append((1 << (ANCHOR + dy * WIDTH + dx), dy, dx, turned, weight))
    return found


def any_angle(random: Random) -> float:
    """A direction in whole degrees."""
    return math.radians(random.randrange(-180, 180))


def seeded(random: Random, taken: int, border: int) -> Path | None:
    """A path of one dash at a uniform angle, its tail uniform over the pixels where it fits.

    Args:
        random: What decides.
        taken: What it may not meet.
        border: How many pixels the tail stays away from the border.
    """
    angle, allowed = any_angle(random), square(border)
    for offset in stamp(angle).offsets:
        allowed &= ~(taken >> offset if offset >= 0 else taken << -offset)
    if not allowed:
        return None
    choices = SIDE - 2 * border
    while True:
        tail = border + int(random.random() * choices), border + int(random.random() * choices)
        if allowed >> bit(*tail) & 1:
            return Path.start(tail, angle)


def two_paths(random: Random, contour_length: int) -> tuple[Path, Path] | None:
    """One attempt at the two long paths, which grow by turns."""
    first = seeded(random, WALLS, 2 * SEED_DISTANCE)
    if first is None:
        return None
    second = Path.start(moved(*first.tail, any_angle(random), SEED_DISTANCE), any_angle(random))
    if second.last & (first.last | WALLS):
        return None
    for _ in range(contour_length - 1):
        for path, other in ((first, second), (second, first)):
            if not path.extend(random, WALLS | other.board):
                return None
    return first, second


def distractor(random: Random, taken: int, contour_length: int) -> Path | None:
    """One attempt at a short path."""
    if (INSIDE & ~taken).bit_count() < LEAST_FREE * SIDE**2:
        return None
    path = seeded(random, taken, PADDING)
    if path is None:
        return None
    for _ in range(contour_length - 1):
        if not path.extend(random, taken):
            return None
    return path


# Images


@dataclass(frozen=True)
class Drawing:
    """An image and what was drawn on it.

    Attributes:
        pixels: Grey values, uint8 ``[32, 32]``.
        label: 1 = the markers are the ends of one path.
        targets: The two long paths, each the ends (y, x) of its dashes, ``[dashes, 2, 2]``.
        distractors: The short paths, in the same form.
        markers: The centres (y, x) of the discs: the start of a path, the end of a path.
    """

    pixels: np.ndarray
    label: int
    targets: list[np.ndarray]
    distractors: list[np.ndarray]
    markers: list[tuple[int, int]]


def draw(random: Random, contour_length: int = 14) -> Drawing:
    """One image with a random label."""
    targets = None
    while targets is None:
        targets = two_paths(random, contour_length)
    short = contour_length // 3
    taken = WALLS | targets[0].board | targets[1].board
    distractors: list[Path] = []
    for _ in range(DISTRACTING // short):
        for _ in range(DISTRACTOR_TRIALS):
            path = distractor(random, taken, short)
            if path is not None:
                distractors.append(path)
                taken |= path.board
                break
    label, marked = random.randrange(2), random.randrange(2)
    markers = [targets[marked].tail, targets[marked if label else 1 - marked].head]
    return Drawing(
        pixels=rendered(targets, distractors, markers),
        label=label,
        targets=[path.ends() for path in targets],
        distractors=[path.ends() for path in distractors],
        markers=markers,
    )


def rendered(
    targets: tuple[Path, Path], distractors: list[Path], markers: list[tuple[int, int]]
) -> np.ndarray:
    """Everything on one image, scaled so that its brightest pixel is 255."""
    canvas = np.zeros((WIDTH, WIDTH))

    def press(y: int, x: int, ink: np.ndarray) -> None:
        part = canvas[
            y + EDGE - REACH : y + EDGE + REACH + 1, x + EDGE - REACH : x + EDGE + REACH + 1
        ]
        np.maximum(part, ink, out=part)

    for paths, level in ((targets, TARGET_LEVEL), (distractors, DISTRACTOR_LEVEL)):
        for path in paths:
            for y, x, angle in path.anchors:
                press(y, x, level * stamp(angle).ink)
    for y, x in markers:
        press(y, x, MARKER_LEVEL * disc())
    image = canvas[EDGE:-EDGE, EDGE:-EDGE]
    return np.rint(255 * image / image.max()).astype(np.uint8)


@overload
def images(
    count: int,
    seed: int,
    part: str,
    contour_length: int = ...,
    first: int = ...,
    with_paths: Literal[False] = ...,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def images(
    count: int,
    seed: int,
    part: str,
    contour_length: int = ...,
    first: int = ...,
    *,
    with_paths: Literal[True],
) -> tuple[np.ndarray, np.ndarray, list[Drawing]]: ...
def images(
    count: int,
    seed: int,
    part: str,
    contour_length: int = 14,
    first: int = 0,
    with_paths: bool = False,
) -> tuple[np.ndarray, np.ndarray] | tuple[np.ndarray, np.ndarray, list[Drawing]]:
    """Some images of a part.

    Every image has its own stream of random numbers, so that it depends on nothing but the seed,
    the part, its place there and the length of the paths.

    Args:
        count: n.
        seed: Decides all images.
        part: Any name; parts share no stream.
        contour_length: Dashes of a long path: 3, 6, 9 or 14.
        first: Place of the first image in the part.
        with_paths: Whether to return the drawings too.

    Returns:
        Grey values uint8 ``[n, 32, 32]``, labels uint8 ``[n]``, and the drawings if asked for.
    """
    if contour_length not in CONTOUR_LENGTHS:
        raise ValueError(f"contour_length is one of {CONTOUR_LENGTHS}, not {contour_length}")
    pixels = np.empty((count, SIDE, SIDE), dtype=np.uint8)
    labels = np.empty(count, dtype=np.uint8)
    drawings = []
    for place in range(count):
        random = Random(f"{seed} {part} {first + place} {contour_length}")
        drawing = draw(random, contour_length)
        pixels[place], labels[place] = drawing.pixels, drawing.label
        if with_paths:
            drawings.append(drawing)
    return (pixels, labels, drawings) if with_paths else (pixels, labels)


def load(
    train: int = 160_000,
    valid: int = 20_000,
    test: int = 20_000,
    seed: int = 0,
    *,
    contour_length: int = 14,
    workers: int = 1,
) -> Task:
    """Generate the task; the same arguments give the same examples.

    A core draws about 200 images per second with paths of 14 dashes, 600 with shorter ones.

    Args:
        train: Examples to train on.
        valid: Examples to choose a checkpoint by.
        test: Examples to report.
        seed: Decides all images.
        contour_length: Dashes of a long path: 3, 6, 9 or 14.
        workers: Processes that share the work; their number changes nothing but the time. With
            more than one, call this from a program that may be imported without running.
    """
    jobs = [
        (min(SHARE, count - first), seed, part, contour_length, first)
        for part, count in (("train", train), ("valid", valid), ("test", test))
        for first in range(0, count, SHARE)
    ]
    if workers == 1:
        made = [images(*job) for job in jobs]
    else:
        with get_context("spawn").Pool(workers) as pool:
            made = pool.starmap(images, jobs, chunksize=1)
    parts = {}
    for part in ("train", "valid", "test"):
        own = [share for share, job in zip(made, jobs, strict=True) if job[2] == part]
        pixels = np.concatenate([np.empty((0, SIDE, SIDE), np.uint8), *(one for one, _ in own)])
        labels = np.concatenate([np.empty(0, np.uint8), *(one for _, one in own)])
        # 0 stays padding.
        ids = pixels.reshape(-1, SIDE * SIDE).astype(np.uint16) + 1
        parts[part] = Examples(ids, labels)
    return Task(
        name=f"pathfinder-{contour_length}",
        title=f"Pathfinder 32 × 32, generated: paths of {contour_length} dashes",
        classes=2,
        vocabulary=257,
        **parts,
    )
